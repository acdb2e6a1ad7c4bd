"""One rung of an upstream tier, as a replica of this one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import replace

from router.base.clock import Clock
from router.base.errors import InvalidRequest, Refused, ReplicaUnreachable
from router.signals.credit_account import CreditAccount
from router.upstream.codec import embeddings, pipelines
from router.upstream.codec import openai as openai_client
from router.upstream.exchange import passed_reply
from router.upstream.exchange.call import UpstreamRequest
from router.upstream.exchange.running import Running, RunningWork
from router.upstream.exchange.stream import TransferSample, fetch_answer, fetch_whole, open_stream
from router.upstream.http.silence import LostNews
from router.upstream.http.transport import StreamingClient
from router.values.chunk import FinishReason, TokenChunk
from router.values.link import LinkSnapshot
from router.values.replica import Give, ReplicaInfo, ReplicaSnapshot
from router.values.request import InferenceRequest
from router.values.status import ReplicaFacts
from router.values.task import Call, PassedCall, TensorCall
from router.wire.kserve.request import HEADER_LENGTH
from router.wire.load import LoadReport, VariantLoad

if TYPE_CHECKING:
    from router.signals.link import Link

_UNBOUNDED_ANSWER_TOKENS = 512
"""What an answer without `max_tokens` is taken for in the estimate of pending work."""
_UNREPORTED_SLOTS = 64
"""Requests at once for an upstream that reports no load: its own queue and its refusals say when that is too many."""
_FEW = 4
"""Answers at once, up to which a first text goes out before much that came with it is parsed. More of them have more of
fewer turns of the event loop."""

_BURST = 8
"""Chunks that came at once, from which on they are given on apart from the last: that is one write more."""


@dataclass(slots=True)
class Condition:
    """What polling has found out about an upstream, shared by its replicas.

    Attributes:
        reachable: fewer probes in a row have failed than it takes to be lost.
        why: in a few words, when requests should not go there.
        back_in_s: seconds until it takes requests again, by its own word; 0 where it says nothing.
    """

    reachable: bool = False
    ready: bool = False
    why: str = "not reached yet"
    back_in_s: float = 0.0


class UpstreamContext(Protocol):
    """What a replica needs of its tier."""

    condition: Condition
    lost: LostNews
    client: StreamingClient
    clock: Clock
    link: Link
    credits: CreditAccount
    facts: ReplicaFacts
    reach: Mapping[str, int]

    @property
    def who(self) -> str:
        """What to call the upstream in messages."""
        ...

    def call(self, request: InferenceRequest, info: ReplicaInfo) -> UpstreamRequest:
        """Return what to send for `request`."""
        ...

    def learn(self, transfer: TransferSample) -> None:
        """Learn about link and load from a real response."""
        ...

    def refused(self, info: ReplicaInfo, request: InferenceRequest, error: InvalidRequest) -> None:
        """Learn from what a model says is wrong with a request."""
        ...

    def doubt(self) -> None:
        """Ask for a probe now: a request could not reach the upstream."""
        ...

    def used(self) -> None:
        """A request goes there now."""
        ...


class _Reported(msgspec.Struct):
    """The last load report."""

    load: VariantLoad | None = None
    waiting: int = 0
    at_s: float = 0.0


@dataclass(slots=True, eq=False)
class UpstreamReplica:
    """Streams from the upstream's gateway, and keeps its load between two reports: what was sent since counts too."""

    info: ReplicaInfo
    _tier: UpstreamContext
    _running: RunningWork = field(default_factory=RunningWork)
    _reported: _Reported = field(default_factory=_Reported)
    chunks_received: int = 0
    unready: Condition | None = None
    """What is known of this model alone, while it does not serve although its server does."""

    @property
    def link(self) -> LinkSnapshot | None:
        """The network link to it; None where it runs on this device."""
        return self._tier.link.snapshot(warm=self._tier.client.warm) if self.info.remote else None

    @property
    def busy(self) -> bool:
        """Whether requests of this tier run there."""
        return len(self._running) > 0

    def in_flight(self, began_by_s: float) -> int:
        """Count the requests of this tier that run there and began by then."""
        return self._running.began_by(began_by_s)

    def report(self, report: LoadReport, at_s: float, *, counts_ours: bool = True) -> None:
        """Take a load report in, unless a later one is here already.

        Args:
            at_s: when it was asked for.
            counts_ours: what it tells holds the requests of this tier; without that, they are counted here.
        """
        if at_s < self._reported.at_s:
            return
        load = next((load for load in report.variants if load.variant == self.info.variant), None)
        if load is None and report.variants:
            load = VariantLoad(self.info.variant, available=False)
        self._reported = _Reported(load, report.waiting, at_s)
        self._running.reported(at_s, counts_ours=counts_ours)

    def snapshot(self) -> ReplicaSnapshot:
        condition, reported = self._tier.condition, self._reported
        if condition.reachable and condition.ready and self.unready is not None:
            condition = self.unready
        load = reported.load or VariantLoad(self.info.variant, available=True, slots=_UNREPORTED_SLOTS)
        ours = self._running
        unseen = ours.unseen()
        running = max(0, load.running - ours.ended) + unseen.requests
        overflow = min(max(0, running - load.slots), unseen.requests) if load.slots else 0
        why = condition.why if not (condition.reachable and condition.ready) else ""
        if not why and not load.available:
            why = "the upstream has no replica of it available"
        return ReplicaSnapshot(
            info=self.info,
            available=not why,
            slots=load.slots,
            running=running - overflow,
            queued=load.queued + reported.waiting + overflow,
            queued_prefill_tokens=load.queued_prefill_tokens + unseen.prompt_tokens,
            pending_decode_tokens=max(0, load.pending_decode_tokens - ours.ended_tokens) + unseen.left_tokens,
            age_s=max(0.0, self._tier.clock.now_s() - reported.at_s),
            kv_free_tokens=self._kv_free_tokens(load),
            engines=load.engines,
            why=why,
            back_in_s=condition.back_in_s if why else 0.0,
            credits=self._tier.credits.available(),
            credit_in_s=self._tier.credits.next_in_s() + self._tier.link.snapshot().rtt_s,
        )

    def _kv_free_tokens(self, load: VariantLoad) -> int | None:
        """Return the room that the last report told of, less what this tier has sent since, more what has ended."""
        if load.kv_free_tokens is None:
            return None
        ours = self._running
        return max(0, load.kv_free_tokens + ours.ended_kv_tokens - ours.kv_taken_tokens)

    def facts(self) -> ReplicaFacts:
        """See `router.values.status.TellsFacts`."""
        return self._tier.facts

    def reach(self) -> Mapping[str, int]:
        """See `router.values.replica.LeadsOn`."""
        return self._tier.reach

    def generate(
        self, request: InferenceRequest, fields: Mapping[str, object] | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer; see `router.values.replica.Replica.generate`.

        Args:
            fields: see `UpstreamRequest.fields`.
        """
        return self._stream(request, fields, None)

    def push(self, request: InferenceRequest, give: Give) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer; see `router.values.replica.Pushes`."""
        return self._stream(request, None, give)

    async def _stream(
        self, request: InferenceRequest, fields: Mapping[str, object] | None, give: Give | None
    ) -> AsyncGenerator[TokenChunk, None]:
        prompt = request.prompt
        if isinstance(prompt, PassedCall) and prompt.streams:
            async with contextlib.aclosing(self._passed(request)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        if isinstance(prompt, Call):
            yield await self._called(request)
            return
        left = openai_client.tokens_left(request)
        if left is not None and left < 1:
            yield TokenChunk("", 0, finish_reason=FinishReason.LENGTH)
            return
        tier = self._tier
        with _Counted(tier, self._running, request, self.info, left or _UNBOUNDED_ANSWER_TOKENS) as running:
            stream, transfer = await open_stream(tier.client, self._call(request, fields), tier.clock, tier.lost)
            soon = asyncio.get_running_loop().call_soon
            try:
                soon(soon, tier.learn, transfer)  # two turns on: text that came with the head goes out before
                began_s, finished, begin = tier.clock.now_s(), False, len(self._running) <= _FEW
                counted = None if give is None else self._counting(give, running)
                while not finished:
                    if stream.waits:
                        await stream.news(counted)  # a token wakes no more coroutines than it has to
                    for chunk in _given(stream.take(begin=begin) or await stream.read(), counted):
                        self.chunks_received += 1
                        self._running.came(running, chunk.tokens)
                        finished = chunk.finish_reason is not None
                        if finished:
                            tier.link.observe_answer(stream.wire_bytes, stream.tokens, tier.clock.now_s() - began_s)
                        yield chunk
                    if begin and stream.left_bytes:
                        await asyncio.sleep(0)  # the beginning goes out before the rest is parsed
                    begin = False
            finally:
                stream.close()

    def _counting(self, give: Give, running: Running) -> Give:
        def counted(chunks: list[TokenChunk]) -> bool:
            if not give(chunks):
                return False
            self.chunks_received += len(chunks)
            for chunk in chunks:
                self._running.came(running, chunk.tokens)
            return True

        return counted

    async def _called(self, request: InferenceRequest) -> TokenChunk:
        """Put a call to the server; its answer comes in one piece."""
        tier, call = self._tier, self._call(request, None)
        with _Counted(tier, self._running, request, self.info):
            whole = await fetch_answer(tier.client, call, tier.clock, tier.lost)
            tier.learn(whole.transfer)
            self.chunks_received += 1
            if isinstance(request.prompt, PassedCall):
                return passed_reply.decode_answer(whole, request.prompt, call.who)
            if isinstance(request.prompt, TensorCall):
                asked = pipelines.Asked(self.info.signature, request.prompt.rows, call.who)
                return pipelines.decode_answer(whole.body, whole.headers.get(HEADER_LENGTH, ""), asked, whole.origin)
            return embeddings.decode_answer(whole.body, request, whole.origin, call.who)

    async def _passed(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        """Put a call to the server, and pass its reply on as it comes."""
        tier, call = self._tier, self._call(request, None)
        with _Counted(tier, self._running, request, self.info):
            reply = await passed_reply.open_reply(tier.client, call, tier.clock, tier.lost)
            try:
                tier.learn(reply.transfer)
                while piece := await reply.read():
                    self.chunks_received += 1
                    yield piece
            finally:
                reply.close()
        yield TokenChunk("", 1, finish_reason=FinishReason.STOP)

    async def compute_prompt(self, request: InferenceRequest, fields: Mapping[str, object]) -> bytes:
        """Have the prompt of a request computed, and return the answer in one piece, of one token.

        Raises:
            OverspillError: as `generate`.
        """
        tier, alone = self._tier, {"stream": False, "stream_options": None, "max_tokens": 1, **fields}
        with _Counted(tier, self._running, request, self.info):
            return await fetch_whole(tier.client, self._call(request, alone), tier.clock, tier.lost)

    def _call(self, request: InferenceRequest, fields: Mapping[str, object] | None) -> UpstreamRequest:
        call = self._tier.call(request, self.info)
        return replace(call, fields=fields) if fields else call


def _given(chunks: list[TokenChunk], give: Give | None) -> list[TokenChunk]:
    """Give on a burst, but for the last of it, with which the answer may end; return what is left to read."""
    return chunks[-1:] if give is not None and len(chunks) > _BURST and give(chunks[:-1]) else chunks


class _Counted:
    """Counts a request as running there while the block lasts, and learns from how it fails."""

    __slots__ = ("_held", "_info", "_own", "_request", "_running", "_tier")

    def __init__(
        self, tier: UpstreamContext, running: RunningWork, request: InferenceRequest, info: ReplicaInfo, tokens: int = 1
    ) -> None:
        self._tier = tier
        self._running = running
        self._request = request
        self._info = info
        self._own = running.begin(request.prompt_tokens, tokens, tier.clock.now_s())
        self._held = tier.credits.spend()
        tier.used()

    def __enter__(self) -> Running:
        return self._own

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tier = self._tier
        try:
            if isinstance(error, InvalidRequest):
                tier.refused(self._info, self._request, error)
            elif isinstance(error, (ReplicaUnreachable, Refused)):
                if self._held is not None:  # nothing was computed there
                    tier.credits.give_back(self._held)
                if isinstance(error, ReplicaUnreachable):
                    tier.doubt()
        finally:
            self._running.end(self._own)
