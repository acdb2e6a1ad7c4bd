"""One request to an upstream tier, from the POST to the last event, as token chunks and errors of the tree."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import httpx

from router.base.clock import Clock
from router.base.errors import (
    DeadlineLost,
    InvalidRequest,
    OverspillError,
    ReplicaBroken,
    ReplicaUnreachable,
    Unavailable,
)
from router.base.timers import within
from router.upstream import openai as openai_client
from router.upstream.openai import Event, EventParser
from router.values.request import FinishReason, InferenceRequest, Locality, Objective, Origin, TokenChunk
from router.wire import headers as wire_headers
from router.wire import load as wire_load

R = TypeVar("R")

_MAX_ERROR_BYTES = 64 * 1024
_ERROR_BODY_S = 5.0
_LEAST_S = 0.001
_TIMING = re.compile(r"dur=([0-9.]+)")


class UpstreamSilentError(Exception):
    """Nothing came in time. Never leaves this package."""


class LostNews:
    """The news that an upstream has gone silent, shared by every stream to it: who waits for data learns it at once."""

    def __init__(self) -> None:
        self._news: asyncio.Future[str] | None = None

    def current(self) -> asyncio.Future[str]:
        """Return what to wait for; streams that start after a loss wait for the next one."""
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        return self._news

    def tell(self, why: str) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(why)


async def guarded(work: Coroutine[Any, Any, R], news: asyncio.Future[str], limit_s: float | None = None) -> R:
    """Return what `work` returns.

    Raises:
        UpstreamSilentError: the upstream was lost, or `limit_s` passed.
    """
    try:
        return await within(limit_s, work, news)
    except asyncio.TimeoutError:
        raise UpstreamSilentError(news.result() if news.done() else f"silent for {limit_s:.3g} s") from None


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """What to send, and to whom.

    Attributes:
        model: the name to ask for.
        who: what to call the upstream in messages.
        context_tokens: window of the replica.
        rtt_s: round trip to take off the objective.
    """

    request: InferenceRequest
    model: str
    who: str
    context_tokens: int
    rtt_s: float


@dataclass(frozen=True, slots=True)
class TransferSample:
    """What the head of a real exchange tells about the link.

    Attributes:
        transfer_s: request sent → response head, without the time to connect and without what the upstream says it
            spent itself: one round trip and the transfer of the body.
        load: the upstream's report on its own answer, if it sent one.
    """

    transfer_s: float
    sent_bytes: int
    load: wire_load.LoadReport | None


def remaining(request: InferenceRequest, now_s: float, rtt_s: float, who: str) -> Objective:
    """Return what is left of the promise once the request has travelled.

    A TTFT objective that is already lost, or was kept by the replica that began the answer, is left out: the upstream
    shall answer as well as it can rather than refuse what this tier has decided to serve.

    Raises:
        InvalidRequest: the request may not leave this tier.
        DeadlineLost: nothing is left.
    """
    objective = request.objective
    if objective.locality is Locality.LOCAL_ONLY:
        raise InvalidRequest(f"{who}: the request is `local-only`", param=wire_headers.LOCALITY)
    spent_s = max(0.0, now_s - request.accepted_at_s) + rtt_s
    ttft_s, deadline_s = objective.ttft_s, objective.deadline_s
    if deadline_s is not None:
        deadline_s -= spent_s
        if deadline_s < _LEAST_S:
            raise DeadlineLost(f"{who}: the deadline would pass on the way", retry_after_s=1.0)
    if ttft_s is not None:
        ttft_s -= spent_s
        if request.continuation or ttft_s < _LEAST_S:
            ttft_s = None
    return replace(objective, ttft_s=ttft_s, deadline_s=deadline_s)


async def open_stream(
    client: httpx.AsyncClient, call: UpstreamRequest, clock: Clock, news: asyncio.Future[str]
) -> OpenStream:
    """Send the request and wait for the response head.

    Raises:
        InvalidRequest, Refused, ReplicaUnreachable: as `Replica.generate` says.
    """
    request = call.request
    body = openai_client.encode_request(request, call.model, call.context_tokens)
    objective = remaining(request, clock.now_s(), call.rtt_s, call.who)
    lines = [
        ("content-type", "application/json"),
        ("accept", "text/event-stream"),
        (wire_headers.REQUEST_ID, request.request_id),
        (wire_load.FORMAT_HEADER, "JSON"),
        *wire_headers.objective_headers(objective),
        *wire_headers.next_hop(request.headers),
    ]
    trace = ConnectTrace(clock)
    post = client.build_request(
        "POST", openai_client.path_of(request), content=body, headers=lines, extensions={"trace": trace}
    )
    began_s = clock.now_s()
    try:
        response = await _head(client, post, news, objective.deadline_s)
    except UpstreamSilentError as error:
        raise ReplicaUnreachable(f"{call.who}: no answer: {error}") from None
    except httpx.PoolTimeout:
        raise Unavailable(f"{call.who}: every connection is in use", retry_after_s=1.0) from None
    except httpx.HTTPError as error:
        raise ReplicaUnreachable(f"{call.who}: {describe(error)}") from error
    elapsed_s = clock.now_s() - began_s - trace.connect_s
    if response.status_code != 200:
        raise await _refusal(response, call, news)
    transfer = TransferSample(
        transfer_s=max(0.0, elapsed_s - _spent_there_s(response.headers.get("server-timing", ""))),
        sent_bytes=len(body),
        load=wire_load.decode_orca(response.headers.get(wire_load.HEADER, "")),
    )
    return OpenStream(response, transfer, call, news)


async def _head(
    client: httpx.AsyncClient, post: httpx.Request, news: asyncio.Future[str], limit_s: float | None
) -> httpx.Response:
    opened: list[httpx.Response] = []

    async def send() -> None:
        opened.append(await client.send(post, stream=True))

    try:
        await guarded(send(), news, limit_s)
    except BaseException:
        # A head that arrives in the same turn as a cancellation would keep its connection for ever.
        for response in opened:
            await response.aclose()
        raise
    return opened[0]


async def _refusal(response: httpx.Response, call: UpstreamRequest, news: asyncio.Future[str]) -> OverspillError:
    try:
        body = await guarded(_read_some(response), news, _ERROR_BODY_S)
    except (httpx.HTTPError, UpstreamSilentError):
        body = b""  # the status says enough
    finally:
        await response.aclose()
    return openai_client.decode_error(response.status_code, response.headers, body, call.who)


class OpenStream:
    """A response whose head has arrived."""

    def __init__(
        self, response: httpx.Response, transfer: TransferSample, call: UpstreamRequest, news: asyncio.Future[str]
    ) -> None:
        self.transfer = transfer
        self._response = response
        self._call = call
        self._news = news
        self._origin: Origin | None = openai_client.origin_of(response.headers)
        self._emitted = False
        self._tokens = 0
        self._told_tokens: int | None = None

    async def chunks(self) -> AsyncGenerator[TokenChunk, None]:
        """Yield the answer; leaving early closes the connection, which cancels the work there.

        Raises:
            ReplicaUnreachable: it broke before the first text.
            ReplicaBroken: it broke later.
        """
        last: Event | None = None
        prompt_tokens: int | None = None
        try:
            async with contextlib.aclosing(self._events()) as events:
                async for event in events:
                    if event.usage is not None:
                        self._told_tokens = event.usage.completion_tokens
                        prompt_tokens = event.usage.prompt_tokens
                    if event.finish_reason is not None:
                        last = event
                    elif event.text and last is None:
                        yield self._chunk(event.text, None, None)
            if last is None:
                raise self._broken("the stream ended without a finish reason")
            # A continuation's count holds the text before it: no count of the caller's prompt.
            yield self._chunk(last.text, last.finish_reason, None if self._call.request.continuation else prompt_tokens)
        finally:
            await self._response.aclose()

    async def _events(self) -> AsyncGenerator[Event, None]:
        """Yield events to the end of the stream; what breaks after the finish reason does no harm any more."""
        parser = EventParser()
        finished = False
        source = self._response.aiter_bytes()
        while True:
            try:
                data = await guarded(_next_bytes(source), self._news)
            except (httpx.HTTPError, UpstreamSilentError) as error:
                if finished:
                    return
                raise self._broken(describe(error)) from error
            for event in parser.feed(data):
                if event.error_message is not None:
                    if finished:
                        return
                    raise self._broken(event.error_message)
                finished = finished or event.finish_reason is not None
                yield event
            if not data:
                return

    def _chunk(self, text: str, finish: FinishReason | None, prompt_tokens: int | None) -> TokenChunk:
        told = self._told_tokens
        tokens = int(bool(text)) if told is None else max(0, told - self._tokens)
        self._tokens += tokens
        origin, self._origin = self._origin, None
        self._emitted = self._emitted or bool(text)
        return TokenChunk(text, tokens, finish_reason=finish, prompt_tokens=prompt_tokens, origin=origin)

    def _broken(self, why: str) -> OverspillError:
        if self._emitted:
            return ReplicaBroken(f"{self._call.who}: the stream broke after {self._tokens} tokens: {why}")
        return ReplicaUnreachable(f"{self._call.who}: the stream broke before the first token: {why}")


class ConnectTrace:
    """Measures what a new connection costs: an exchange on it says nothing about the link before that is taken off.

    Attributes:
        connect_s: TCP and TLS together, 0 on a connection that was open already.
        handshake_s: TCP alone, which is one round trip; None on a connection that was open already.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = 0.0
        self.connect_s = 0.0
        self.handshake_s: float | None = None

    async def __call__(self, event: str, info: dict[str, Any]) -> None:  # noqa: ARG002
        if event == "connection.connect_tcp.started":
            self._began_s = self._clock.now_s()
        elif event == "connection.connect_tcp.complete":
            self.connect_s = self.handshake_s = self._clock.now_s() - self._began_s
        elif event == "connection.start_tls.complete":
            self.connect_s = self._clock.now_s() - self._began_s


def describe(error: Exception) -> str:
    """Name an error in a few words; httpx leaves the text of many empty."""
    text = str(error).strip()
    kind = type(error).__name__
    return f"{kind}: {text}" if text and isinstance(error, httpx.HTTPError) else text or kind


async def _next_bytes(source: AsyncIterator[bytes]) -> bytes:
    """Return the next piece, empty at the end."""
    async for data in source:
        if data:
            return data
    return b""


async def _read_some(response: httpx.Response) -> bytes:
    body = b""
    async for data in response.aiter_bytes():
        body += data
        if len(body) >= _MAX_ERROR_BYTES:
            break
    return body


def _spent_there_s(server_timing: str) -> float:
    return sum(float(ms) for ms in _TIMING.findall(server_timing) if ms.count(".") <= 1 and ms != ".") / 1000
