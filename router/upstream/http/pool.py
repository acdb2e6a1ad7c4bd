"""The connections to one server: the one used last is taken first, so that under little load the others can go."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohappyeyeballs
import msgspec

from router.base.clock import Clock
from router.base.errors import in_words
from router.base.path import is_here, watch_over
from router.base.shortage import is_among_last, own_shortage
from router.base.timers import within
from router.upstream.http.connection import Connection, TransportError

_SECOND_FAMILY_S = 0.25  # RFC 8305: how long an address of one family goes first
_ADDRESSES_KEPT_S = 10.0
_KEPT_FILES = 128  # for callers who come, health, databases and processes that begin: more than the door keeps


class NotConnectedError(TransportError):
    """No connection could be made: nothing of the request was sent."""


class PoolExhaustedError(TransportError):
    """Every connection of the pool stayed in use, or this process may open no more of them."""


class ConnectTrace(msgspec.Struct):
    """What a new connection cost: an exchange on it says nothing about the link before that is taken off.

    Attributes:
        connect_s: TCP and TLS together, 0 on a connection that was open already; connected: it was not.
    """

    clock: Clock
    connect_s: float = 0.0
    connected: bool = False


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Attributes as in `router.upstream.servers.polled.ServerOptions`; `tls` is False for plain HTTP."""

    tls: ssl.SSLContext | bool
    connect_timeout_s: float
    max_connections: int
    keepalive_expiry_s: float


class ConnectionPool:
    """Create it on the event loop, `close` it there.

    Args:
        url: of the server; its host and port are connected to.
    """

    def __init__(self, url: str, clock: Clock, options: PoolOptions) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = options.tls if isinstance(options.tls, ssl.SSLContext) else ssl.create_default_context()
        self._clock = clock
        self._options = options
        self._idle: deque[Connection] = deque()  # the one idle longest is the first
        self._open: set[Connection] = set()
        self._places = 0  # taken: by those that are open, and those that are being made
        self._waiting: deque[asyncio.Future[Connection | None]] = deque()
        self._expiry: asyncio.TimerHandle | None = None
        self._addresses: list[Any] = []
        self._addresses_until_s = 0.0
        self._closed = False

    @property
    def warm(self) -> bool:
        """Whether a connection is open and idle."""
        self._expire()
        return any(connection.open for connection in self._idle)

    async def take(self, trace: ConnectTrace) -> Connection:
        """Return a connection for one request, which gives itself back.

        Raises:
            PoolExhaustedError: none became free in time, or can be opened.
            NotConnectedError: the server cannot be reached.
        """
        connection = self._take_idle()
        if connection is not None:
            return connection
        began_s, limit_s = self._clock.now_s(), self._options.connect_timeout_s
        if self._places < self._options.max_connections:
            self._places += 1
        else:
            connection = await self._wait(limit_s)
            if connection is not None:
                return connection
        made: list[Connection] = []
        try:
            return await self._connect(trace, limit_s - (self._clock.now_s() - began_s), made, kept=True)
        finally:
            if not made:  # one that was made gives its place back itself
                self._give_place()

    async def fresh(self, trace: ConnectTrace) -> Connection:
        """Return a new connection that serves one request, and counts for none of the pool's places."""
        return await self._connect(trace, self._options.connect_timeout_s, [], kept=False)

    async def close(self) -> None:
        """Close every connection; whoever waits for one hears of it."""
        self._closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        for connection in list(self._open):
            connection.abort()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(NotConnectedError("the client was closed"))
        await asyncio.sleep(0)  # the loop closes what was aborted

    def drop_idle(self) -> None:
        """Close what nobody uses: the server has fallen silent, and may never have heard of its end."""
        while self._idle:
            self._idle.popleft().abort()

    def drop_gone(self) -> bool:
        """End every connection of an address that this machine no longer has: nothing comes over it any more.

        Returns:
            Whether there was one.
        """
        local = {_address(connection): connection.local for connection in self._open if connection.local}
        gone = {address for address, socket_name in local.items() if not is_here(socket_name)}
        for connection in [connection for connection in self._open if _address(connection) in gone]:
            connection.lose_link()
        return bool(gone)

    def _take_idle(self) -> Connection | None:
        self._expire()
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _wait(self, limit_s: float) -> Connection | None:
        """Wait for a free connection, or for a place, which is None."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Connection | None] = loop.create_future()
        self._waiting.append(waiter)

        def give_up() -> None:
            if not waiter.done():
                waiter.set_exception(PoolExhaustedError("every connection is in use"))

        timer = loop.call_later(limit_s, give_up)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:  # it came in the same turn
                self._pass_on(waiter.result())
            raise
        finally:
            timer.cancel()
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    async def _connect(self, trace: ConnectTrace, limit_s: float, made: list[Connection], *, kept: bool) -> Connection:
        """Connect; what was made stands in `made`, also where nobody gets it since the time ended in that turn."""
        began_s = self._clock.now_s()
        try:
            connection = await within(max(limit_s, 0.0), self._make(made, kept=kept))
        except BaseException as error:
            for connection in made:
                connection.abort()
            if isinstance(error, asyncio.TimeoutError):
                raise NotConnectedError("no connection within the time limit") from None
            if isinstance(error, OSError):
                shortage, why = own_shortage(error), _without_address(error)
                raise PoolExhaustedError(shortage) if shortage else NotConnectedError(why) from error
            raise
        trace.connect_s, trace.connected = self._clock.now_s() - began_s, True
        return connection

    async def _make(self, made: list[Connection], *, kept: bool) -> Connection:
        loop = asyncio.get_running_loop()
        lost = self._lost if kept else self._open.discard
        sock = await aiohappyeyeballs.start_connection(
            await self._look_up(), happy_eyeballs_delay=_SECOND_FAMILY_S, loop=loop
        )
        try:
            if is_among_last(sock, _KEPT_FILES):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # noqa: TRY301 - told where others are
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_over(sock)
            _, connection = await loop.create_connection(
                lambda: self._noted(made, Connection(self._freed, lost, kept=kept)),
                sock=sock,
                ssl=self._tls,
                server_hostname=self._host if self._tls is not None else None,
            )
        except BaseException:
            sock.close()
            raise
        if connection.open:  # else it was lost in the turn that it was made in
            self._open.add(connection)
        return connection

    @staticmethod
    def _noted(made: list[Connection], connection: Connection) -> Connection:
        made.append(connection)  # before it is there: whoever is cancelled meanwhile still knows of it
        return connection

    async def _look_up(self) -> list[Any]:
        """Return the server's addresses as `getaddrinfo` does; of a name they are asked for now and then."""
        now_s = self._clock.now_s()
        if now_s >= self._addresses_until_s:
            loop = asyncio.get_running_loop()
            self._addresses = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._addresses_until_s = float("inf") if _is_address(self._host) else now_s + _ADDRESSES_KEPT_S
        return self._addresses

    def _freed(self, connection: Connection) -> None:
        """A connection served its request: it goes to whoever waits longest, or rests."""
        if self._closed:
            connection.abort()
            return
        connection.free_until_s = self._clock.now_s() + self._options.keepalive_expiry_s
        self._pass_on(connection)

    def _lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._give_place()

    def _pass_on(self, connection: Connection | None) -> None:
        if connection is None:
            self._give_place()
            return
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        self._idle.append(connection)
        if self._expiry is None:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self._options.keepalive_expiry_s, self._look_for_expired)

    def _give_place(self) -> None:
        """A place is free: whoever waits longest may connect."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._places -= 1

    def _look_for_expired(self) -> None:
        self._expiry = None
        self._expire()
        if self._idle and not self._closed:
            left_s = max(self._idle[0].free_until_s - self._clock.now_s(), 0.0)
            self._expiry = asyncio.get_running_loop().call_later(left_s, self._look_for_expired)

    def _expire(self) -> None:
        """Close what was idle for too long: the server may be about to."""
        now_s = self._clock.now_s()
        while self._idle and self._idle[0].free_until_s <= now_s:
            self._idle.popleft().abort()


def _without_address(error: OSError) -> str:
    """Say what went wrong; the event loop's own words name the address, and callers are told these."""
    if isinstance(error, ssl.SSLError) or not error.errno or error.errno < 0:  # numbers of other lists
        return in_words(error)
    return f"{type(error).__name__}: {os.strerror(error.errno)}"


def _address(connection: Connection) -> tuple[Any, ...]:
    """Return a connection's own address without its port: thousands share one, which is asked about once."""
    return connection.local[:1] + connection.local[2:]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
