"""One HTTP exchange on bare ASGI: read the body, race the work against the client going away, always close the stream.

Starlette's streaming response can abandon a body without closing it. Here the reply is sent by the task that made it,
and that task is cancelled, and waited for, the moment the client is gone: what runs on a replica ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from starlette.types import Message, Receive, Scope, Send

from router.base.errors import OverspillError, Refused, Unavailable
from router.base.timers import end
from router.gateway.auth import CALLER
from router.gateway.bodies import BodyRoom, BodyShare, ClientGone, read_body
from router.gateway.deps import NOBODY, Caller, GatewayDeps
from router.gateway.errors import JSON, Dialect, Reply, dialect_of, render_error
from router.gateway.metrics import GatewayMetrics
from router.values.request import TokenChunk
from router.wire import headers as wire_headers

log = structlog.get_logger("router.gateway")


@dataclass(slots=True)
class StreamReply:
    """A reply that is sent piece by piece.

    Attributes:
        pieces: encoded events. The generator never raises `OverspillError`: errors after the head was sent are events.
    """

    headers: list[tuple[str, str]]
    pieces: AsyncGenerator[bytes, None]
    media_type: str = "text/event-stream; charset=utf-8"


@dataclass(slots=True)
class RequestContext:
    """The request side of one context.

    Attributes:
        headers: lower-case names.
        query: as it was sent.
        caller: whose key it came with.
        params: path parameters.
        body, share: what was received, and the room that it takes.
        request_id: set for inference; sent back on every reply, errors included.
        accepted_at_s: on the tier's clock, when the body was complete.
        chunks: the running answer; closed on every path out of the context, which cancels its work.
        closers: called once when the exchange is over.
        timings_ms: what goes into `server-timing`.
        told: headers of the reply, errors included.
    """

    method: str
    path: str
    headers: dict[str, str]
    params: dict[str, Any]
    dialect: Dialect
    share: BodyShare
    query: bytes = b""
    caller: Caller = NOBODY
    body: bytes = b""
    request_id: str | None = None
    accepted_at_s: float = 0.0
    chunks: AsyncGenerator[TokenChunk, None] | None = None
    closers: list[Callable[[], None]] = field(default_factory=list)
    timings_ms: list[tuple[str, float]] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)

    def drop_body(self) -> None:
        """Forget what was received: a stream may live for minutes, what it was asked with need not."""
        self.body = b""
        self.share.release()

    def close(self) -> None:
        """Give back its room and its place; more than once does no harm."""
        self.drop_body()
        while self.closers:
            self.closers.pop()()


Handler = Callable[[RequestContext], Awaitable["Reply | StreamReply"]]


class Gate(Protocol):
    """What every endpoint of a tier shares."""

    deps: GatewayDeps
    metrics: GatewayMetrics
    room: BodyRoom

    def admit(self, context: RequestContext) -> None:
        """Take a place for an inference request, until its exchange is over; raises a `Refused` if there is none."""
        ...


def context_of(scope: Scope, room: BodyRoom) -> RequestContext:
    path: str = scope["path"]
    return RequestContext(
        method=scope["method"],
        path=path,
        headers=wire_headers.lower_case(scope["headers"]),
        params=scope.get("path_params", {}),
        dialect=dialect_of(path),
        share=BodyShare(room),
        query=scope.get("query_string", b""),
        caller=scope.get(CALLER, NOBODY),
    )


class Endpoint:
    """An ASGI application around one handler.

    Args:
        admits: it takes inference requests; each gets its place before any of its body is read.
    """

    def __init__(self, name: str, handler: Handler, gate: Gate, *, admits: bool = False) -> None:
        self._name = name
        self._handler = handler
        self._gate = gate
        self._admits = admits
        self._deps = gate.deps
        self._metrics = gate.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope, self._gate.room)
        try:
            if await self._received(context, receive, send):
                await self._race(context, receive, send)
        finally:
            context.close()

    async def _received(self, context: RequestContext, receive: Receive, send: Send) -> bool:
        """Let the request in and read its body; a request that is refused here is answered here."""
        try:
            context.request_id = wire_headers.request_id(context.headers)
            if self._admits:
                self._gate.admit(context)
            if context.method not in {"GET", "HEAD"}:
                context.body = await read_body(receive, context.headers, self._deps, context.share)
        except OverspillError as error:
            await self._send_reply(render_error(error, context.dialect), context, send)
            return False
        except ClientGone:
            self._metrics.disconnects.inc()
            return False
        context.accepted_at_s = self._deps.clock.now_s()
        return True

    async def _race(self, context: RequestContext, receive: Receive, send: Send) -> None:
        """Run the handler and send its reply until it is done, the client is gone, or it has stopped reading."""
        sender = _Sender(send, self._deps.limits.send_stall_s)
        work = asyncio.create_task(self._serve(context, sender), name=f"gateway {context.request_id}")
        gone = asyncio.create_task(_wait_for_disconnect(receive), name=f"gateway {context.request_id} disconnect")
        try:
            await asyncio.wait({work, gone, sender.stalled}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left_early = not work.done()
            sender.left = left_early
            await end(gone, work)
        if left_early:
            self._metrics.disconnects.inc()
            why = "stopped reading" if sender.stalled.done() else "went away"
            log.info("client left", request_id=context.request_id, route=self._name, why=why)
        elif not work.cancelled() and work.exception() is not None:
            raise work.exception()  # type: ignore[misc]  # not None, by the line above

    async def _serve(self, context: RequestContext, send: Send) -> None:
        try:
            reply = await self._handle(context)
            if isinstance(reply, Reply):
                await self._send_reply(reply, context, send)
            else:
                await self._send_stream(reply, context, send)
        except ClientGone:
            pass  # counted by the race that it lost
        except OSError:  # what ASGI servers raise when the connection broke under a send
            self._metrics.disconnects.inc()
        finally:
            if context.chunks is not None:
                await context.chunks.aclose()
            context.close()  # at once: its caller, who has the whole answer, may send the next request

    async def _handle(self, context: RequestContext) -> Reply | StreamReply:
        try:
            return await self._handler(context)
        except OverspillError as error:
            if error.status >= 500 and not isinstance(error, Refused):
                log.warning("request failed", request_id=context.request_id, code=error.code, error=error.message)
            return render_error(error, context.dialect)
        except Exception:  # the task boundary: a bug is logged with its trace and answered
            log.exception("request crashed", request_id=context.request_id)
            return render_error(internal_error(context.request_id), context.dialect)

    async def _send_reply(self, reply: Reply, context: RequestContext, send: Send) -> None:
        self._metrics.responses.labels(self._name, reply.status).inc()
        lines = [*reply.headers, *context.told, ("content-length", str(len(reply.body)))]
        await send(_head(reply.status, reply.media_type, lines, context.request_id))
        await send({"type": "http.response.body", "body": b"" if context.method == "HEAD" else reply.body})

    async def _send_stream(self, reply: StreamReply, context: RequestContext, send: Send) -> None:
        self._metrics.responses.labels(self._name, 200).inc()
        lines = [*reply.headers, *context.told, ("cache-control", "no-cache"), ("x-accel-buffering", "no")]
        try:
            await send(_head(200, reply.media_type, lines, context.request_id))
            async for piece in reply.pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await reply.pieces.aclose()


class _Sender:
    """The server's `send`, with a watch on how long a single call may take."""

    def __init__(self, send: Send, stall_s: float) -> None:
        self._send = send
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self.stalled: asyncio.Future[None] = self._loop.create_future()
        self.left = False

    async def __call__(self, message: Message) -> None:
        if self.left:
            raise ClientGone
        watch = self._loop.call_later(self._stall_s, self._stall)
        try:
            await self._send(message)
        finally:
            watch.cancel()

    def _stall(self) -> None:
        if not self.stalled.done():
            self.stalled.set_result(None)


def internal_error(request_id: str | None) -> OverspillError:
    return OverspillError(f"internal error; the log has the details under request id {request_id}")


def draining_or_starting(deps: GatewayDeps) -> Unavailable | None:
    """Return the refusal of a tier that takes no new requests now, with its reason."""
    ready, why = deps.ready()
    if ready:
        return None
    return Unavailable(
        f"this tier takes no requests now: {why or 'not ready'}", retry_after_s=deps.limits.retry_after_s
    )


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _head(status: int, media_type: str, lines: list[tuple[str, str]], request_id: str | None) -> Message:
    raw = [(b"content-type", media_type.encode())]
    if request_id is not None:
        raw.append((b"x-request-id", request_id.encode("latin-1")))
    raw.extend((name.encode("latin-1"), value.encode("latin-1")) for name, value in lines)
    return {"type": "http.response.start", "status": status, "headers": raw}


def json_reply(body: bytes) -> Reply:
    return Reply(body=body, media_type=JSON)
