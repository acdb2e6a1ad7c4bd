"""The choices of one call: each a request of its own to the router, in one piece or as interleaved events.

One that fails says so in its place and costs the others nothing; where all fail, the first error is the reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeAlias

import orjson
import structlog
from msgspec.structs import replace

from router.base.errors import OverspillError
from router.base.timers import end
from router.gateway.endpoint import RequestContext, internal_error
from router.gateway.intake import Intake
from router.gateway.metrics import GatewayMetrics
from router.gateway.parts import Part, contexts_of, enter, leave, note_refusal
from router.gateway.sse import ChoiceEvents
from router.gateway.whole import unfinished
from router.values.answer import Answer
from router.values.chunk import TokenChunk
from router.values.prompt import Input, TextPrompt, TokenPrompt
from router.values.request import ApiRequest
from router.values.usage import SharedPrompt, Usage

log = structlog.get_logger("router.gateway")

_SEEDS = 2**63
_AHEAD_CHUNKS = 16  # of each choice, that may wait for a client who reads slowly

Begun: TypeAlias = tuple[Answer, int]
"""A choice whose first chunk is ready, and its prompt's tokens."""
News: TypeAlias = tuple[int, Begun | TokenChunk | OverspillError]
"""What came of a choice, by its index."""
NewEvents: TypeAlias = Callable[[int, int, Answer, Callable[[], Usage]], ChoiceEvents]
"""From a choice's index, its prompt's tokens, the answer that began first, and what tells the usage of all."""


def parts_of(call: ApiRequest, body: bytes) -> list[Part]:
    """Return the choices of a call: those of its first prompt, then those of the next.

    Where the caller gave a seed, each choice of a prompt has its own, and the first that very one.
    """
    if call.n == 1 and not call.others:
        return [Part(call, body)]
    parts = []
    for prompt in (call.prompt, *call.others):
        shared, size = SharedPrompt(), _written(prompt) if call.others else body
        parts += [Part(_choice(call, prompt, n), size, shared, first=n == 0) for n in range(call.n)]
    return parts


def total(usages: Sequence[Usage], n: int) -> Usage:
    """Return the usage of a call: a prompt counts once for its `n` choices."""
    prompts = [SharedPrompt() for _ in usages[::n]]
    parts = [prompts[at // n].part(usage, first=at % n == 0) for at, usage in enumerate(usages)]
    cached = [part.cached_tokens for part in parts if part.cached_tokens is not None]
    answers = sum(part.completion_tokens for part in parts)
    told = [part.details for part in parts if part.details is not None]
    details = sum(told[1:], start=told[0]) if told else None
    return Usage(sum(part.prompt_tokens for part in parts), answers, sum(cached) if cached else None, details)


def _choice(call: ApiRequest, prompt: Input, number: int) -> ApiRequest:
    sampling = call.sampling
    if sampling.seed is not None and number:
        sampling = replace(sampling, seed=(sampling.seed + number) % _SEEDS)
    return replace(call, prompt=prompt, others=(), n=1, sampling=sampling)


def _written(prompt: Input) -> bytes:
    if isinstance(prompt, TextPrompt):
        return prompt.text.encode("utf-8", "replace")
    return orjson.dumps(prompt.token_ids) if isinstance(prompt, TokenPrompt) else b""


class Interleaved:
    """Answers every part, side by side, and yields what comes of each as it comes."""

    def __init__(self, intake: Intake, context: RequestContext, parts: Sequence[Part]) -> None:
        self._intake = intake
        self._parts = list(zip(contexts_of(intake, context, parts), parts, strict=True))
        self._queue: asyncio.Queue[News] = asyncio.Queue(_AHEAD_CHUNKS * len(parts))

    def ready(self) -> bool:
        """Whether something is here already."""
        return not self._queue.empty()

    async def news(self) -> AsyncGenerator[News, None]:
        """Yield until every part has ended: with a last chunk, or with an error. Closing it cancels their work."""
        tasks = [
            asyncio.create_task(self._run(own, index, part), name="gateway choice")
            for index, (own, part) in enumerate(self._parts)
        ]
        left = len(tasks)
        try:
            while left:
                index, item = await self._queue.get()
                left -= _is_last(item)
                yield index, item
            await asyncio.gather(*tasks)
        finally:
            await end(*tasks)

    async def _run(self, own: RequestContext, index: int, part: Part) -> None:
        put = self._queue.put
        try:
            enter(self._intake, own, part)
            answer, prompt_tokens = await self._intake.start(own, part.request)
            await put((index, (answer, prompt_tokens)))
            async for chunk in answer.chunks:
                await put((index, chunk))
                if chunk.finish_reason is not None:
                    return
            await put((index, unfinished()))
        except OverspillError as error:
            note_refusal(own, error)
            await put((index, error))
        except Exception:  # the task boundary: a bug is logged with its trace and ends this choice visibly
            log.exception("choice crashed", request_id=own.request_id)
            await put((index, internal_error(own.request_id)))
        finally:
            await leave(own)


def _is_last(item: Begun | TokenChunk | OverspillError) -> bool:
    return isinstance(item, OverspillError) or (isinstance(item, TokenChunk) and item.finish_reason is not None)


class ChoiceStream:
    """Encodes the news of several choices as they come. It is the `Pieces` of a stream.

    Args:
        choices: how many there are; n: of each prompt.
        new_events: makes what encodes a choice.

    Attributes:
        first_answer: the answer that began first, set by `first`.
    """

    def __init__(
        self, source: Interleaved, choices: int, n: int, new_events: NewEvents, told: tuple[GatewayMetrics, str | None]
    ) -> None:
        self.first_answer: Answer | None = None
        self.ended = False
        self.news = source.news()
        self._ready = source.ready
        self._n = n
        self._new_events = new_events
        self._metrics, self._request_id = told
        self._events: list[ChoiceEvents | None] = [None] * choices
        self._failed: list[tuple[int, OverspillError]] = []

    def usage(self) -> Usage:
        """Of all choices so far."""
        return total([Usage(0, 0) if one is None else one.usage for one in self._events], self._n)

    async def first(self) -> bytes:
        """Return the first events, of the choice that begins first and of those that failed before it.

        Raises:
            OverspillError: all have failed; it is what the first of them failed with.
        """
        return await self.next()

    async def next(self) -> bytes:
        piece = b""
        while not self.ended and (not piece or self._ready()):
            piece += self._take(*await anext(self.news))
            if len(self._failed) == len(self._events):
                raise self._failed[0][1]
            ended = [one for one in self._events if one is not None and one.ended]
            if len(ended) == len(self._events):
                self.ended = True
                piece += ended[0].close(self.usage())
        return piece

    def _take(self, index: int, item: Begun | TokenChunk | OverspillError) -> bytes:
        if isinstance(item, TokenChunk):
            events = self._events[index]
            if events is None:
                raise RuntimeError("a chunk of a choice that has not begun")
            return events.add(item) if events.begun else events.begin(item)
        if not isinstance(item, OverspillError):
            answer, prompt_tokens = item
            before, self._failed = self._failed, []
            self.first_answer = self.first_answer or answer
            self._events[index] = self._new_events(index, prompt_tokens, self.first_answer, self.usage)
            return b"".join(self._fail(at, error) for at, error in before)
        if self.first_answer is None:
            self._failed.append((index, item))
            return b""
        return self._fail(index, item)

    def _fail(self, index: int, error: OverspillError) -> bytes:
        self._metrics.stream_errors.labels(error.code).inc()
        log.warning("choice ended with an error", request_id=self._request_id, choice=index, code=error.code)
        events = self._events[index]
        if events is None:
            if self.first_answer is None:
                raise RuntimeError("a choice failed before any had begun")
            events = self._events[index] = self._new_events(index, 0, self.first_answer, self.usage)
        return events.fail(error)
