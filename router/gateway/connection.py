"""One HTTP connection, with bounds on its idle time and on the time and size of a request head.

uvicorn bounds neither how long nor how large a request head may be, answers too many connections with a bare 503, and
loses the body of a request that asks for another protocol. That is put right here; what comes after the head is the
gateway's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.base.shortage import is_among_last
from router.gateway.auth import ADMITTED, CERTIFICATE
from router.gateway.client import CONNECTION
from router.gateway.connection_table import ConnectionTable
from router.gateway.exchange import Exchange
from router.gateway.head_refusals import MAX_HEAD_BYTES, MAX_TARGET_BYTES, HeadStatus, head_refusal
from router.gateway.lingering import LingeringTransport
from router.gateway.outbox import Outbox

KEPT_FILES = 64
"""Of what this process may open, so many are no connection's: databases and engines that begin anew need them."""
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a connection may cost before it has brought a whole request head.

    Attributes:
        header_timeout_s: a request head that takes longer to arrive is answered with 408, and its connection closed.
        keep_alive_s: an idle connection is closed after so long.
        max_connections: open connections. A further one takes the place of an idle one, strangers first: see
            `router.gateway.connection_table`; where all are busy it is told to come back, and closed.
    """

    header_timeout_s: float = 15.0
    keep_alive_s: float = 75.0
    max_connections: int = 8192


class ServerSettings(uvicorn.Config):
    """uvicorn's settings for a tier, and what its connections share: their limits, their table and their outbox."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, *, close_s: int) -> None:
        super().__init__(
            app,
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            loop="uvloop",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=close_s,
            proxy_headers=False,  # `router.gateway.http.front` sees to them
        )
        self.limits = limits
        self.table = ConnectionTable(limits.max_connections)
        self.outbox = Outbox()


class GuardedProtocol(HttpToolsProtocol):
    """One connection, with bounds on the request head: its time, its size; and its place among all connections."""

    config: ServerSettings

    def __init__(
        self,
        config: ServerSettings,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
        certificate: str = "",
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._certificate = certificate
        self.timeout_keep_alive = config.limits.keep_alive_s  # type: ignore[assignment]  # a float does
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = self._piece_bytes = 0
        self._in_head = True
        self._head_begun = False
        self._heads_begun = 0
        self._unread_timer: asyncio.TimerHandle | None = None
        self._watchers: list[Callable[[], None]] = []
        self._lost = False
        self._running: RequestResponseCycle | None = None  # the request whose answer is on its way, or went out last
        self._refusal = b""  # of a later one, told after the answers before it

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` when the client has gone; at once, if it has."""
        if self._lost:
            gone()
            return
        self._watchers.append(gone)
        if not self.pipeline:
            self.flow.resume_reading()  # the last piece of a long body has stopped it; the end of a connection is read

    def unwatch(self, gone: Callable[[], None]) -> None:
        """Do not call it any more."""
        if gone in self._watchers:
            self._watchers.remove(gone)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        self._lingering = LingeringTransport(transport, self._has_unread_body, self._is_cut_off)
        super().connection_made(self._lingering)  # type: ignore[arg-type]  # it passes for one
        crowded = is_among_last(transport.get_extra_info("socket"), KEPT_FILES)
        if not self.config.table.opened(self, crowded=crowded):
            self._refuse(503)
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self.config.table.lost(self)
        self._lost = True
        for gone in self._watchers.copy():
            gone()
        self._disarm()
        self._body_read()
        waiting = [cycle for cycle, _ in self.pipeline]  # uvicorn would answer them into the closed connection
        self.pipeline.clear()
        for cycle in filter(None, [self._running, *waiting]):
            cycle.disconnected = True  # uvicorn tells the latest one alone
            cycle.message_event.set()
        for cycle in waiting:
            _part(cycle)
        super().connection_lost(exc)
        self._let_go()

    def _let_go(self) -> None:
        """Let go of what holds this connection in turn, so that it is freed now, and not by a garbage collection.

        One that waits for that has long lived through the young ones; the next full one may be a minute away.
        """
        self._unset_keepalive_if_required()
        self._lingering.let_go()
        for cycle in (self.cycle, self._running):
            if cycle is not None:
                _part(cycle)
        self._running = None
        self.cycle = self.scope = self.headers = None  # type: ignore[assignment]  # as before its first request

    def data_received(self, data: bytes) -> None:
        if self._lingering.lingers:
            self._lingering.discard(data)
            return
        if self.transport.is_closing() or self._refusal:
            return
        self._heads_begun = 0
        self._piece_bytes = len(data)
        between_requests = not self._head_begun and (self.cycle is None or not self.cycle.more_body)
        self._unset_keepalive_if_required()
        self._feed(data)
        if not self._in_head or self.transport.is_closing():
            return
        if self._heads_begun == 0:
            self._head_bytes += len(data)
        else:  # where a piece holds the ends of other requests before this head, it counts from the next piece on
            self._head_bytes = len(data) if self._heads_begun == 1 and between_requests else 0
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(self._too_large())
        elif self._head_timer is None:
            self._arm()

    def _feed(self, data: bytes) -> None:
        """Parse what has arrived: as many requests as it holds, whatever other protocols they ask for."""
        try:
            while data and not (self.transport.is_closing() or self._refusal):
                data = self._parsed(data)
        except httptools.HttpParserError:
            self.send_400_response("")

    def _parsed(self, data: bytes) -> bytes:
        """Parse up to the end, or to a head that asks for another protocol; returns what is left then."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade()
            return data[upgrade.args[0] :]
        return b""

    def _go_on_without_upgrade(self) -> None:
        """Read what follows a head that asked for another protocol as what HTTP/1.1 says it is: its body.

        The parser takes it for the other protocol. Another one is told how long the body is, and goes on. The method
        says nothing of that, and CONNECT would ask for another protocol again.
        """
        framing = [b"%s: %s\r\n" % line for line in self.scope["headers"] if line[0] in _FRAMING]
        self.parser = httptools.HttpRequestParser(_RestOfMessage(self))
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._head_begun = True
        self._heads_begun += 1

    def on_headers_complete(self) -> None:
        self._in_head = self._head_begun = False
        may_be_large, self._head_bytes = self._head_bytes + self._piece_bytes > MAX_HEAD_BYTES, 0
        self._disarm()
        if len(self.url) > MAX_TARGET_BYTES or (may_be_large and self._is_large()):
            self._refuse(self._too_large())
            raise _HeadRefused  # so that the parser stops: what follows belongs to nobody
        if not self.url.startswith(b"/"):
            self._take_absolute_target()
        self.scope[ADMITTED] = self._admitted  # type: ignore[literal-required]
        if self._certificate:
            self.scope[CERTIFICATE] = self._certificate  # type: ignore[literal-required]
        self.config.table.busy(self)
        super().on_headers_complete()
        exchange = Exchange(self, self.cycle, self.config.outbox, plain=self.scope["http_version"] == "1.0")
        self.scope[CONNECTION] = exchange  # type: ignore[literal-required]
        self.cycle.send = exchange.send  # type: ignore[method-assign]
        self.headers = []  # fields that follow a body go nowhere: they cannot add to a head that was judged already

    def _is_large(self) -> bool:
        """Whether a head is too large that came in one piece, perhaps with others and a body."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES

    def _too_large(self) -> Literal[414, 431]:
        """Say what is too large of a head: the target, or the fields that follow it."""
        return 414 if len(self.url) > MAX_TARGET_BYTES else 431

    def _take_absolute_target(self) -> None:
        """`GET http://host/path`: that host stands for the `host` header, as RFC 9112 has it."""
        target = httptools.parse_url(self.url)
        if target.host is not None:
            host = target.host if target.port is None else b"%s:%d" % (target.host, target.port)
            # In place: the scope has this list.
            self.headers[:] = [line for line in self.headers if line[0] != b"host"] + [(b"host", host)]
            self.url = (target.path or b"/") + (b"?" + target.query if target.query else b"")

    def _admitted(self) -> None:
        self.config.table.proved(self)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the body is still to come: `_go_on_without_upgrade`
        super().on_message_complete()
        self._body_read()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._running is not None:
            _part(self._running)
        super().on_response_complete()
        if self._refusal and not self._answers_run():
            self._end_with(self._refusal)
        if self.cycle is None or self.cycle.response_complete:
            self.config.table.rests(self)
        if self._has_unread_body():  # refused before it was read: what is left of it is dropped, but not for ever
            self._unread_timer = self.loop.call_later(self.config.limits.keep_alive_s, self.transport.close)

    def _body_read(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def shutdown(self) -> None:
        """The server ends: an idle connection is closed, whatever its peer says to that."""
        if self.cycle is None or self.cycle.response_complete:
            self._lingering.close_now()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - what uvicorn says; the refusal says the same
        self._refuse(400)

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(self.config.limits.header_timeout_s, self._head_too_slow)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_slow(self) -> None:
        """Close; a pipelined head that waits for an answer still running gets its time again."""
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._arm()
        elif self._head_begun:
            self._refuse(408)
        else:
            self.transport.close()

    def make_room(self) -> None:
        """Close for others: a caller who has begun to ask hears why, an idle one finds the connection closed."""
        if self._head_begun or self._lingering.has_unread():
            self._refuse(503)
        else:
            self._lingering.close_now()

    def _has_unread_body(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete and self.cycle.more_body

    def _refuse(self, status: HeadStatus) -> None:
        """Answer what cannot be read, and close; the answers to what came before it go out whole."""
        if self.transport.is_closing() or self._refusal:
            return
        refusal = head_refusal(status)
        if not self._answers_run():
            self._end_with(refusal, now=status == 503)  # too many are open as it is
        elif self._in_body_of_running():
            self._give_up_running(refusal)
        else:
            if self.pipeline and self.cycle.more_body:
                self.pipeline.popleft()  # what waited for its turn, and whose own body is at fault
            self._refusal = refusal

    def _is_cut_off(self) -> bool:
        """Whether the end of the connection would pass for that of an answer which is not whole."""
        running = self._running
        exchange: Exchange | None = None if running is None else running.scope.get(CONNECTION)  # type: ignore[assignment]
        return exchange is not None and exchange.open_ended

    def _answers_run(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _in_body_of_running(self) -> bool:
        return self.cycle is self._running and self.cycle.more_body

    def _give_up_running(self, refusal: bytes) -> None:
        """The rest of its body cannot be read: it is told so, unless its answer has begun."""
        cycle = self.cycle
        cycle.disconnected = True
        cycle.message_event.set()
        for gone in self._watchers.copy():
            gone()
        if cycle.response_started:
            self._lingering.close_now()
        else:
            self._end_with(refusal)

    def _end_with(self, refusal: bytes, *, now: bool = False) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(refusal)
        if now:
            self._lingering.close_now()
        else:
            self._lingering.linger()


def _part(cycle: RequestResponseCycle) -> None:
    """Take an exchange and uvicorn's cycle apart, which hold each other; who serves the request has the exchange."""
    cycle.scope.pop(CONNECTION, None)  # type: ignore[misc]
    vars(cycle).pop("send", None)


class _HeadRefused(Exception):
    """Ends the parsing of a request that was refused for its head."""


class _RestOfMessage:
    """Callbacks of a parser that is told the head of a request once more: the request itself is under way."""

    def __init__(self, protocol: GuardedProtocol) -> None:
        self._protocol = protocol
        self._again = True
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        if not self._again:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._again:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._again:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._again:
            self._again = False
        else:
            self._protocol.on_headers_complete()
