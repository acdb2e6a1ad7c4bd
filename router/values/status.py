"""What an operator is told of a tier: `GET /v1/status`, and `overspill cloud status`. Plain values, encoded as JSON."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from router.values.replica import Replica


class ReplicaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica can tell an operator beside its load; what it does not know is left out.

    Attributes:
        kind: what computes or serves it: `torch`, `onnx`, `vllm`, `llama.cpp`, `overspill`, ….
        software: name and version of what serves it, e.g. `torch 2.12.0`.
        version: of what is deployed: a digest or a label.
        kv_usage: used share of its KV cache in [0, 1].
        cold_starts: how often its model was loaded since the tier started, restarts included.
        cold_start_s: seconds that the last load took.
        computes_on: the processors that it really runs on.
    """

    kind: str = ""
    software: str = ""
    version: str = ""
    kv_usage: float | None = None
    cold_starts: int | None = None
    cold_start_s: float | None = None
    computes_on: tuple[str, ...] = ()


NO_FACTS = ReplicaFacts()


@runtime_checkable
class TellsFacts(Protocol):
    """A replica that has more to tell an operator than its load."""

    def facts(self) -> ReplicaFacts:
        """Return them as they are now. Cheap; never does I/O."""
        ...


def facts_of(replica: Replica) -> ReplicaFacts:
    """Return what a replica tells, nothing where it does not."""
    return replica.facts() if isinstance(replica, TellsFacts) else NO_FACTS


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What a model has done since the tier started.

    Attributes:
        answered, answered_s: requests that ended with an answer, and the seconds from their acceptance to its end.
        waited_s: of these seconds, those before a replica got the request.
        failed, failed_s: the same of requests that a replica had begun and that ended without: broken, given up, left.
        last_at_s: when the last of all ended, on the tier's clock; None while none has.
    """

    answered: int = 0
    answered_s: float = 0.0
    waited_s: float = 0.0
    failed: int = 0
    failed_s: float = 0.0
    last_at_s: float | None = None

    def __add__(self, other: Tally) -> Tally:
        ends = [at_s for at_s in (self.last_at_s, other.last_at_s) if at_s is not None]
        return Tally(
            answered=self.answered + other.answered,
            answered_s=self.answered_s + other.answered_s,
            waited_s=self.waited_s + other.waited_s,
            failed=self.failed + other.failed,
            failed_s=self.failed_s + other.failed_s,
            last_at_s=max(ends, default=None),
        )


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One replica now.

    Attributes:
        endpoint, device, backend, tier, family, variant, rung, quality, context_tokens, remote: as in `ReplicaInfo`.
        available, why, back_in_s, slots, queued_prefill_tokens, pending_decode_tokens, kv_free_tokens, load_age_s: its
            load, as in `ReplicaSnapshot`.
        running, waiting: requests of this tier that it has begun, and that wait inside it.
        load_running, load_queued: what it reports itself, others' requests included.
        breaker, breaker_why: `closed`, `open` or `half_open`, and what opened it.
        facts: what else it tells.
    """

    replica: str
    endpoint: str
    device: str
    tier: str
    family: str
    variant: str
    rung: int
    quality: float
    context_tokens: int
    remote: bool
    available: bool
    slots: int
    running: int
    waiting: int
    load_running: int
    load_queued: int
    breaker: str
    backend: str = ""
    why: str = ""
    back_in_s: float = 0.0
    queued_prefill_tokens: int = 0
    pending_decode_tokens: int = 0
    kv_free_tokens: int | None = None
    load_age_s: float = 0.0
    breaker_why: str = ""
    facts: ReplicaFacts = NO_FACTS


class RouterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The router of a tier now.

    Attributes:
        waiting: requests that no replica has begun: in the tier's own queue, and inside replicas.
        queued: those of them in the tier's own queue.
        running: requests that replicas have begun, those of a tier above included.
        overloaded: quality is given up for promises.
        unreached: what is configured and was never reached, so that no replica of it is known, each with the reason.
    """

    policy: str
    waiting: int
    queued: int
    running: int
    overloaded: bool
    replicas: tuple[ReplicaStatus, ...] = ()
    unreached: tuple[str, ...] = ()


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or one MIG slice of one, as NVML reads it; what it does not tell is left out.

    Attributes:
        index: as CUDA counts without CUDA_VISIBLE_DEVICES; of a slice, `GPU:SLICE`.
        uuid: as CUDA_VISIBLE_DEVICES takes it.
        utilization: share of the last moments in which something ran, in [0, 1].
        throttled: why its clocks are held down, in NVML's words; empty while they are not.
    """

    index: str
    uuid: str
    name: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: tuple[str, ...] = ()


class GpuReadings(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of a machine.

    Attributes:
        why_none: why there is no figure; empty where there are some.
    """

    gpus: tuple[GpuStatus, ...] = ()
    why_none: str = ""


NO_GPU_READINGS = GpuReadings(why_none="this tier does not read GPUs")


class JobsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of a tier now.

    Attributes:
        batches: that have not ended, by status.
        lines_running: requests of batches that the tier computes now.
        held: why no line begins; empty while lines may, and where there are none.
        deferred: requests that wait to be answered.
        held_bytes: what all of it takes on the disk.
        webhook_fault: why the webhook was not told; empty where it was, or there is none.
        database_fault: why the database of jobs cannot be opened, and what to do; empty where it is open.
    """

    batches: dict[str, int]
    lines_running: int
    held: str
    deferred: int
    held_bytes: int
    webhook_fault: str = ""
    database_fault: str = ""


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A tier now.

    Attributes:
        overspill: version of the software.
        ready, why: whether it takes requests, and if not, why.
        up_s: seconds since its gateway was built.
        in_flight: inference requests inside its gateway, those that are still read or tokenized included.
        notices: what an operator should know although it is ready.
        jobs: None where the tier keeps none.
    """

    tier: str
    overspill: str
    ready: bool
    up_s: float
    in_flight: int
    router: RouterStatus
    why: str = ""
    notices: tuple[str, ...] = ()
    gpus: GpuReadings = NO_GPU_READINGS
    jobs: JobsStatus | None = None


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(TierStatus)


def encode(status: TierStatus) -> bytes:
    """Return a status as JSON; figures that are not finite become null."""
    return _ENCODER.encode(status)


def decode(body: bytes) -> TierStatus:
    """Read what `encode` wrote.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _DECODER.decode(body)
