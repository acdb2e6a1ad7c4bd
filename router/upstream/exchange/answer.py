"""A streamed answer of an upstream whose head has arrived: events into token chunks, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from msgspec.structs import replace

from router.base.errors import LinkLost, OverspillError, ReplicaBroken, ReplicaFailed
from router.upstream.codec.events import Event, ToldUsage, origin_of
from router.upstream.codec.logprobs import EchoedPrompt
from router.upstream.codec.tools import calls_in_text
from router.upstream.exchange.call import UpstreamRequest
from router.upstream.http.silence import Bound, LostNews, SilentError
from router.upstream.http.transport import LeftError, Response, TransportError
from router.values.chunk import FinishReason, Origin, TokenChunk
from router.values.logprobs import TokenLogprob
from router.values.replica import Give

_END_S = 0.25
_USAGE_S = 1.0  # between the finish reason and what may follow it
_MUCH_BYTES = 2048  # some events: to parse fewer takes no longer than to turn to others in between
_FIRST_BYTES = 512
_AROUND_BYTES = 58  # what arrives at once: the headers of TCP and IP, and the frame of an HTTP chunk
_MOST_SAYING_NOTHING_BYTES = 8 * 1024 * 1024  # one event may have half of that


class OpenStream:
    """A response whose head has arrived. `close` it in any case; early, that cancels the work there.

    Attributes:
        received_bytes, tokens: of the answer so far; wire_bytes: what the network carried for it.
    """

    def __init__(self, response: Response, call: UpstreamRequest, lost: LostNews) -> None:
        self._response = response
        self._call = call
        self._most_tokens = call.request.most_answer_tokens(call.context_tokens)
        self._logprobs = call.request.sampling.logprobs
        self._lost = lost
        self._origin: Origin | None = origin_of(response.headers)
        self._parser = call.parser(response.headers)
        self._last: Event | None = None
        self._last_text = ""
        self._calls = calls_in_text(call.request)
        self._give: Give | None = None
        self._held: list[TokenChunk] = []
        self._failure: str | None = None
        self._left = False
        self._attempts: int | None = None
        self._done = False
        self._cut = False
        self._emitted = False
        self.received_bytes = self.wire_bytes = 0
        self._told_at_bytes = 0
        self.tokens = 0
        self._told_tokens: int | None = None
        self._usage: ToldUsage | None = None
        self._cached_tokens: int | None = None
        self._cached_told = False
        self._began = False
        self._echo = EchoedPrompt(call.request) if call.request.scores_prompt else None
        self._plain = self._logprobs is None and self._echo is None
        lost.listen(self._lose)

    def close(self) -> None:
        self._give = None
        self._lost.forget(self._lose)
        self._response.close()

    def _lose(self, why: str) -> None:
        self._response.end(TransportError(why))

    @property
    def waits(self) -> bool:
        """Whether the next text is still to arrive; `news` tells when something has."""
        return self._is_open and self._response.waits

    @property
    def _is_open(self) -> bool:
        """Whether more text may come."""
        return self._last is None and self._failure is None and not self._done

    @property
    def left_bytes(self) -> int:
        """What has arrived and was not taken."""
        return self._response.left_bytes

    def news(self, give: Give | None = None) -> asyncio.Future[None]:
        """Return what is done once something has arrived.

        Args:
            give: takes what is no more than text; the wait then goes on.
        """
        self._give = give
        return self._response.news(None if give is None else self._given)

    def take(self, *, begin: bool = False) -> list[TokenChunk]:
        """Return the chunks of the text that has arrived; none where there is none, and `read` has to tell why.

        Where the end has arrived as well, the last of them tells it: an end of its own would go all the way once more.

        Args:
            begin: return no more than the beginning of what has arrived, where that is much.
        """
        chunks, self._held = self._held, []
        if begin and self._response.left_bytes > _MUCH_BYTES:
            while self._is_open and not chunks and self._response.left_bytes:
                self._take_arrived(chunks, _FIRST_BYTES)
        elif self._is_open:
            self._take_arrived(chunks)
        if chunks and self._last is not None and self._done and self._response.complete:
            self._finish(chunks)
        return chunks

    def _take_arrived(self, chunks: list[TokenChunk], enough_bytes: int | None = None) -> None:
        data = self._response.take(enough_bytes)
        if data:
            self._parse(data, chunks)

    def _parse(self, data: bytes, chunks: list[TokenChunk]) -> None:
        """Turn what was received into chunks; who sends without end and says nothing keeps everybody's event loop."""
        before = len(chunks)
        self.received_bytes += len(data)
        self.wire_bytes += len(data) + _AROUND_BYTES
        self._take(self._parser.feed(data), chunks)
        if len(chunks) > before:
            self._told_at_bytes = self.received_bytes
        elif self._is_open and self.received_bytes - self._told_at_bytes > _MOST_SAYING_NOTHING_BYTES:
            self._failure = f"{_MOST_SAYING_NOTHING_BYTES >> 20} MiB that say nothing"

    def _given(self) -> bool:
        """Give on what has arrived, while it is no more than text; what nobody took is the next to be taken."""
        chunks: list[TokenChunk] = []
        self._take_arrived(chunks)
        if self._is_open and self._give is not None and (not chunks or self._give(chunks)):
            return True
        self._held = chunks
        return False

    async def read(self) -> list[TokenChunk]:
        """Return the chunks of what arrives next, at least one. The last one of all carries a finish reason.

        Raises:
            ReplicaFailed: it broke before the first text.
            ReplicaBroken: it broke later.
        """
        chunks: list[TokenChunk] = []
        while not chunks:
            if self._failure is not None:
                raise self._broken(self._failure)
            more = not self._done and await self._read_more(chunks)
            if self._done and not (self._cut or self._response.complete):
                await self._reach_end()
            if self._done or not more:
                self._finish(chunks)
        return chunks

    async def _read_more(self, chunks: list[TokenChunk]) -> bool:
        """Take what arrives next; returns whether anything did."""
        try:
            data = await (self._response.read() if self._last is None else self._read_usage())
        except TransportError as error:
            if self._last is None:
                self._failure, self._left = str(error), isinstance(error, LeftError)
            data = b""
        self._parse(data, chunks)
        if not data and self._failure is None:
            self._take(self._parser.end(), chunks)
        return bool(data)

    async def _read_usage(self) -> bytes:
        """Return what follows the finish reason, empty where nothing does: what breaks there does no harm any more.

        The answer is whole then: the usage and the end mark may follow, but a server that keeps both, and the
        connection open, does not make the caller wait for what it has.
        """
        try:
            with Bound(self._lost, _USAGE_S):
                return await self._response.read()
        except SilentError:
            return b""

    async def _reach_end(self) -> None:
        """Read up to the end of the body, which comes with the end mark, so that its connection can be used again."""
        with contextlib.suppress(TransportError, SilentError), Bound(self._lost, _END_S):
            while await self._response.read():
                pass

    def _take(self, events: Iterable[Event], chunks: list[TokenChunk]) -> None:
        """Turn events into chunks."""
        for event in events:
            if event.error is not None:
                if self._last is None:
                    self._failure, self._attempts = event.error_message, event.told_attempts
                self._done = self._last is not None
                return
            if event.usage is not None:
                self._take_usage(event.usage)
            elif self._last is None:
                self._told_tokens = None  # what it tells is counted by its pieces, until the next count
            if self._last is None:
                self._take_text(event, chunks)
            if event.done:
                self._done = True
            if event.cut:
                self._cut = True

    def _take_usage(self, usage: ToldUsage) -> None:
        """Note what was counted; an impossible count is none, and pieces of text are counted instead."""
        self._usage = usage
        self._told_tokens = usage.told_tokens(self._most_tokens)
        if usage.prompt_tokens_details is not None and self._cached_tokens is None:
            self._cached_tokens = usage.told_cached_tokens(self._prompt_tokens or self._call.context_tokens)

    def _take_text(self, event: Event, chunks: list[TokenChunk]) -> None:
        text, thought, ends = event.told()
        if self._calls is not None:
            text = self._calls.write([text, *event.calls])
        if ends:
            self._last, self._last_text = event, text
        elif (chunk := self._told(event, text, thought)) is not None:
            chunks.append(chunk)

    @property
    def _prompt_tokens(self) -> int | None:
        """Tokens of the prompt, as they were told last."""
        return None if self._usage is None else self._usage.told_prompt_tokens(self._call.context_tokens)

    @property
    def _counted_prompt(self) -> int | None:
        """Tokens of the caller's prompt, as far as they were told; a continuation's count holds the text before it."""
        return None if self._call.request.continuation else self._prompt_tokens

    def _finish(self, chunks: list[TokenChunk]) -> None:
        """Add the last chunk; a stream without one has failed, after what came before."""
        if self._last is None:
            self._failure = self._failure or "the stream ended without a finish reason"
            return
        counted = self._counted_prompt
        text, reason = self._last_text, self._last.finish_reason
        if self._calls is not None and reason is FinishReason.STOP:
            text += self._calls.finish()
        thought = self._last.told()[1]
        last = self._told(self._last, text, thought, reason, counted) or self._chunk(text, reason, counted)
        if (stop := self._last.stop_of(self._call.request.sampling.stop)) is not None:
            last = replace(last, stop=stop)
        if chunks and not (last.text or last.reasoning or last.logprobs or last.prompt_logprobs):
            last = _ended(chunks.pop(), last)
        chunks.append(last)

    def _told(
        self,
        event: Event,
        text: str,
        thought: str,
        finish: FinishReason | None = None,
        prompt_tokens: int | None = None,
    ) -> TokenChunk | None:
        """Return what an event tells of the answer, None for nothing; the prompt is no part of its text."""
        top = self._logprobs
        if thought:
            return self._chunk(text, finish, prompt_tokens, thought)
        if self._plain:
            return self._chunk(text, finish, prompt_tokens) if text else None
        told = () if top is None else event.logprobs(top)
        if not (text or told):
            return None
        scored: tuple[TokenLogprob, ...] = ()
        if self._echo is not None and not self._echo.whole:
            counted = None if self._call.dialect.ours else self._prompt_tokens  # ours tells the prompt alone at first
            text, scored, told = self._echo.split(text, told, counted)
        elif top is not None and not (told or self._emitted or finish or self._calls):
            self._failure = "it tells no log probabilities, which were asked for"
            return None
        chunk = self._chunk(text, finish, prompt_tokens)
        return replace(chunk, logprobs=told, prompt_logprobs=scored) if told or scored else chunk

    def _chunk(
        self, text: str, finish: FinishReason | None, prompt_tokens: int | None, thought: str = ""
    ) -> TokenChunk:
        told = self._told_tokens
        tokens = int(bool(text or thought)) if told is None else told - self.tokens
        if tokens < 0:  # noqa: PLR1730 - done for every token
            tokens = 0
        self.tokens += tokens
        self._emitted = self._emitted or bool(text or thought)
        if self._began and finish is None:
            return TokenChunk(text, tokens, reasoning=thought) if thought else TokenChunk(text, tokens)
        origin, self._origin, self._began = self._origin, None, True
        if finish is None:
            prompt_tokens = self._counted_prompt
        details = None if finish is None or self._usage is None else self._usage.details
        return TokenChunk(
            text, tokens, finish, prompt_tokens, origin, self._cached_once(), details=details, reasoning=thought
        )

    def _cached_once(self) -> int | None:
        """What the upstream has told of its cache: goes with the first chunk, or else with the last one."""
        if self._cached_told:
            return None
        self._cached_told = self._cached_tokens is not None
        return self._cached_tokens

    def _broken(self, why: str) -> OverspillError:
        kind = LinkLost if self._left else ReplicaBroken if self._emitted else ReplicaFailed
        when = f"after {self.tokens} tokens" if self._emitted else "before the first token"
        error = kind(f"{self._call.who}: the stream broke {when}: {why}")
        error.attempts = self._attempts
        return error


def _ended(chunk: TokenChunk, end: TokenChunk) -> TokenChunk:
    """Return the last text of an answer with what its end tells."""
    return replace(
        chunk,
        tokens=chunk.tokens + end.tokens,
        finish_reason=end.finish_reason,
        prompt_tokens=chunk.prompt_tokens if end.prompt_tokens is None else end.prompt_tokens,
        cached_tokens=end.cached_tokens if chunk.cached_tokens is None else chunk.cached_tokens,
        details=end.details,
        stop=end.stop,
    )
