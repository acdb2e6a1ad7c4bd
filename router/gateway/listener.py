"""uvicorn, embedded: a socket bound before anything is loaded, and connections that cannot be held open for nothing.

uvicorn bounds neither how long nor how large a request head may be, answers too many connections with a bare 503, and
takes the signals for itself. Those four things are put right here; what comes after the head is the gateway's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from router.base.errors import ConfigError

log = structlog.get_logger("router.gateway")

_MAX_HEAD_BYTES = 64 * 1024
_BACKLOG = 2048
_LINGER_S = 2.0  # and at most this much is then read and dropped:
_LINGER_BYTES = 64 * 1024 * 1024
_CLOSE_S = 2  # after the drain: what uvicorn may take to close connections
_SPARE_FILES = 256  # sockets and pipes of engines, log files, the model store
_LOOK_S = 0.01

_REFUSALS = {
    400: b'{"error":{"message":"this is not an HTTP request","type":"invalid_request_error","param":null,'
    b'"code":"invalid_request"}}',
    408: b'{"error":{"message":"the request head did not arrive in time","type":"invalid_request_error",'
    b'"param":null,"code":"request_timeout"}}',
    431: b'{"error":{"message":"the request head is larger than 65536 bytes","type":"invalid_request_error",'
    b'"param":null,"code":"headers_too_large"}}',
    503: b'{"error":{"message":"too many connections are open","type":"unavailable_error","param":null,'
    b'"code":"unavailable"}}',
}
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a connection may cost before it has brought a whole request head.

    Attributes:
        header_timeout_s: a request head that takes longer to arrive is refused with 408.
        keep_alive_s: an idle connection is closed after so long.
        max_connections: open connections; further ones are told to come back, and closed.
    """

    header_timeout_s: float = 15.0
    keep_alive_s: float = 75.0
    max_connections: int = 8192


def bind(host: str, port: int, table: str) -> socket.socket:
    """Take the address, before minutes go into loading weights.

    Args:
        table: where `host` and `port` stand in the configuration, for the error.

    Raises:
        ConfigError: it is taken, or not of this machine; names the remedy.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unusable(host, port, table, error) from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _unusable(host, port, table, error) from error
    bound.setblocking(False)
    return bound


def allow_open_files(limits: ConnectionLimits) -> None:
    """Raise this process's limit on open files to what `max_connections` needs, as far as the system lets it."""
    wanted = limits.max_connections + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "the open-files limit is lower than so many connections need; raise LimitNOFILE or `ulimit -Hn`",
            limit=allowed,
            max_connections=limits.max_connections,
            needed=wanted,
        )


class Listener(uvicorn.Server):
    """Serves one application on a bound socket while `running`; its owner handles the signals."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits) -> None:
        """Prepare; `running` serves."""
        super().__init__(_Config(app, limits))

    @property
    def busy(self) -> int:
        """Requests being answered now."""
        return len(self.server_state.tasks)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the tier, which drains before it lets go of the socket."""
        yield

    @contextlib.asynccontextmanager
    async def running(self, bound: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
        """Serve on `bound` until the block ends; whoever still waits for an answer then is cut off.

        Yields:
            The task that serves. When it is done inside the block, the listener has died, and the owner must leave.

        Raises:
            Exception: what ended the listener: instead of entering the block, or at its end.
        """
        task = asyncio.create_task(self.serve(sockets=[bound]), name="gateway")
        try:
            while not self.started and not task.done():  # noqa: ASYNC110 - uvicorn announces nothing
                await asyncio.sleep(_LOOK_S)
            if task.done():
                task.result()
            yield task
        finally:
            self.should_exit = True
            await asyncio.wait({task})
        task.result()


class _Config(uvicorn.Config):
    """uvicorn's settings for a tier, and the limits that our protocol reads."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits) -> None:
        super().__init__(
            app,
            http=_GuardedProtocol,
            ws="none",
            lifespan="off",
            loop="uvloop",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_S,
            backlog=_BACKLOG,
            # A proxy on this host may name the caller, so that "loopback only" also holds behind it.
            proxy_headers=True,
            forwarded_allow_ips=["127.0.0.1", "::1"],
        )
        self.limits = limits


class _LingeringTransport:
    """A connection whose `close` first lets the peer finish sending, for a moment, and then read the answer.

    A kernel that closes a connection with unread input resets it, and the peer never sees the 413 that said why.
    Everything else is the transport's own.
    """

    def __init__(self, transport: asyncio.Transport, unread: Callable[[], bool]) -> None:
        self._transport = transport
        self._unread = unread
        self._left_bytes = _LINGER_BYTES
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        if self._unread():
            self.linger()
        else:
            self._transport.close()

    def linger(self) -> None:
        if self.is_closing():
            return
        self.lingers = True
        self._transport.write_eof()
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)

    def discard(self, data: bytes) -> None:
        """Drop what still comes; whoever sends for ever is cut off."""
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            self._transport.abort()


class _GuardedProtocol(HttpToolsProtocol):
    """One connection, with bounds on the request head: its time, its size; and on the number of connections."""

    config: _Config

    def __init__(
        self,
        config: _Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.timeout_keep_alive = config.limits.keep_alive_s  # type: ignore[assignment]  # a float does
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._head_is_new = False
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        self._lingering = _LingeringTransport(transport, self._has_unread_body)
        super().connection_made(self._lingering)  # type: ignore[arg-type]  # it passes for one
        if len(self.connections) > self.config.limits.max_connections:
            self._refuse(503, b"retry-after: 1\r\nretry-after-ms: 1000\r\n")
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._body_read()
        for cycle, _ in self.pipeline:  # uvicorn would answer them into the closed connection
            cycle.disconnected = True
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering.lingers:
            self._lingering.discard(data)
            return
        if self.transport.is_closing():
            return
        self._head_is_new = False
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        # A piece may hold the ends of other requests before this head begins: it counts from the next piece on.
        self._head_bytes = 0 if self._head_is_new else self._head_bytes + len(data)
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse(431)
        elif self._head_timer is None:
            self._arm()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._head_is_new = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._body_read()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_unread_body():  # refused before it was read: what is left of it is dropped, but not for ever
            self._unread_timer = self.loop.call_later(self.config.limits.keep_alive_s, self.transport.close)

    def _body_read(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - what uvicorn says; the refusal says the same
        self._refuse(400)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: the request is answered as if it had not asked, and no caller can fill the log."""

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
        elif self._head_bytes:
            self._refuse(408)
        else:
            self.transport.close()

    def _has_unread_body(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete and self.cycle.more_body

    def _refuse(self, status: int, headers: bytes = b"") -> None:
        if not self.transport.is_closing():
            body = _REFUSALS[status]
            head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
            self.transport.write(head % (status, _REASONS[status], len(body)) + headers + b"\r\n" + body)
            if status == 503:
                self.transport.close()  # too many are open as it is
            else:
                self._lingering.linger()


def _unusable(host: str, port: int, table: str, error: OSError) -> ConfigError:
    taken = error.errno == errno.EADDRINUSE
    remedy = "another process has it: choose another --port, or stop that one" if taken else "choose another host"
    reason = (error.strerror or str(error)).lower()
    return ConfigError(
        f"cannot listen on {host}:{port} ({reason}); {remedy}", param=f"{table}.{'port' if taken else 'host'}"
    )
