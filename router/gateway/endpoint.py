"""One HTTP request on bare ASGI: read the body, race the work against the client going away, always close the stream.

Starlette's streaming response can abandon a body without closing it. Here the task that the server made for the request
does all of the work, and is cancelled the moment the client is gone: what runs on a replica ends with it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import structlog
from starlette.types import Message, Receive, Scope, Send

from router.base.errors import OverspillError, Refused, Unavailable
from router.base.timers import Interrupted
from router.gateway.auth import CALLER, headers_of
from router.gateway.bodies import BodyRoom, BodyShare, ClientGone, checked, read_body
from router.gateway.client import CONNECTION, Client, Connection
from router.gateway.deps import GatewayDeps
from router.gateway.errors import JSON, Dialect, Reply, dialect_of, render_error
from router.gateway.http.compression import MIN_BYTES, packed, reads_gzip
from router.gateway.metrics import GatewayMetrics
from router.gateway.turns import Turns
from router.tenants.stay import Stay
from router.tenants.tenant import NOBODY, Caller
from router.wire import headers as wire_headers
from router.wire.rate_limit import rate_limit_headers

log = structlog.get_logger("router.gateway")

IN_SLACK = "overspill.in_slack"
"""Of a scope: it comes from a job of this tier."""


class Pieces(Protocol):
    """A body that is made piece by piece."""

    ended: bool
    """The piece returned last is the last one."""

    async def next(self) -> bytes:
        """Return the next piece; only the last one may be empty. Errors after the head are pieces.

        Raises:
            BrokenOff: the body cannot say that it is not whole.
        """
        ...


class Sink(Protocol):
    """Where pieces of a body that has begun may be written by themselves."""

    @property
    def full(self) -> bool:
        """The client has to read first."""
        ...

    def write(self, piece: bytes) -> None:
        """Write a piece that is not the last one; it waits for nothing."""
        ...


class BrokenOff(Exception):
    """The connection has to end, so that the reader of a body sees that something is missing."""


@dataclass(slots=True)
class StreamReply:
    """A reply that is sent piece by piece.

    Attributes:
        first: the first piece, which exists before the head is sent.
        pour: called with where pieces may go by themselves, once the first one is sent.
    """

    headers: list[tuple[str, str]]
    first: bytes
    pieces: Pieces
    media_type: str = "text/event-stream; charset=utf-8"
    pour: Callable[[Sink], None] | None = None


class RequestContext(msgspec.Struct, eq=False):
    """The request side of one context.

    Attributes:
        headers: lower-case names.
        query: as it was sent.
        caller: whose key it came with; known: that was looked at.
        params: path parameters.
        body, share: what was received, and the room that it takes.
        request_id: set for inference; sent back on every reply, errors included.
        accepted_at_s: on the tier's clock, when the body was complete.
        chunks: the running answer; closed on every path out of the context, which cancels its work.
        closers: called once when the request is over.
        timings_ms: what goes into `server-timing`.
        told: headers of the reply, errors included.
        stay: its place under the limits of its tenant; None where nothing is asked of a model.
        in_slack: it comes from a job of this tier: it runs in the slack of all others, and is no reason for anything.
        received: what a reader of its own made of the body.
        computed: called once no replica works on it any more, its parts apart; more than once does no harm.
    """

    method: str
    path: str
    headers: dict[str, str]
    params: dict[str, Any]
    dialect: Dialect
    share: BodyShare
    query: bytes = b""
    caller: Caller = NOBODY
    known: bool = False
    body: bytes = b""
    request_id: str | None = None
    accepted_at_s: float = 0.0
    chunks: AsyncGenerator[object, None] | None = None
    closers: list[Callable[[], None]] = msgspec.field(default_factory=list)
    timings_ms: list[tuple[str, float]] = msgspec.field(default_factory=list)
    told: list[tuple[str, str]] = msgspec.field(default_factory=list)
    stay: Stay | None = None
    in_slack: bool = False
    received: Any = None
    computed: Callable[[], None] | None = None

    def told_lines(self) -> list[tuple[str, str]]:
        """Return the headers that every reply to it has: what is left of its tenant's limits too."""
        lines = self.told
        if self.stay is not None:
            for kind, left in zip(("requests", "tokens"), self.stay.left(), strict=True):
                if left is not None:
                    lines = [*lines, *rate_limit_headers(kind, left.limit, left.remaining, left.reset_s)]
        return lines

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


BodyReader = Callable[[Receive, RequestContext], Awaitable[None]]
"""Reads a body in a way of its own; what it made of it becomes `RequestContext.received`."""


class Gate(Protocol):
    """What every endpoint of a tier shares."""

    deps: GatewayDeps
    metrics: GatewayMetrics
    room: BodyRoom
    turns: Turns

    def admit(self, context: RequestContext) -> None:
        """Take a place for an inference request, until it is answered; raises a `Refused` if there is none."""
        ...

    def arrived(self, context: RequestContext) -> None:
        """The body of an inference request is there; raises a `Refused` if it is to come back later."""
        ...


def context_of(scope: Scope, room: BodyRoom) -> RequestContext:
    path: str = scope["path"]
    caller: Caller = scope.get(CALLER, NOBODY)
    headers = headers_of(scope)
    return RequestContext(
        method=scope["method"],
        path=path,
        headers=headers,
        params=scope.get("path_params", {}),
        dialect=dialect_of(path, headers),
        share=BodyShare(room, caller.digest),
        query=scope.get("query_string", b""),
        caller=caller,
        known=CALLER in scope,
        in_slack=scope.get(IN_SLACK, False),
    )


class Endpoint:
    """An ASGI application around one handler.

    Args:
        admits: it takes inference requests; each gets its place before any of its body is read.
        takes: what its body is decoded as, for the description of the API.
        read: reads the body, where it is not held in memory.
    """

    def __init__(
        self,
        name: str,
        handler: Handler,
        gate: Gate,
        *,
        admits: bool = False,
        takes: type | None = None,
        read: BodyReader | None = None,
    ) -> None:
        self.takes = takes
        self.admits = admits
        self.summary = (inspect.getdoc(handler) or name).partition("\n")[0]
        self._name = name
        self._handler = handler
        self._gate = gate
        self._read = read
        self._deps = gate.deps
        self._metrics = gate.metrics
        self._stall_s = gate.deps.limits.send_stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope, self._gate.room)
        connection: Connection | None = scope.get(CONNECTION)
        try:
            if await self._received(context, connection, receive, send):
                await self._race(context, Client(connection, receive, send, self._stall_s))
        finally:
            context.close()

    async def _received(
        self, context: RequestContext, connection: Connection | None, receive: Receive, send: Send
    ) -> bool:
        """Let the request in and read its body; a request that is refused here is answered here."""
        waited_s = 0.0
        try:
            context.request_id = wire_headers.request_id(context.headers)
            if self.admits:
                waited_s = await self._gate.turns.mine()
                self._gate.admit(context)
            if self._read is not None:
                await self._read(receive, context)
            elif context.method not in {"GET", "HEAD"}:
                whole = None if connection is None else connection.take_body()
                if whole is None:
                    waited_s = 0.0
                    context.body = await read_body(receive, context.headers, self._deps, context.share)
                else:
                    context.body = checked(whole, self._deps.limits, context.share)
            if self.admits:
                self._gate.arrived(context)
        except OverspillError as error:
            context.request_id = context.request_id or wire_headers.reply_id(context.headers)
            if isinstance(error, Refused) and context.stay is not None:
                context.stay.give_back(error)
            await self._send_reply(_rendered(error, context), context, send)
            return False
        except ClientGone:
            self._metrics.disconnects.inc()
            return False
        except Exception:  # the task boundary here too: a bug, or a disk that is gone
            log.exception("request crashed", request_id=context.request_id)
            await self._send_reply(_rendered(internal_error(context.request_id), context), context, send)
            return False
        context.accepted_at_s = self._deps.clock.now_s() - waited_s
        return True

    async def _race(self, context: RequestContext, client: Client) -> None:
        """Run the handler and send its reply until it is done, the client is gone, or it has stopped reading."""
        try:
            async with client:
                await self._serve(context, client)
        except Interrupted:
            self._metrics.disconnects.inc()
            log.info("client left", request_id=context.request_id, route=self._name, why=client.why)

    async def _serve(self, context: RequestContext, send: Client) -> None:
        try:
            reply = await self._handle(context)
            if isinstance(reply, Reply):
                await self._send_reply(reply, context, send)
            else:
                await self._send_stream(reply, context, send)
        except OSError:  # what ASGI servers raise when the connection broke under a send
            self._metrics.disconnects.inc()
        except BrokenOff as why:  # the server closes a connection whose body was not ended
            log.warning("reply cut off", request_id=context.request_id, route=self._name, why=str(why))
        finally:
            if context.chunks is not None:
                await context.chunks.aclose()
            context.close()  # at once: its caller, who has the whole answer, may send the next request

    async def _handle(self, context: RequestContext) -> Reply | StreamReply:
        try:
            return await self._handler(context)
        except asyncio.CancelledError:
            if context.stay is not None:
                context.stay.unanswered()
            raise
        except OverspillError as error:
            if context.stay is not None:
                context.stay.unanswered()
                if isinstance(error, Refused):
                    context.stay.refused(error)
            if error.status >= 500 and not isinstance(error, Refused):
                log.warning("request failed", request_id=context.request_id, code=error.code, error=error.message)
            return _rendered(error, context)
        except Exception:  # the task boundary: a bug is logged with its trace and answered
            log.exception("request crashed", request_id=context.request_id)
            return _rendered(internal_error(context.request_id), context)

    async def _send_reply(self, reply: Reply, context: RequestContext, send: Send) -> None:
        self._metrics.responses.labels(self._name, str(reply.status)).inc()
        body, lines = reply.body, [*reply.headers, *context.told_lines()]
        if len(body) >= MIN_BYTES:
            lines.append(("vary", "accept-encoding"))
            if reads_gzip(context.headers.get("accept-encoding", "")):
                body = await packed(body)
                lines.append(("content-encoding", "gzip"))
        lines.append(("content-length", str(len(body))))
        await send(_head(reply.status, reply.media_type, lines, context.request_id))
        await send({"type": "http.response.body", "body": b"" if context.method == "HEAD" else body})

    async def _send_stream(self, reply: StreamReply, context: RequestContext, send: Client) -> None:
        self._metrics.responses.labels(self._name, "200").inc()
        lines = [*reply.headers, *context.told_lines(), ("cache-control", "no-cache"), ("x-accel-buffering", "no")]
        await send(_head(200, reply.media_type, lines, context.request_id))
        pieces, piece, pour = reply.pieces, reply.first, reply.pour
        while not pieces.ended:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if pour is not None and send.sink is not None:
                pour(send.sink)
                pour = None
            piece = await pieces.next()
        await send({"type": "http.response.body", "body": piece})


def _rendered(error: OverspillError, context: RequestContext) -> Reply:
    return render_error(error, context.dialect, context.request_id)


def internal_error(request_id: str | None) -> OverspillError:
    return OverspillError(f"internal error; the log has the details under request id {request_id}")


def draining_or_starting(deps: GatewayDeps) -> Unavailable | None:
    """Return the refusal of a tier that takes no new requests now, with its reason."""
    why = deps.closed()
    if not why:
        return None
    retry_after_s = max(deps.back_in_s(), deps.limits.retry_after_s)
    return Unavailable(f"this tier takes no requests now: {why}", retry_after_s=retry_after_s)


def not_ready(deps: GatewayDeps, asker: str = "") -> Unavailable | None:
    """Return what probes are told of a tier that could answer no request now.

    Requests are taken all the same, unless it starts or drains: one may be kept for later, or answered from a cache,
    and each is told for itself who is away.

    Args:
        asker: the instance of the tier that asks: what leads back to it does not count.
    """
    refusal = draining_or_starting(deps)
    if refusal is not None:
        return refusal
    readiness = deps.dispatcher.readiness(asker)
    if readiness.ready:
        return None
    retry_after_s = max(readiness.back_in_s, deps.limits.retry_after_s)
    return Unavailable(f"no model can be served now: {readiness.why}", retry_after_s=retry_after_s)


def _head(status: int, media_type: str, lines: list[tuple[str, str]], request_id: str | None) -> Message:
    raw = [(b"content-type", media_type.encode())]
    if request_id is not None:
        raw.append((b"x-request-id", request_id.encode("latin-1")))
    raw += [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in lines]
    return {"type": "http.response.start", "status": status, "headers": raw}


def json_reply(body: bytes) -> Reply:
    return Reply(body=body, media_type=JSON)
