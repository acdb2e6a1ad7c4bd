"""One request on a connection: its body where it is whole already, and its reply in as few writes as it takes.

uvicorn writes the head of a reply by itself, and looks for what no header may hold in each of its lines; most replies
are one small body, and most bodies come with their head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from router.gateway.outbox import Outbox

_IN_NO_NAME = re.compile(rb'[\x00-\x20\x7f()<>@,;:\[\]={}\\"]')
_IN_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BODILESS = frozenset({204, 304})
_JOINED_BYTES = 64 * 1024  # a head is copied in front of a piece up to so long


class Watched(Protocol):
    """A connection that tells of its end."""

    def watch(self, gone: Callable[[], None]) -> None: ...

    def unwatch(self, gone: Callable[[], None]) -> None: ...


class Exchange:
    """A request and its reply, in the scope of the request as `router.gateway.endpoint.CONNECTION`.

    Its `send` takes the place of that of uvicorn's cycle, which goes on to hold the state of the exchange.

    Args:
        plain: the client speaks HTTP/1.0, and knows no chunks: where no length is told, the end of the connection is
            the body's.
    """

    __slots__ = ("_chunked", "_cycle", "_head", "_left_bytes", "_outbox", "_plain", "_soon", "unwatch", "watch")

    def __init__(self, connection: Watched, cycle: RequestResponseCycle, outbox: Outbox, *, plain: bool) -> None:
        self._cycle = cycle
        self._outbox = outbox
        self._soon = b""
        self._head = b""
        self._chunked = False
        self._left_bytes: int | None = None
        self._plain = plain
        self.watch = connection.watch
        self.unwatch = connection.unwatch

    @property
    def full(self) -> bool:
        """Whether what was sent waits for the client to read it."""
        return self._cycle.flow.write_paused

    @property
    def open_ended(self) -> bool:
        """Whether the answer has begun, is not whole, and tells of its end by that of the connection alone."""
        cycle = self._cycle
        begun = cycle.response_started and not cycle.response_complete
        return begun and self._plain and self._left_bytes is None and cycle.scope["method"] != "HEAD"

    def take_body(self) -> bytes | None:
        """Return the body, if all of it is there and nobody has taken it."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.response_complete:
            return None
        cycle.flow.resume_reading()
        body = bytes(cycle.body)
        cycle.body.clear()
        return body

    def write(self, piece: bytes) -> None:
        """Write a piece of the body of a reply that has begun, and is not full, in this turn; the body goes on."""
        cycle = self._cycle
        if not piece or cycle.disconnected or cycle.response_complete:
            return
        if not self._chunked or self._head:
            self._add(piece, more=True)
            return
        if not self._soon:
            self._outbox.put(self._write_soon)
        self._soon += b"%x\r\n%b\r\n" % (len(piece), piece)
        if len(self._soon) > _JOINED_BYTES:
            self._write_soon()

    def _write_soon(self) -> None:
        """Write what waits for the end of the turn."""
        cycle, soon = self._cycle, self._soon
        self._soon = b""
        if soon and not (cycle.disconnected or cycle.transport.is_closing()):
            cycle.transport.write(soon)

    async def send(self, message: Any) -> None:
        """Send, as ASGI has it.

        Raises:
            RuntimeError: what nobody may send now.
        """
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        expected = "http.response.body" if cycle.response_started else "http.response.start"
        if message["type"] != expected or cycle.response_complete:
            raise RuntimeError(f"got the ASGI message {message['type']!r} instead of {expected!r}, or after the end")
        if cycle.response_started:
            self._add(message.get("body", b""), more=message.get("more_body", False))
        else:
            self._begin(message["status"], [*cycle.default_headers, *message.get("headers", ())])

    def _begin(self, status: int, lines: list[tuple[bytes, bytes]]) -> None:
        """Make the head; it goes out with the first piece."""
        names, values = zip(*lines, strict=True) if lines else ((), ())
        if _IN_NO_NAME.search(b"".join(names)) or _IN_NO_VALUE.search(b"".join(values)):
            raise RuntimeError("a header of the reply holds what none may")
        cycle = self._cycle
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        closes = self._read_framing(lines)
        if not (cycle.keep_alive or closes):
            lines.append((b"connection", b"close"))
        if self._left_bytes is None and not (self._chunked or self._plain or self._is_bodiless(status)):
            self._chunked = True
            lines.append((b"transfer-encoding", b"chunked"))
        self._head = STATUS_LINE[status] + b"\r\n".join([*map(b": ".join, lines), b"\r\n"])

    def _read_framing(self, lines: Iterable[tuple[bytes, bytes]]) -> bool:
        """Read how the body will be framed; returns whether the reply says that it is the connection's last."""
        told = dict(lines)
        if b"content-length" in told:
            self._left_bytes = int(told[b"content-length"])
        if b"transfer-encoding" in told:
            self._chunked = told[b"transfer-encoding"].lower() == b"chunked"
        if b"connection" not in told:
            return False
        said = b",".join([value for name, value in lines if name == b"connection"])
        if b"close" not in [word.strip() for word in said.lower().split(b",")]:
            return False
        self._cycle.keep_alive = False
        return True

    def _is_bodiless(self, status: int) -> bool:
        return status in _BODILESS or self._cycle.scope["method"] == "HEAD"

    def _add(self, body: bytes, *, more: bool) -> None:
        cycle = self._cycle
        if cycle.scope["method"] == "HEAD":
            piece, self._left_bytes = b"", None
        elif self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            piece = piece if more else piece + b"0\r\n\r\n"
        else:
            piece = body
            if self._left_bytes is not None:
                self._left_bytes -= len(body)
                if self._left_bytes < 0 or (self._left_bytes and not more):
                    raise RuntimeError("the body of the reply is not as long as its content-length says")
        self._write(piece)
        if not more:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                cycle.transport.close()
            cycle.on_response()

    def _write(self, piece: bytes) -> None:
        if self._soon:
            self._write_soon()
        write, head = self._cycle.transport.write, self._head
        if head:
            self._head = b""
            if len(piece) <= _JOINED_BYTES:
                piece = head + piece
            else:
                write(head)
        if piece:
            write(piece)
