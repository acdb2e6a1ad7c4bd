"""The HTTP client under every streamed request to an upstream: one request over a pool of connections.

A request and a token of a stream cost it a tenth of what a general client takes, which is most of what a tier spends on
an answer that it only passes on; probes and discovery use httpx.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from router.base.build import user_agent
from router.base.clock import Clock
from router.upstream.http.connection import Connection, DisconnectedError, Exchange, LeftError, TransportError
from router.upstream.http.pool import ConnectionPool, ConnectTrace, NotConnectedError, PoolExhaustedError, PoolOptions

__all__ = [
    "ConnectTrace",
    "LeftError",
    "NotConnectedError",
    "PoolExhaustedError",
    "PoolOptions",
    "Response",
    "StreamingClient",
    "TransportError",
    "UnsendableError",
]


class UnsendableError(Exception):
    """The request cannot be written as HTTP: what `encode_http` let through. Never leaves this package."""


class Response(Protocol):
    """A response whose head has arrived."""

    @property
    def status(self) -> int:
        """HTTP status."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """By lower-case name."""
        ...

    async def read(self) -> bytes:
        """Return all that has arrived, as soon as there is something; empty at the end of the body.

        Raises:
            TransportError: the connection broke.
        """
        ...

    @property
    def waits(self) -> bool:
        """Whether `read` would wait."""
        ...

    def news(self, heard: Callable[[], bool] | None = None) -> asyncio.Future[None]:
        """Return what is done once something has arrived, or nothing will any more; asked for where it `waits`.

        Args:
            heard: called when all of a read is here that is not the last one; where it returns True, the wait goes on.
        """
        ...

    @property
    def left_bytes(self) -> int:
        """What has arrived and was not taken."""
        ...

    def take(self, enough_bytes: int | None = None) -> bytes:
        """Return all that has arrived, or the beginning of it that is enough; empty where nothing has."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the whole body was read: its connection serves the next request."""
        ...

    def end(self, why: Exception) -> None:
        """Make `read` raise `why`, also where it waits already."""
        ...

    def close(self) -> None:
        """Let go: the connection of a body that is not complete is closed, which cancels the work behind it."""
        ...


class StreamingClient:
    """A client of one server. Create it on the event loop, `close` it there.

    Redirects are not followed, and the environment's proxies and passwords are not used. How long an answer may take
    is not bounded here.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], clock: Clock, options: PoolOptions) -> None:
        self._clock = clock
        self._pool = ConnectionPool(base_url, clock, options)
        self._stale_s = options.connect_timeout_s
        parts = urlsplit(base_url)
        self._prefix = parts.path.rstrip("/")
        own = {"host": parts.netloc.rpartition("@")[2], "user-agent": user_agent(), "accept-encoding": "identity"}
        self._fixed = _lines(list({**own, **headers}.items()))

    @property
    def warm(self) -> bool:
        """Whether the next request finds a connection that is open and idle."""
        return self._pool.warm

    async def close(self) -> None:
        await self._pool.close()

    def drop_idle(self) -> None:
        """See `ConnectionPool.drop_idle`."""
        self._pool.drop_idle()

    def drop_gone(self) -> bool:
        """See `ConnectionPool.drop_gone`."""
        return self._pool.drop_gone()

    async def send(
        self, method: str, path: str, body: bytes, headers: Sequence[tuple[str, str]], trace: ConnectTrace
    ) -> Response:
        """Send a request and return when the head of its response is there. Cancelling it closes its connection.

        One that fails at once on a connection that was open already met a server that had just closed it: it is sent
        once more, over a new connection. Both could be computed, which has no effect but the work.

        Raises:
            PoolExhaustedError: no connection became free in time.
            UnsendableError: the request is at fault.
            NotConnectedError: the upstream cannot be reached.
            TransportError: the connection broke.
        """
        request = self._encode(method, path, body, headers)
        began_s = self._clock.now_s()
        try:
            return await _asked(await self._pool.take(trace), request)
        except DisconnectedError:
            if trace.connected or self._clock.now_s() - began_s > self._stale_s:
                raise
        return await _asked(await self._pool.fresh(trace), request)

    def _encode(self, method: str, path: str, body: bytes, headers: Sequence[tuple[str, str]]) -> bytes:
        told = f"{self._fixed}{_lines(headers)}content-length: {len(body)}\r\n\r\n"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{told}"
        try:
            return head.encode() + body
        except UnicodeEncodeError as error:
            raise UnsendableError(f"a header holds what no encoding does: {error}") from error


async def _asked(connection: Connection, request: bytes) -> Exchange:
    exchange = connection.send(request)
    try:
        await exchange.head()
    except BaseException:
        connection.abort()
        raise
    return exchange


def _lines(headers: Sequence[tuple[str, str]]) -> str:
    """Return headers as lines of a head; raises an `UnsendableError` where one would be more than a line."""
    values = "".join([value for _, value in headers])
    if "\n" in values or "\r" in values or "\0" in values:
        name = next(name for name, value in headers if not {"\n", "\r", "\0"}.isdisjoint(value))
        raise UnsendableError(f"the header `{name}` holds a line break or a zero byte")
    return "".join([f"{name}: {value}\r\n" for name, value in headers])
