"""One request to an upstream tier, from the request to the last event, as token chunks and errors of the tree."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType

import msgspec
from msgspec.structs import replace

from router.base.clock import Clock
from router.base.errors import (
    InvalidRequest,
    OverspillError,
    ReplicaBroken,
    ReplicaFailed,
    ReplicaUnreachable,
    Unavailable,
)
from router.base.timers import Interrupted, Interruptible
from router.upstream.call import UpstreamRequest, remaining
from router.upstream.events import Event, ToldUsage, origin_of
from router.upstream.refusals import decode_error, not_offered
from router.upstream.told import EchoedPrompt
from router.upstream.tools import calls_in_text
from router.upstream.transport import (
    ConnectTrace,
    NotConnectedError,
    PoolExhaustedError,
    Response,
    StreamingClient,
    TransportError,
    UnsendableError,
)
from router.values.chunk import FinishReason, Origin, TokenChunk
from router.values.logprobs import TokenLogprob
from router.values.task import PassedCall
from router.wire import load as wire_load
from router.wire import names as wire_names

_MAX_ERROR_BYTES = 64 * 1024
_MAX_WHOLE_BYTES = 64 * 1024 * 1024  # 2,048 vectors of 4,096 numbers in base64 are 45 MB
_ERROR_BODY_S = 5.0
_END_S = 0.25
_USAGE_S = 1.0  # between the finish reason and what may follow it
_TIMING = re.compile(r"dur=([0-9.]+)")


class LostNews:
    """The news that an upstream has gone silent: every request to it that still waits hears of it at once."""

    def __init__(self) -> None:
        self._listeners: set[Callable[[str], None]] = set()

    def tell(self, why: str) -> None:
        for listener in list(self._listeners):
            listener(why)

    def listen(self, listener: Callable[[str], None]) -> None:
        self._listeners.add(listener)

    def forget(self, listener: Callable[[str], None]) -> None:
        self._listeners.discard(listener)


class TransferSample(msgspec.Struct, frozen=True):
    """What the head of a real response tells about the link.

    Attributes:
        transfer_s: request sent → response head, without the time to connect and without what the upstream says it
            spent itself: one round trip and the transfer of the body.
        load: the upstream's report on its own answer, if it sent one.
        connect_s: what its new connection took, 0 where one was open.
    """

    transfer_s: float
    sent_bytes: int
    load: wire_load.LoadReport | None
    connect_s: float = 0.0


async def open_stream(client: StreamingClient, call: UpstreamRequest, clock: Clock, lost: LostNews) -> OpenStream:
    """Send the request and wait for the response head.

    Raises:
        InvalidRequest, Refused, ReplicaUnreachable: as `Replica.generate` says.
    """
    response, transfer = await send_request(client, call, clock, lost)
    try:
        return OpenStream(response, transfer, call, lost)
    except BaseException:
        response.close()
        raise


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that came in one piece, what it is, and who it says answered."""

    body: bytes
    media_type: str
    transfer: TransferSample
    origin: Origin | None
    headers: Mapping[str, str]


async def fetch_answer(client: StreamingClient, call: UpstreamRequest, clock: Clock, lost: LostNews) -> WholeAnswer:
    """Send a request whose answer comes in one piece; cancelling it cancels the work there.

    Raises:
        InvalidRequest, Refused, ReplicaUnreachable: as `Replica.generate` says.
    """
    response, transfer = await send_request(client, call, clock, lost)
    body = await _whole_body(response, call, lost)
    media_type = response.headers.get("content-type", "")
    return WholeAnswer(body, media_type, transfer, origin_of(response.headers), response.headers)


async def fetch_whole(client: StreamingClient, call: UpstreamRequest, clock: Clock, lost: LostNews) -> bytes:
    """As `fetch_answer`; the body alone."""
    return (await fetch_answer(client, call, clock, lost)).body


async def _whole_body(response: Response, call: UpstreamRequest, lost: LostNews) -> bytes:
    try:
        with _Bound(lost, None):
            body = await _read_some(response, _MAX_WHOLE_BYTES)
    except (TransportError, _SilentError) as error:
        raise ReplicaFailed(f"{call.who}: the answer broke: {error}") from None
    finally:
        response.close()
    if len(body) >= _MAX_WHOLE_BYTES:
        raise ReplicaFailed(f"{call.who}: an answer of more than {_MAX_WHOLE_BYTES} bytes")
    return body


async def send_request(
    client: StreamingClient, call: UpstreamRequest, clock: Clock, lost: LostNews
) -> tuple[Response, TransferSample]:
    """Send a request and wait for the head of a good response.

    Raises:
        InvalidRequest, Refused, ReplicaUnreachable: as `Replica.generate` says.
    """
    objective = remaining(call.request, clock.now_s(), call.rtt_s, call.who, local=call.local)
    sent = call.encode(objective)
    if call.instance is not None:
        sent.headers.append((wire_names.INSTANCE, call.instance))
    trace = ConnectTrace(clock)
    began_s = clock.now_s()
    try:
        with _Bound(lost, None):  # the dispatcher keeps the deadline, and says whose fault a silence is
            response = await client.send(sent.method, sent.path, sent.body, sent.headers, trace)
    except _SilentError as error:
        raise ReplicaUnreachable(f"{call.who}: no answer: {error}") from None
    except PoolExhaustedError:
        raise Unavailable(f"{call.who}: every connection is in use", retry_after_s=1.0) from None
    except UnsendableError as error:
        raise InvalidRequest(f"{call.who}: the request cannot be written as HTTP: {error}") from error
    except NotConnectedError as error:
        raise ReplicaUnreachable(f"{call.who}: {error}") from error
    except TransportError as error:
        raise ReplicaFailed(f"{call.who}: {error}") from error
    elapsed_s = clock.now_s() - began_s - trace.connect_s
    if response.status != 200:
        raise await _refusal(response, call, lost)
    return response, TransferSample(
        transfer_s=max(0.0, elapsed_s - _spent_there_s(response.headers.get("server-timing", ""))),
        sent_bytes=len(sent.body),
        load=wire_load.decode_orca(response.headers.get(wire_load.HEADER, "")),
        connect_s=trace.connect_s,
    )


class _SilentError(Exception):
    """Nothing came in time. Never leaves this file."""


class _Bound(Interruptible):
    """A block that the loss of the upstream, or a time limit, ends with a `_SilentError`."""

    __slots__ = ("_limit_s", "_lost", "_timer", "_why")

    def __init__(self, lost: LostNews, limit_s: float | None) -> None:
        super().__init__()
        self._lost = lost
        self._limit_s = limit_s
        self._why = ""
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> _Bound:
        super().__enter__()
        self._lost.listen(self._stop)
        if self._limit_s is not None:
            self._timer = self._loop.call_later(self._limit_s, self._stop, f"silent for {self._limit_s:.3g} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lost.forget(self._stop)
        if self._timer is not None:
            self._timer.cancel()
        try:
            super().__exit__(kind, error, trace)
        except Interrupted:
            raise _SilentError(self._why) from None

    def _stop(self, why: str) -> None:
        self._why = why
        self.interrupt()


async def _refusal(response: Response, call: UpstreamRequest, lost: LostNews) -> OverspillError:
    try:
        with _Bound(lost, _ERROR_BODY_S):
            body = await _read_some(response, _MAX_ERROR_BYTES)
    except (TransportError, _SilentError):
        body = b""  # the status says enough
    finally:
        response.close()
    asked = call.request.prompt
    if isinstance(asked, PassedCall) and asked.method == "GET":
        missing = not_offered(asked.path, response.status, call.who)
        if missing is not None:
            return missing
    decode = decode_error if call.codec is None else call.codec.decode_error
    return decode(response.status, response.headers, body, call.who)


class OpenStream:
    """A response whose head has arrived. `close` it in any case; early, that cancels the work there.

    Attributes:
        received_bytes, tokens: of the answer so far.
    """

    def __init__(self, response: Response, transfer: TransferSample, call: UpstreamRequest, lost: LostNews) -> None:
        self.transfer = transfer
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
        self._failure: str | None = None
        self._attempts: int | None = None
        self._done = False
        self._cut = False
        self._emitted = False
        self.received_bytes = 0
        self.tokens = 0
        self._told_tokens: int | None = None
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._cached_told = False
        self._usage: ToldUsage | None = None
        self._began = False
        self._echo = EchoedPrompt(call.request) if call.request.scores_prompt else None
        lost.listen(self._lose)

    def close(self) -> None:
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

    def news(self) -> asyncio.Future[None]:
        """Return what is done once something has arrived."""
        return self._response.news()

    def take(self) -> list[TokenChunk]:
        """Return the chunks of the text that has arrived; none where there is none, and `read` has to tell why."""
        chunks: list[TokenChunk] = []
        if self._is_open:
            data = self._response.take()
            if data:
                self.received_bytes += len(data)
                self._take(self._parser.feed(data), chunks)
        return chunks

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
                self._failure = str(error)
            data = b""
        self.received_bytes += len(data)
        self._take(self._parser.feed(data), chunks)
        if not data and self._failure is None:
            self._take(self._parser.end(), chunks)
        return bool(data)

    async def _read_usage(self) -> bytes:
        """Return what follows the finish reason, empty where nothing does: what breaks there does no harm any more.

        The answer is whole then: the usage and the end mark may follow, but a server that keeps both, and the
        connection open, does not make the caller wait for what it has.
        """
        try:
            with _Bound(self._lost, _USAGE_S):
                return await self._response.read()
        except _SilentError:
            return b""

    async def _reach_end(self) -> None:
        """Read up to the end of the body, which comes with the end mark, so that its connection can be used again."""
        with contextlib.suppress(TransportError, _SilentError), _Bound(self._lost, _END_S):
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
            usage = event.usage
            if usage is not None:  # an impossible count is none, and pieces of text are counted instead
                self._usage = usage
                self._told_tokens = usage.told_tokens(self._most_tokens)
                self._prompt_tokens = usage.told_prompt_tokens(self._call.context_tokens)
                if self._cached_tokens is None and usage.prompt_tokens_details is not None:
                    self._cached_tokens = usage.told_cached_tokens(self._prompt_tokens or self._call.context_tokens)
            if self._last is None:
                text = event.text if self._calls is None else self._calls.write([event.text, *event.calls])
                if event.finish_reason is not None:
                    self._last, self._last_text = event, text
                elif (chunk := self._told(event, text)) is not None:
                    chunks.append(chunk)
            self._done, self._cut = self._done or event.done, self._cut or event.cut

    def _finish(self, chunks: list[TokenChunk]) -> None:
        """Add the last chunk; a stream without one has failed, after what came before."""
        if self._last is None:
            self._failure = self._failure or "the stream ended without a finish reason"
            return
        # A continuation's count holds the text before it: no count of the caller's prompt.
        counted = None if self._call.request.continuation else self._prompt_tokens
        text, reason = self._last_text, self._last.finish_reason
        if self._calls is not None and reason is FinishReason.STOP:
            text += self._calls.finish()
        chunks.append(self._told(self._last, text, reason, counted) or self._chunk(text, reason, counted))

    def _told(
        self, event: Event, text: str, finish: FinishReason | None = None, prompt_tokens: int | None = None
    ) -> TokenChunk | None:
        """Return what an event tells of the answer, None for nothing; the prompt is no part of its text."""
        top = self._logprobs
        thought = event.reasoning
        if thought:
            return self._chunk(text, finish, prompt_tokens, thought)
        if top is None and self._echo is None:
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
        tokens = int(bool(text or thought)) if told is None else max(0, told - self.tokens)
        self.tokens += tokens
        self._emitted = self._emitted or bool(text or thought)
        if self._began and finish is None:
            return TokenChunk(text, tokens, reasoning=thought) if thought else TokenChunk(text, tokens)
        origin, self._origin, self._began = self._origin, None, True
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
        kind = ReplicaBroken if self._emitted else ReplicaFailed
        when = f"after {self.tokens} tokens" if self._emitted else "before the first token"
        error = kind(f"{self._call.who}: the stream broke {when}: {why}")
        error.attempts = self._attempts
        return error


async def _read_some(response: Response, limit_bytes: int) -> bytes:
    body = bytearray()
    while len(body) < limit_bytes and (data := await response.read()):
        body += data
    return bytes(body)


def _spent_there_s(server_timing: str) -> float:
    return sum(float(ms) for ms in _TIMING.findall(server_timing) if ms.count(".") <= 1 and ms != ".") / 1000
