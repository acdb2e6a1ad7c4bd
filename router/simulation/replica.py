"""Rungs of simulated devices as replicas: what the real dispatcher is given."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from router.signals.link import Link
from router.simulation.device import Device, Work
from router.simulation.loop import LoopClock
from router.simulation.world import LinkSpec
from router.values.link import LinkSnapshot
from router.values.replica import ReplicaInfo, ReplicaSnapshot
from router.values.request import FinishReason, InferenceRequest, TokenChunk

_UNBOUNDED_ANSWER_TOKENS = 1024  # what a replica assumes of an answer without a cap


@dataclass(frozen=True, slots=True)
class Truth:
    """What the router must not know of a request.

    Attributes:
        answer_tokens: length of the answer, if nobody cuts it.
        prefill_noise, pace_noise: factors on its prefill time and its seconds a token.
        rtt_noise: factor on the round trip of its packets.
    """

    answer_tokens: int
    prefill_noise: float = 1.0
    pace_noise: float = 1.0
    rtt_noise: float = 1.0


class NetworkPath:
    """The link to one remote device: an uplink that all requests share, and what the router has learnt about it."""

    def __init__(
        self, spec: LinkSpec, endpoint: str, report_interval_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.known = Link(endpoint, clock=LoopClock(loop))
        self._spec = spec
        self._interval_s = report_interval_s
        self._loop = loop
        self._uplink_free_s = 0.0
        self._reported_at_s = -1.0

    def one_way_s(self, noise: float) -> float:
        return self._spec.rtt_ms / 2e3 * noise

    def send(self, sent_bytes: int, noise: float) -> float:
        """Take a body onto the uplink; return when it has arrived, on the loop's time."""
        now_s = self._loop.time()
        begins_s = max(now_s, self._uplink_free_s)
        self._uplink_free_s = begins_s + sent_bytes * 8 / (self._spec.uplink_mbps * 1e6)
        self.known.observe_transfer(sent_bytes, self._uplink_free_s - now_s)
        return self._uplink_free_s + self.one_way_s(noise)

    def report_age_s(self) -> float:
        """Return the age of the last load report; one that came since the last call has taught the round trip."""
        now_s = self._loop.time()
        last_s = now_s // self._interval_s * self._interval_s
        if last_s > self._reported_at_s:
            self._reported_at_s = last_s
            self.known.observe_rtt(self._spec.rtt_ms / 1e3)
        return now_s - last_s


class SimReplica:
    """`router.values.replica.Replica` over one rung of a simulated device.

    Args:
        truths: by request id.
        path: None for a local device.
    """

    def __init__(
        self, info: ReplicaInfo, device: Device, rung: int, truths: Mapping[str, Truth], path: NetworkPath | None
    ) -> None:
        self.info = info
        self._device = device
        self._rung = rung
        self._truths = truths
        self._path = path
        self._running = 0
        self._queued_prefill_tokens = 0
        self._pending_decode_tokens = 0

    @property
    def link(self) -> LinkSnapshot | None:
        return None if self._path is None else self._path.known.snapshot()

    def snapshot(self) -> ReplicaSnapshot:
        slots, here = self._device.spec.slots, self._running
        return ReplicaSnapshot(
            info=self.info,
            available=True,
            slots=slots,
            running=min(here, slots),
            queued=max(here - slots, 0),
            queued_prefill_tokens=self._queued_prefill_tokens,
            pending_decode_tokens=self._pending_decode_tokens,
            age_s=0.0 if self._path is None else self._path.report_age_s(),
        )

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer; see `router.values.replica.Replica.generate`."""
        truth, spec = self._truths[request.request_id], self._device.spec.rungs[self._rung]
        room = request.most_answer_tokens(self.info.context_tokens)
        rest = max(truth.answer_tokens - request.continuation_tokens, 1)
        reason = FinishReason.LENGTH if request.sampling.ignore_eos or rest >= room else FinishReason.STOP
        call = _Call(min(room, _UNBOUNDED_ANSWER_TOKENS), asyncio.get_running_loop())
        prefill_s = request.prompt_tokens / spec.prefill_tokens_per_s * truth.prefill_noise
        tokens = room if request.sampling.ignore_eos else min(rest, room)
        work = Work(self._rung, prefill_s, tokens, truth.pace_noise, call.take)
        self._running += 1
        self._queued_prefill_tokens += request.prompt_tokens
        self._pending_decode_tokens += call.most_tokens
        self._send(work, call, request.prompt_bytes, truth)
        try:
            while True:
                new = await call.next()
                if not call.out:
                    self._queued_prefill_tokens -= request.prompt_tokens
                call.out += new
                self._pending_decode_tokens -= new
                last = call.out == tokens
                yield _chunk(new, reason if last else None)
                if last:
                    return
        finally:
            self._running -= 1
            self._pending_decode_tokens -= call.most_tokens - call.out
            if not call.out:
                self._queued_prefill_tokens -= request.prompt_tokens
            if not work.left:
                self._cancel(work, truth)

    def _send(self, work: Work, call: _Call, sent_bytes: int, truth: Truth) -> None:
        path = self._path
        if path is None:
            self._device.enter(work)
            return
        back_s, loop = path.one_way_s(truth.rtt_noise), call.loop

        def deliver(new: int) -> None:
            loop.call_later(back_s, call.take, new)

        work.deliver = deliver
        loop.call_at(path.send(sent_bytes, truth.rtt_noise), self._device.enter, work)

    def _cancel(self, work: Work, truth: Truth) -> None:
        """Give the slot back: at once on this machine, half a round trip later on another one."""
        if self._path is None:
            self._device.leave(work)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(self._path.one_way_s(truth.rtt_noise), self._device.leave, work)


class _Call:
    """The router's end of one request: counts of new tokens, one a chunk, as they arrive."""

    __slots__ = ("_new", "_reader", "loop", "most_tokens", "out")

    def __init__(self, most_tokens: int, loop: asyncio.AbstractEventLoop) -> None:
        self.most_tokens = most_tokens
        self.loop = loop
        self.out = 0
        self._new: deque[int] = deque()
        self._reader: asyncio.Future[None] | None = None

    def take(self, new: int) -> None:
        self._new.append(new)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> int:
        if not self._new:
            self._reader = self.loop.create_future()
            await self._reader
        return self._new.popleft()


@lru_cache(4096)
def _chunk(tokens: int, reason: FinishReason | None) -> TokenChunk:
    return TokenChunk("x", tokens, finish_reason=reason)
