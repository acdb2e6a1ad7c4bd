"""One HTTP/1.1 connection to a server: a request at a time, its response as it comes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import httptools

from router.base.errors import in_words

MAX_FIELD_BYTES = 256 * 1024
"""Between two pieces of a body, and before the first: fields of the head, trailers, what frames chunks.

A load report of many variants is one long line.
"""
_READ_AHEAD_BYTES = 128 * 1024
_BODILESS = frozenset({204, 304})


class TransportError(Exception):
    """The connection broke, or never came about. Never leaves this package."""


class LeftError(TransportError):
    """This machine has left the network of the connection: the server may know nothing of it."""


class DisconnectedError(TransportError):
    """The connection ended before anything of a response came."""


class Connection(asyncio.Protocol):
    """Made by `router.upstream.http.pool`, which is told when it is free again, and when it is gone.

    Attributes:
        loop: the event loop, asked for once: each time is a call of the kernel.
        kept: it serves further requests.
        free_until_s: how long it may stay idle, on the clock of its pool.
        local: address of this side, as `getsockname` gives it; empty until it was made.
    """

    def __init__(self, freed: Callable[[Connection], None], lost: Callable[[Connection], None], *, kept: bool) -> None:
        self._freed = freed
        self._lost: Callable[[Connection], None] | None = lost
        self._exchange: Exchange | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._made = False
        self.loop = asyncio.get_running_loop()
        self.kept = kept
        self.free_until_s = 0.0
        self.local: tuple[Any, ...] = ()

    def send(self, request: bytes) -> Exchange:
        """Send a request, head and body; the response is the exchange's."""
        self._exchange = exchange = Exchange(self)
        self._parser = exchange.parser = httptools.HttpResponseParser(exchange)
        if self._transport.is_closing():
            exchange.broke(DisconnectedError("the server had closed the connection"))
        else:
            self._transport.write(request)
        return exchange

    @property
    def open(self) -> bool:
        """Whether it can take a request."""
        return self._lost is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Close it now, whatever is on its way, also before it was made; its place is free at once."""
        if self._made:
            self._transport.abort()
        self._leave()

    def lose_link(self) -> None:
        """Close it now, and tell whoever waits for its response that it went with its network."""
        self._break(LeftError("this machine has left the network that it was connected by"))

    def pause(self) -> None:
        self._transport.pause_reading()

    def resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._made = True
        self.local = transport.get_extra_info("sockname") or ()

    def data_received(self, data: bytes) -> None:
        exchange, parser = self._exchange, self._parser
        if exchange is None or parser is None:
            self.abort()  # nobody asked
            return
        exchange.begun = True
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._break(TransportError("the server changed to another protocol"))
            return
        except httptools.HttpParserError as error:
            if not exchange.arrived:
                self._break(TransportError(f"this is no HTTP response: {in_words(error)}"))
                return
            exchange.surplus = True
        if exchange.arrived:
            self._finish(exchange)
        elif exchange.is_all_fields(len(data)):  # the parser keeps a line until its end, which may never come
            self._break(TransportError(f"this is no HTTP response: its fields are larger than {MAX_FIELD_BYTES} bytes"))
        else:
            exchange.was_read()

    def connection_lost(self, exc: Exception | None) -> None:
        exchange = self._let_go()
        self._leave()
        if exchange is None:
            return
        why = "the server closed the connection" if exc is None else in_words(exc)
        if not exchange.begun:
            exchange.broke(DisconnectedError(why))
        elif exc is not None or not exchange.ends_with_connection:
            exchange.broke(TransportError(why))
        else:
            exchange.end_body()

    def _finish(self, exchange: Exchange) -> None:
        """The response is whole: take the next request, if nothing speaks against it."""
        self._let_go()
        clean = exchange.keep_alive and not exchange.surplus and self._transport.get_write_buffer_size() == 0
        if self.kept and clean and self.open:
            if exchange.paused:
                self._transport.resume_reading()
            self._freed(self)
        else:
            self.abort()

    def _break(self, error: TransportError) -> None:
        exchange = self._let_go()
        if exchange is not None:
            exchange.broke(error)
        self.abort()

    def _let_go(self) -> Exchange | None:
        """Return the exchange that was under way, if any, and part it from its parser: they hold each other."""
        exchange, self._exchange, self._parser = self._exchange, None, None
        if exchange is not None:
            del exchange.parser
        return exchange

    def _leave(self) -> None:
        lost, self._lost = self._lost, None
        if lost is not None:
            lost(self)


class Exchange:
    """The response to one request, fed by the parser of its connection.

    Attributes:
        status: HTTP status; 0 before the head has arrived.
        headers: by lower-case name; a repeated one is joined by a comma.
        begun: something of it has arrived.
        keep_alive: its connection may serve further requests.
        surplus: the server went on after its end.
        left_bytes: of the body, arrived and not taken.
        paused: the server was told to wait, since nobody read.
    """

    __slots__ = (
        "_connection",
        "_error",
        "_field_bytes",
        "_had_body",
        "_heard",
        "_pieces",
        "_waiter",
        "_whole",
        "begun",
        "ends_with_connection",
        "headers",
        "keep_alive",
        "left_bytes",
        "parser",
        "paused",
        "status",
        "surplus",
    )

    def __init__(self, connection: Connection) -> None:
        self.parser: httptools.HttpResponseParser
        self._connection = connection
        self._error: Exception | None = None
        self._field_bytes = 0
        self._had_body = False
        self._heard: Callable[[], bool] | None = None
        self._pieces: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._whole = False
        self.begun = False
        self.ends_with_connection = False
        self.headers: dict[str, str] = {}
        self.keep_alive = False
        self.left_bytes = 0
        self.paused = False
        self.status = 0
        self.surplus = False

    # ── what a caller asks of it ────────────────────────────────────────────────────────────────────────────────────

    async def head(self) -> None:
        """Wait until status and headers are there.

        Raises:
            DisconnectedError: the connection ended before anything came.
            TransportError: it broke.
        """
        while not self.status:
            if self._error is not None:
                raise self._error
            await self.news()

    async def read(self) -> bytes:
        """Return all that has arrived, as soon as there is something; empty at the end of the body.

        Raises:
            TransportError: the connection broke.
        """
        while self.waits:
            await self.news()
        data = self.take()
        if not data and self._error is not None:
            raise self._error
        return data

    @property
    def waits(self) -> bool:
        """Whether a read would wait."""
        return not self._pieces and self._error is None and not self._whole

    def news(self, heard: Callable[[], bool] | None = None) -> asyncio.Future[None]:
        """Return what is done once its connection has told it anything.

        Args:
            heard: called when all of a read is here that is not the last one; where it returns True, the wait goes on.
        """
        self._heard = heard
        self._waiter = waiter = self._connection.loop.create_future()
        return waiter

    def take(self, enough_bytes: int | None = None) -> bytes:
        """Return all that has arrived, or the first pieces of it that are enough; empty where nothing has."""
        pieces = self._pieces
        if not pieces:
            return b""
        if enough_bytes is not None and self.left_bytes > enough_bytes:
            data = b""
            while len(data) < enough_bytes:
                data += pieces.popleft()
        else:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
        self.left_bytes -= len(data)
        if self.paused and not pieces:
            self.paused = False
            self._connection.resume()
        return data

    @property
    def complete(self) -> bool:
        """Whether the whole body was read."""
        return self._whole and not self._pieces

    @property
    def arrived(self) -> bool:
        """Whether the whole body has arrived."""
        return self._whole

    def end(self, why: Exception) -> None:
        """Make `read` raise `why`, also where it waits already; what was whole stays so."""
        if not self._whole:
            self.broke(why)

    def close(self) -> None:
        """Let go: the connection of a body that did not arrive whole is closed, which cancels the work behind it."""
        if not self._whole:
            self._error = self._error or TransportError("the response was closed")
            self._connection.abort()

    # ── what its connection tells it ────────────────────────────────────────────────────────────────────────────────

    def broke(self, error: Exception) -> None:
        """Nothing more will come; what came can still be read, unless somebody said that it must not."""
        if self._error is None:
            self._error = error
        self._wake()

    def end_body(self) -> None:
        """The connection ended, and with it a body whose length was not told."""
        self._whole = True
        self._wake()

    def on_message_begin(self) -> None:
        self.surplus = self._whole

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text, headers = name.decode("latin-1").lower(), value.decode("latin-1"), self.headers
        headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def on_headers_complete(self) -> None:
        if self._whole:
            return
        status = self.parser.get_status_code()
        if status < 200:
            self.headers = {}  # more is to come: `100 Continue`, early hints
            return
        told = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "")
        self.ends_with_connection = not told and status not in _BODILESS
        self.keep_alive = self.parser.should_keep_alive() and not self.ends_with_connection
        self.status = status
        self._wake()

    def on_body(self, data: bytes) -> None:
        if self._whole:
            return
        self._had_body = True
        self._pieces.append(data)
        self.left_bytes = left_bytes = self.left_bytes + len(data)
        if left_bytes > _READ_AHEAD_BYTES and not self.paused:
            self.paused = True
            self._connection.pause()
        if self._heard is None and self._waiter is not None:
            self._wake()

    def is_all_fields(self, read_bytes: int) -> bool:
        """Whether one read more, of so many bytes, has brought nothing of the body, and they were too many by now."""
        self._field_bytes = 0 if self._had_body else self._field_bytes + read_bytes
        self._had_body = False
        return self._field_bytes > MAX_FIELD_BYTES

    def was_read(self) -> None:
        """All that came with one read has been told."""
        if self._heard is None or not self._pieces:
            return
        try:
            goes_on = self._heard()
        except Exception as bug:  # noqa: BLE001 - its reader's own: raised there, where somebody knows what it means
            self.broke(bug)
            return
        if not goes_on:
            self._wake()

    def on_message_complete(self) -> None:
        if self.status:
            self._whole = True
            self._wake()

    def _wake(self) -> None:
        self._heard = None
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
