"""What the router knows about anything that can run a model: a static description, a snapshot, a stream."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast, final

from router.base.structs import FrozenStruct
from router.values.chunk import TokenChunk
from router.values.feature import NOTHING, Feature
from router.values.link import LinkSnapshot
from router.values.request import InferenceRequest, Locality
from router.values.task import GENERATES, Task
from router.values.tensors import Signature


@final
@dataclass(frozen=True, slots=True)
class SpeedPrior:
    """Throughput before anything was observed, from the hardware profile or the catalogue.

    Attributes:
        prefill_tokens_per_s: prompt tokens a second, one request alone.
        decode_tokens_per_s: generated tokens a second, batch 1.
        decode_batch_slope: relative growth of one decode step per further sequence in the batch:
            step_s(b) = (1 + slope · (b − 1)) / decode_tokens_per_s.
        source: where the figures come from, for the decision record.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    decode_batch_slope: float = 0.2
    source: str = "default"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model stands on its family's ladder; fields as in `ReplicaInfo`."""

    family: str
    rung: int = 0
    quality: float = 1.0


@dataclass(frozen=True, slots=True)
class Unreached:
    """A configured source of replicas that was never reached: what it serves is not known yet.

    Attributes:
        who: what to call it in messages.
        why: what the last attempt met.
        where: its address, for operators alone.
        remote: not on this very device, so `local-only` excludes it.
    """

    who: str
    why: str
    where: str = ""
    remote: bool = True

    @property
    def text(self) -> str:
        return f"not reached yet, so what it serves is not known; {self.why}"

    def within(self, *localities: Locality) -> bool:
        """Whether each of the localities lets a request go there."""
        return not self.remote or Locality.LOCAL_ONLY not in localities


@final
@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What does not change while a replica lives.

    Attributes:
        replica_id: unique in the tier, e.g. `local/smollm2-135m-int8` or `cloud/smollm2-135m`.
        endpoint: replicas that fail together share one (`local`, or the upstream's base URL): the breaker's key.
        tier: `edge` or `cloud`: where the model runs.
        remote: reached through an upstream tier, so `local-only` excludes it.
        family, variant: catalogue names; a request for the family may be served by any of its variants.
        rung: position on the family's ladder, 0 is the best.
        quality: catalogue score in [0, 1], relative to the family's reference.
        context_tokens: window for prompt and answer together on this replica.
        device: what its rungs compute on, where that is not all of `endpoint`; replicas of one device share its slots.
        backend: the `[[backends]]` entry that it comes from; empty for this tier's own and its upstream's.
        lacks: what requests may need and it does not do; see `InferenceRequest.needs`.
        version: of what serves there, as its source tells it; empty where it tells none.
        tasks: what it does.
        leaves_steps: what was cancelled or is held up delays nobody: it leaves a step for which nobody waits any more.
        holds_up: it is a `HoldsUp`.
        offers: of what only some servers do, what it does; see `InferenceRequest.wants`.
        signature: the tensors of a pipeline; None of any other.
        turn_tokens: where requests take turns, what of another one is computed before a newcomer at most; 0: all of it.
    """

    replica_id: str
    endpoint: str
    tier: str
    remote: bool
    family: str
    variant: str
    rung: int
    quality: float
    context_tokens: int
    prior: SpeedPrior
    device: str = ""
    backend: str = ""
    lacks: frozenset[Feature] = frozenset()
    version: str = ""
    tasks: frozenset[Task] = GENERATES
    leaves_steps: bool = False
    holds_up: bool = False
    offers: frozenset[Feature] = NOTHING
    signature: Signature | None = None
    turn_tokens: int = 0

    def before_newcomers(self, prompt_tokens: int) -> int:
        """Return what of a request's prompt is computed before that of one that comes later, at most."""
        turn = self.turn_tokens
        return turn if 0 < turn < prompt_tokens else prompt_tokens

    @property
    def called(self) -> str:
        """What callers are told it is: the ids of a backend's servers hold their addresses."""
        return without_address(self.replica_id)

    @property
    def device_key(self) -> str:
        """Name the device: replicas with one key divide its slots and its time."""
        return self.device or self.endpoint


_ADDRESS = re.compile(r"^([^@/]+)@[^/]*")


def without_address(replica_id: str) -> str:
    """Return a replica's id without the address by which servers of one backend are told apart."""
    return _ADDRESS.sub(r"\1", replica_id)


class ReplicaSnapshot(FrozenStruct, frozen=True):
    """A frozen snapshot of a replica's load. Made for every replica at every look: see `router.values.prediction`.

    Attributes:
        available: False when the replica cannot take requests now; `why` says so in a few words.
        slots: sequences it runs at once.
        running, queued: requests in slots; requests waiting inside the replica.
        queued_prefill_tokens: prompt tokens accepted and not yet computed.
        pending_decode_tokens: upper estimate of tokens still to generate for running and queued requests.
        kv_free_tokens: room left in the KV cache, None if the replica does not know.
        age_s: how old the load figures are (remote replicas report now and then).
        back_in_s: seconds until it is expected to be available again, 0 where it is or nobody knows.
        credits: requests that its tier lets this one send now, shared by all its replicas. They take the place of free
            slots: it counts what others send too, and how long its queue may be. None where it issues none.
        credit_in_s: seconds until the next credit is expected, where there is none.
        engines: among which its tier spreads what is sent here; a prompt holds up what runs on its own alone.
    """

    info: ReplicaInfo
    available: bool
    slots: int
    running: int = 0
    queued: int = 0
    queued_prefill_tokens: int = 0
    pending_decode_tokens: int = 0
    kv_free_tokens: int | None = None
    age_s: float = 0.0
    why: str = ""
    back_in_s: float = 0.0
    credits: int | None = None
    credit_in_s: float = 0.0
    engines: int = 1


class Replica(Protocol):
    """An addressable copy serving one model variant."""

    @property
    def info(self) -> ReplicaInfo:
        """The static description."""
        ...

    @property
    def link(self) -> LinkSnapshot | None:
        """The network link to it as it is now, None if it runs in this process or on this host."""
        ...

    def snapshot(self) -> ReplicaSnapshot:
        """Return the load now. Cheap: called for every candidate of every decision; never does I/O."""
        ...

    def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer; closing the generator cancels the work on the replica.

        Raises:
            InvalidRequest: the replica cannot serve this request at all; sending it elsewhere may still help.
            Refused: no room; carries the replica's own estimate of when to come back.
            ReplicaUnreachable: nothing was generated.
            ReplicaBroken: the stream ended early.
        """
        ...


Give = Callable[[list[TokenChunk]], bool]
"""Takes chunks of text, all of them or, where it returns False, none."""


class Pushes(Protocol):
    """A replica that hears of its text by a callback, and hands it on from there: no task wakes for each token."""

    def push(self, request: InferenceRequest, give: Give) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer as `Replica.generate` does, past its reader while that waits for the next chunk.

        Args:
            give: is given the text that comes then, all that is there at once; what it does not take is yielded, and
                so is whatever is more than text.
        """
        ...


def pushes(replica: Replica) -> Pushes | None:
    """Return a replica that `Pushes` as that. For each attempt: `isinstance` of a protocol takes 10 µs."""
    return cast("Pushes", replica) if hasattr(replica, "push") else None


class LeadsOn(Protocol):
    """A replica of another tier, which may have tiers above it."""

    def reach(self) -> Mapping[str, int]:
        """Return the instances of tiers that requests may come to through it, with the links to each from there."""
        ...


def reach_of(replica: Replica) -> Mapping[str, int]:
    """Return what a replica that `LeadsOn` tells; nothing of any other."""
    return cast("LeadsOn", replica).reach() if hasattr(replica, "reach") else {}


class HoldsUp(Protocol):
    """A replica that holds requests that yield (`Objective.yields`) up for others, with all that they have.

    They are no part of its snapshots, and it says itself when it has died: nobody need hear of them for a while.
    """

    def limit_lines(self, lines: int | None) -> None:
        """Let that many of them be computed.

        Args:
            lines: in one step, whoever else is in it; None: all of them, while the replica has no other request.
        """
        ...


def holds_up(replica: Replica) -> HoldsUp | None:
    """Return a replica that `HoldsUp` as that."""
    return cast("HoldsUp", replica) if hasattr(replica, "limit_lines") else None
