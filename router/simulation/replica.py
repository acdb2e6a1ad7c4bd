"""Rungs of simulated devices as replicas: what the real dispatcher is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from router.base.errors import ReplicaUnreachable
from router.simulation.answer_stream import stream_of
from router.simulation.call import Call
from router.simulation.device import Device, Work
from router.simulation.network import NetworkPath
from router.simulation.prefix_cache import PrefixCache
from router.values.chunk import FinishReason, TokenChunk
from router.values.link import LinkSnapshot
from router.values.replica import Give, ReplicaInfo, ReplicaSnapshot
from router.values.request import InferenceRequest

_UNBOUNDED_ANSWER_TOKENS = 1024  # what a replica assumes of an answer without a cap


@dataclass(frozen=True, slots=True)
class Truth:
    """What the router must not know of a request.

    Attributes:
        answer_tokens: length of the answer, if nobody cuts it.
        prefill_noise, pace_noise: factors on its prefill time and its seconds a token.
        rtt_noise: factor on the round trip of its packets.
        answer_ids: what it would generate, as far as anybody knows.
    """

    answer_tokens: int
    prefill_noise: float = 1.0
    pace_noise: float = 1.0
    rtt_noise: float = 1.0
    answer_ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Reachability:
    """What the router's tier knows of whether a device can be reached.

    Attributes:
        why: why it cannot; empty where it can.
        dead: variants that it was told are not served there.
    """

    why: str = ""
    dead: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Host:
    """Where replicas run; those of one device share it.

    Attributes:
        path: None for a local device.
    """

    device: Device
    path: NetworkPath | None
    known: Reachability


_SELF_TEST = Truth(answer_tokens=1)  # a request of the router's own, which no trace knows


class SimReplica:
    """`router.values.replica.Replica` over one rung of a simulated device.

    Args:
        rung: position among the device's rungs.
        truths: by request id.

    Attributes:
        alive: it serves; `die` and `revive` change it.
        known, device, path: of its host.
        loop: whose time it keeps.
        calls: what was sent here and has not ended, in that order.
        queued_prefill_tokens, pending_decode_tokens: as in its snapshots.
    """

    def __init__(self, info: ReplicaInfo, host: Host, rung: int, truths: Mapping[str, Truth]) -> None:
        self.info = info
        self.alive = True
        self.known = host.known
        self.device = host.device
        self._rung = rung
        self._truths = truths
        self.path = host.path
        self.loop = host.device.loop
        room_tokens = host.device.spec.kv_tokens
        self._cache = PrefixCache(room_tokens) if room_tokens is not None else None
        self.calls: dict[Call, None] = {}
        self.queued_prefill_tokens = 0
        self.pending_decode_tokens = 0

    @property
    def link(self) -> LinkSnapshot | None:
        return None if self.path is None else self.path.known.snapshot()

    def snapshot(self) -> ReplicaSnapshot:
        slots, here = self.device.spec.slots, len(self.calls)
        why = self.known.why or ("it is not served there now" if self.info.variant in self.known.dead else "")
        return ReplicaSnapshot(
            info=self.info,
            available=not why,
            slots=slots,
            running=min(here, slots),
            queued=max(here - slots, 0),
            queued_prefill_tokens=self.queued_prefill_tokens,
            pending_decode_tokens=self.pending_decode_tokens,
            age_s=0.0 if self.path is None else self.path.report_age_s(),
            why=why,
        )

    def die(self) -> None:
        """Serve nobody; what runs here breaks, and its callers learn of it when that has come back to them."""
        self.alive = False
        if self._cache is not None:
            self._cache.clear()
        if self.path is None:
            self.known.dead.add(self.info.variant)
            self.lose("it ended")
        else:
            self.loop.call_later(self.path.one_way_s(1.0), self.lose, "it ended")

    def revive(self) -> None:
        """Serve again."""
        self.alive = True
        if self.path is None:
            self.known.dead.discard(self.info.variant)

    def lose(self, why: str) -> None:
        """Break every request that waits for something from here."""
        for call in list(self.calls):
            call.fail(f"{self.info.replica_id}: {why}")

    def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer; see `router.values.replica.Replica.generate`."""
        return stream_of(self, request, None)

    def push(self, request: InferenceRequest, give: Give) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer; see `router.values.replica.Pushes`."""
        return stream_of(self, request, give)

    async def admit(self) -> None:
        """Return where it serves; else say that nobody does, after the round trip that it takes to learn that.

        Raises:
            ReplicaUnreachable: nobody serves here.
        """
        if self.alive and not self.known.why:
            return
        if self.path is not None and not self.known.why:
            await asyncio.sleep(2 * self.path.one_way_s(1.0))
        raise ReplicaUnreachable(f"{self.info.replica_id}: {self.known.why or 'connection refused'}")

    def send(self, request: InferenceRequest, give: Give | None) -> Sent:
        """Send a request to the device."""
        truth, spec = self._truths.get(request.request_id, _SELF_TEST), self.device.spec.rungs[self._rung]
        endless, room = request.sampling.ignore_eos, request.most_answer_tokens(self.info.context_tokens)
        rest = max(truth.answer_tokens - request.continuation_tokens, 1)
        cached, call = self._find(request), Call(min(room, _UNBOUNDED_ANSWER_TOKENS), self.loop)
        computed = request.prompt_tokens - (cached or 0)
        work = Work(
            self._rung,
            spec.prefill_s(computed) * truth.prefill_noise,
            room if endless else min(rest, room),
            truth.pace_noise,
            call.take,
        )
        reason = FinishReason.LENGTH if endless or rest >= room else FinishReason.STOP
        sent = Sent(self, request, truth, call, work, reason=reason, computed=computed, cached=cached, give=give)
        if give is not None:
            call.past = sent.pass_on
        self.calls[call] = None
        self.hold(computed + work.tokens)
        self.queued_prefill_tokens += request.prompt_tokens
        self.pending_decode_tokens += call.most_tokens
        if self.path is None:
            self.device.enter(work)
        else:
            work.deliver = sent.deliver
            self.loop.call_at(self.path.send(request.prompt_bytes, truth.rtt_noise), self.device.enter, work)
        return sent

    def _find(self, request: InferenceRequest) -> int | None:
        """Return how many tokens of the prompt need not be computed, None where that is not told."""
        if self._cache is None:
            return None
        ids = request.encoded.token_ids if request.encoded is not None else ()
        return self._cache.find(request.cache_owner, ids)

    def keep(self, request: InferenceRequest, answer_ids: Sequence[int]) -> None:
        """Keep what was computed of a request, where the device does."""
        if self._cache is not None and request.encoded is not None:
            self._cache.keep(request.cache_owner, (*request.encoded.token_ids, *answer_ids))

    def hold(self, tokens: int) -> None:
        """Take the room of a sequence, or give it back: a negative number."""
        if self._cache is not None:
            self._cache.hold(tokens)


class Sent:
    """A request on its way through a replica, and what of its answer has come back.

    Attributes:
        call: the router's end of it.
    """

    __slots__ = ("_cached", "_computed", "_give", "_reason", "_replica", "_request", "_truth", "_work", "call")

    def __init__(
        self,
        replica: SimReplica,
        request: InferenceRequest,
        truth: Truth,
        call: Call,
        work: Work,
        *,
        reason: FinishReason,
        computed: int,
        cached: int | None,
        give: Give | None,
    ) -> None:
        """Take a request with what is to become of it.

        Args:
            reason: why its answer will end.
            computed, cached: tokens of its prompt that the device computes, and does not have to.
        """
        self.call = call
        self._replica = replica
        self._request = request
        self._truth = truth
        self._work = work
        self._reason = reason
        self._computed = computed
        self._cached = cached
        self._give = give

    def deliver(self, new: int) -> None:
        """Let new tokens travel back from another machine."""
        replica, call = self._replica, self.call
        if replica.path is not None:
            replica.loop.call_later(replica.path.one_way_s(self._truth.rtt_noise), call.take, new)

    def pass_on(self, new: int) -> bool:
        """Give text on past the reader, whose the first piece of an answer is, and the last."""
        call, give = self.call, self._give
        if give is None or not call.out or call.out + new == self._work.tokens or not give([_chunk(new, None)]):
            return False
        call.out += new
        self._replica.pending_decode_tokens -= new
        return True

    def chunk(self, new: int) -> TokenChunk:
        """Take so many new tokens as the next chunk of the answer."""
        replica, call, told = self._replica, self.call, None
        if not call.out:
            replica.queued_prefill_tokens -= self._request.prompt_tokens
            replica.keep(self._request, ())
            told = self._cached
        call.out += new
        replica.pending_decode_tokens -= new
        return _chunk(new, self._reason if call.out == self._work.tokens else None, told)

    def end(self) -> None:
        """Give back what it holds; what still runs is cancelled."""
        replica, call, work = self._replica, self.call, self._work
        call.past = None  # it holds this, which holds the call
        del replica.calls[call]
        replica.pending_decode_tokens -= call.most_tokens - call.out
        if not call.out:
            replica.queued_prefill_tokens -= self._request.prompt_tokens
        else:
            replica.keep(self._request, self._truth.answer_ids[: call.out])
        replica.hold(-self._computed - work.tokens)
        if work.left:
            return
        if replica.path is None or not replica.alive:  # at once on this machine, half a round trip later on another one
            replica.device.leave(work)
        else:
            replica.loop.call_later(replica.path.one_way_s(self._truth.rtt_noise), replica.device.leave, work)


@lru_cache(4096)
def _chunk(tokens: int, reason: FinishReason | None, cached_tokens: int | None = None) -> TokenChunk:
    return TokenChunk("x", tokens, finish_reason=reason, cached_tokens=cached_tokens)
