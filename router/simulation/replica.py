"""Rungs of simulated devices as replicas: what the real dispatcher is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from router.base.errors import ReplicaUnreachable
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
    """

    def __init__(self, info: ReplicaInfo, host: Host, rung: int, truths: Mapping[str, Truth]) -> None:
        self.info = info
        self.alive = True
        self._known = host.known
        self._device = host.device
        self._rung = rung
        self._truths = truths
        self._path = host.path
        room_tokens = host.device.spec.kv_tokens
        self._cache = PrefixCache(room_tokens) if room_tokens is not None else None
        self._calls: dict[Call, None] = {}
        self._queued_prefill_tokens = 0
        self._pending_decode_tokens = 0

    @property
    def link(self) -> LinkSnapshot | None:
        return None if self._path is None else self._path.known.snapshot()

    def snapshot(self) -> ReplicaSnapshot:
        slots, here = self._device.spec.slots, len(self._calls)
        why = self._known.why or ("it is not served there now" if self.info.variant in self._known.dead else "")
        return ReplicaSnapshot(
            info=self.info,
            available=not why,
            slots=slots,
            running=min(here, slots),
            queued=max(here - slots, 0),
            queued_prefill_tokens=self._queued_prefill_tokens,
            pending_decode_tokens=self._pending_decode_tokens,
            age_s=0.0 if self._path is None else self._path.report_age_s(),
            why=why,
        )

    def die(self) -> None:
        """Serve nobody; what runs here breaks, and its callers learn of it when that has come back to them."""
        self.alive = False
        if self._cache is not None:
            self._cache.clear()
        if self._path is None:
            self._known.dead.add(self.info.variant)
            self.lose("it ended")
        else:
            asyncio.get_running_loop().call_later(self._path.one_way_s(1.0), self.lose, "it ended")

    def revive(self) -> None:
        """Serve again."""
        self.alive = True
        if self._path is None:
            self._known.dead.discard(self.info.variant)

    def lose(self, why: str) -> None:
        """Break every request that waits for something from here."""
        for call in list(self._calls):
            call.fail(f"{self.info.replica_id}: {why}")

    def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer; see `router.values.replica.Replica.generate`."""
        return self._stream(request, None)

    def push(self, request: InferenceRequest, give: Give) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer; see `router.values.replica.Pushes`."""
        return self._stream(request, give)

    async def _stream(self, request: InferenceRequest, give: Give | None) -> AsyncGenerator[TokenChunk, None]:
        if not self.alive or self._known.why:
            await self._refuse()
        truth, spec = self._truths.get(request.request_id, _SELF_TEST), self._device.spec.rungs[self._rung]
        room = request.most_answer_tokens(self.info.context_tokens)
        rest = max(truth.answer_tokens - request.continuation_tokens, 1)
        reason = FinishReason.LENGTH if request.sampling.ignore_eos or rest >= room else FinishReason.STOP
        call = Call(min(room, _UNBOUNDED_ANSWER_TOKENS), asyncio.get_running_loop())
        cached = self._find(request)
        prefill_s = spec.prefill_s(request.prompt_tokens - (cached or 0)) * truth.prefill_noise
        tokens = room if request.sampling.ignore_eos else min(rest, room)
        held = request.prompt_tokens - (cached or 0) + tokens
        work = Work(self._rung, prefill_s, tokens, truth.pace_noise, call.take)
        call.past = None if give is None else partial(self._pass_on, call, tokens, give)
        self._calls[call] = None
        self._hold(held)
        self._queued_prefill_tokens += request.prompt_tokens
        self._pending_decode_tokens += call.most_tokens
        self._send(work, call, request.prompt_bytes, truth)
        try:
            while True:
                new = await call.next()
                told = None
                if not call.out:
                    self._queued_prefill_tokens -= request.prompt_tokens
                    self._keep(request, ())
                    told = cached
                call.out += new
                self._pending_decode_tokens -= new
                last = call.out == tokens
                yield _chunk(new, reason if last else None, told)
                if last:
                    return
        finally:
            call.past = None  # it holds the call
            del self._calls[call]
            self._pending_decode_tokens -= call.most_tokens - call.out
            if not call.out:
                self._queued_prefill_tokens -= request.prompt_tokens
            else:
                self._keep(request, truth.answer_ids[: call.out])
            self._hold(-held)
            if not work.left:
                self._cancel(work, truth)

    def _pass_on(self, call: Call, tokens: int, give: Give, new: int) -> bool:
        """Give text on past the reader, whose the first piece of an answer of `tokens` is, and the last."""
        if not call.out or call.out + new == tokens or not give([_chunk(new, None)]):
            return False
        call.out += new
        self._pending_decode_tokens -= new
        return True

    def _find(self, request: InferenceRequest) -> int | None:
        """Return how many tokens of the prompt need not be computed, None where that is not told."""
        if self._cache is None:
            return None
        ids = request.encoded.token_ids if request.encoded is not None else ()
        return self._cache.find(request.cache_owner, ids)

    def _keep(self, request: InferenceRequest, answer_ids: Sequence[int]) -> None:
        if self._cache is not None and request.encoded is not None:
            self._cache.keep(request.cache_owner, (*request.encoded.token_ids, *answer_ids))

    def _hold(self, tokens: int) -> None:
        """Take the room of a sequence, or give it back: a negative number."""
        if self._cache is not None:
            self._cache.hold(tokens)

    async def _refuse(self) -> None:
        """Say that nobody serves it here, after the round trip that it takes to learn that.

        Raises:
            ReplicaUnreachable: always.
        """
        if self._path is not None and not self._known.why:
            await asyncio.sleep(2 * self._path.one_way_s(1.0))
        raise ReplicaUnreachable(f"{self.info.replica_id}: {self._known.why or 'connection refused'}")

    def _send(self, work: Work, call: Call, sent_bytes: int, truth: Truth) -> None:
        path = self._path
        if path is None:
            self._device.enter(work)
            return
        loop = call.loop

        def deliver(new: int) -> None:
            loop.call_later(path.one_way_s(truth.rtt_noise), call.take, new)

        work.deliver = deliver
        loop.call_at(path.send(sent_bytes, truth.rtt_noise), self._device.enter, work)

    def _cancel(self, work: Work, truth: Truth) -> None:
        """Give the slot back: at once on this machine, half a round trip later on another one."""
        if self._path is None or not self.alive:
            self._device.leave(work)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(self._path.one_way_s(truth.rtt_noise), self._device.leave, work)


@lru_cache(4096)
def _chunk(tokens: int, reason: FinishReason | None, cached_tokens: int | None = None) -> TokenChunk:
    return TokenChunk("x", tokens, finish_reason=reason, cached_tokens=cached_tokens)
