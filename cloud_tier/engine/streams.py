"""The parent's side of the requests in flight: one stream each, filled by the engine's reports."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from cloud_tier.engine.messages import Step, Tokens
from cloud_tier.engine.protocol import EngineChunk, EngineLoad, EngineRequest
from router.base.errors import InvalidRequest, OverspillError, ReplicaBroken, ReplicaUnreachable, RequestFailed
from router.values.chunk import FinishReason
from router.values.logprobs import DrawnToken


class Stream:
    """The tokens of one request that nobody has read yet.

    Attributes:
        started: the engine has generated something for it.
        finished: its last chunk has arrived, or it was broken off: the engine need not be told to abort it.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.started = False
        self.finished = False
        self._tokens: list[int] = []
        self._cached_tokens: int | None = None
        self._logprobs: list[DrawnToken] = []
        self._prompt_logprobs: tuple[DrawnToken, ...] = ()
        self._finish_reason: FinishReason | None = None
        self._closed = False
        self._failure: Callable[[], OverspillError] | None = None
        self._news = asyncio.Event()

    def push(self, brought: Tokens) -> None:
        """Take what a step brought."""
        self.started = True
        self._tokens += brought.token_ids
        self._logprobs += brought.logprobs
        self._prompt_logprobs += brought.prompt_logprobs
        if brought.cached_tokens is not None:
            self._cached_tokens = brought.cached_tokens
        self._finish_reason = brought.finish_reason
        self._closed = brought.closed
        self.finished = brought.finish_reason is not None
        self._news.set()

    def refuse(self, why: str, invalid: str | None = None) -> None:
        """End the stream because its request failed and nothing else did, after what has arrived was read.

        Args:
            invalid: the field of the request that is to blame.
        """
        if invalid is not None:
            self._end(lambda: InvalidRequest(why, param=invalid))
            return
        self._end(lambda: RequestFailed(f"the engine could not go on with request {self.request.request_id!r}: {why}"))

    def fail(self, why: str) -> None:
        """End the stream because the engine ended, after what has arrived was read."""
        self._end(lambda: self._lost(why))

    def _end(self, failure: Callable[[], OverspillError]) -> None:
        self._failure = failure
        self.finished = True
        self._news.set()

    def _lost(self, why: str) -> OverspillError:
        if self.started:
            return ReplicaBroken(f"{why} in the middle of request {self.request.request_id!r}")
        return ReplicaUnreachable(f"{why} before request {self.request.request_id!r} brought a token")

    async def next(self) -> EngineChunk:
        """Wait for news and return all of them as one chunk.

        Raises:
            InvalidRequest, RequestFailed, ReplicaUnreachable, ReplicaBroken: see `Engine.generate`.
        """
        await self._news.wait()
        self._news.clear()
        if self._failure is not None and not self._tokens and self._finish_reason is None:
            raise self._failure()
        chunk = EngineChunk(
            tuple(self._tokens),
            self._finish_reason,
            self._cached_tokens,
            tuple(self._logprobs),
            self._prompt_logprobs,
            closed=self._closed,
        )
        self._tokens.clear()
        self._logprobs.clear()
        self._prompt_logprobs = ()
        self._cached_tokens = None
        if self._failure is not None:
            self._news.set()
        return chunk


class Streams:
    """All requests in flight with one engine process, and the load they amount to.

    A stream is the engine's work until it has finished, and its caller's from then on: how slowly an answer is read
    says nothing about the engine.

    Attributes:
        idle: set while the engine owes nobody anything.
        lines_limit: see `Engine.limit_lines`.
    """

    def __init__(self) -> None:
        self._by_handle: dict[int, Stream] = {}
        self._unfinished: set[int] = set()
        self._next_handle = 0
        self._yielding: set[int] = set()
        self._load = EngineLoad()
        self._last_handle = -1
        self.lines_limit: int | None = None
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def owes_soon(self) -> bool:
        """Whether the engine should be heard of soon: it owes a stream something, and is not told to hold it up."""
        return len(self._unfinished) > (len(self._yielding) if self.lines_limit == 0 else 0)

    def open(self, request: EngineRequest) -> tuple[int, Stream]:
        """Return a new stream and the number the engine shall know it by."""
        handle = self._next_handle
        self._next_handle += 1
        stream = self._by_handle[handle] = Stream(request)
        self._unfinished.add(handle)
        if request.yields:
            self._yielding.add(handle)
        self.idle.clear()
        return handle, stream

    def close(self, handle: int) -> None:
        """Forget a stream."""
        self._by_handle.pop(handle, None)
        self._settle(handle)

    def take(self, step: Step) -> None:
        """Hand a step's tokens to their streams; tokens of streams closed meanwhile are dropped."""
        self._load = step.load
        self._last_handle = step.last_handle
        for brought in step.tokens:
            stream = self._by_handle.get(brought.handle)
            if stream is not None:
                if brought.failure is None:
                    stream.push(brought)
                else:
                    stream.refuse(brought.failure, brought.invalid)
                if stream.finished:
                    self._settle(brought.handle)

    def fail(self, why: str) -> None:
        """Break every stream off that has not finished."""
        for handle in tuple(self._unfinished):
            self._by_handle[handle].fail(why)
            self._settle(handle)

    def load(self) -> EngineLoad:
        """The last reported load, plus the requests the engine has not seen yet."""
        others = self._unfinished - self._yielding if self._yielding else self._unfinished
        unseen = [self._by_handle[handle].request for handle in others if handle > self._last_handle]
        if not unseen:
            return self._load
        return dataclasses.replace(
            self._load,
            queued=self._load.queued + len(unseen),
            queued_prefill_tokens=self._load.queued_prefill_tokens + sum(len(r.prompt_ids) for r in unseen),
            pending_decode_tokens=self._load.pending_decode_tokens + sum(r.max_tokens for r in unseen),
        )

    def _settle(self, handle: int) -> None:
        """The engine owes this stream nothing any more."""
        self._unfinished.discard(handle)
        self._yielding.discard(handle)
        if not self._unfinished:
            self.idle.set()
