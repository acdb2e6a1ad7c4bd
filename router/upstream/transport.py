"""The HTTP client under every streamed request to an upstream: a pool of connections, and one HTTP request over them.

aiohttp carries it, because its cost scales with the bytes of an answer; probes and discovery use httpx.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol

import aiohttp

from router.base.clock import Clock
from router.base.errors import in_words

_READ_BUFFER_BYTES = 64 * 1024
_MAX_HEADER_BYTES = 64 * 1024  # a load report of many variants is one long line


class TransportError(Exception):
    """The connection broke, or never came about. Never leaves this package."""


class NotConnectedError(TransportError):
    """No connection could be made: nothing of the request was sent."""


class PoolExhaustedError(TransportError):
    """Every connection of the pool stayed in use."""


class UnsendableError(Exception):
    """The HTTP library refused to write the request: what `encode_post` let through. Never leaves this package."""


class Response(Protocol):
    """A response whose head has arrived."""

    @property
    def status(self) -> int:
        """HTTP status."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """By name, whatever its case."""
        ...

    async def read(self) -> bytes:
        """Return all that has arrived, as soon as there is something; empty at the end of the body.

        Raises:
            TransportError: the connection broke.
        """
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


@dataclass(slots=True)
class ConnectTrace:
    """What a new connection cost: an exchange on it says nothing about the link before that is taken off.

    Attributes:
        connect_s: TCP and TLS together, 0 on a connection that was open already; connected: it was not.
        queued: it waited for a connection of the pool.
    """

    clock: Clock
    connect_s: float = 0.0
    queued: bool = False
    connected: bool = False
    began_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Attributes as in `router.upstream.server.ServerOptions`; `tls` is False for plain HTTP."""

    tls: ssl.SSLContext | bool
    connect_timeout_s: float
    max_connections: int
    keepalive_expiry_s: float


class IdleConnections:
    """Counts the connections of a pool that are open and idle, as the pool itself does not tell."""

    def __init__(self, clock: Clock, kept_s: float) -> None:
        self._clock = clock
        self._kept_s = kept_s
        self._until_s: deque[float] = deque()

    @property
    def any(self) -> bool:
        """Whether one is left."""
        now_s = self._clock.now_s()
        while self._until_s and self._until_s[0] <= now_s:
            self._until_s.popleft()
        return bool(self._until_s)

    def taken(self) -> None:
        """A request was sent over one of them."""
        if self._until_s:
            self._until_s.popleft()

    def given_back(self) -> None:
        """A response was read to its end, and its connection stays open."""
        self._until_s.append(self._clock.now_s() + self._kept_s)


class StreamingClient:
    """A pool of connections to one upstream. Create it on the event loop, `close` it there.

    Redirects are not followed, and the environment's proxies and passwords are not used. How long an answer may take
    is not bounded here.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], clock: Clock, options: PoolOptions) -> None:
        self._base_url = base_url
        self._clock = clock
        self._idle = IdleConnections(clock, options.keepalive_expiry_s)
        self._stale_s = options.connect_timeout_s
        self._session = _session(headers, options, kept=True)
        self._fresh = _session(headers, options, kept=False)

    @property
    def warm(self) -> bool:
        """Whether the next request finds a connection that is open and idle."""
        return self._idle.any

    async def close(self) -> None:
        await self._session.close()
        await self._fresh.close()

    async def post(self, path: str, body: bytes, headers: Sequence[tuple[str, str]], trace: ConnectTrace) -> Response:
        """Send a request and return when the head of its response is there. Cancelling it closes its connection.

        One that fails at once on a connection that was open already met a server that had just closed it: it is sent
        once more, over a new connection. Both could be computed, which has no effect but the work.

        Raises:
            PoolExhaustedError: no connection became free in time.
            UnsendableError: the request is at fault.
            NotConnectedError: the upstream cannot be reached.
            TransportError: the connection broke.
        """
        began_s = self._clock.now_s()
        try:
            response = await self._send(self._session, path, body, headers, trace)
        except _DisconnectedError:
            if trace.connected or self._clock.now_s() - began_s > self._stale_s:
                raise
            self._idle.taken()
            return _AiohttpResponse(await self._send(self._fresh, path, body, headers, trace), None)
        if not trace.connected:
            self._idle.taken()
        return _AiohttpResponse(response, self._idle)

    async def _send(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: bytes,
        headers: Sequence[tuple[str, str]],
        trace: ConnectTrace,
    ) -> aiohttp.ClientResponse:
        try:
            return await session.post(
                self._base_url + path,
                data=body,
                headers=headers,
                allow_redirects=False,
                trace_request_ctx=trace,
            )
        except aiohttp.ConnectionTimeoutError as error:
            if trace.queued:
                raise PoolExhaustedError from error
            raise NotConnectedError("no connection within the time limit") from error
        except aiohttp.ClientConnectorError as error:
            raise NotConnectedError(in_words(error)) from error
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            kind = _DisconnectedError if _before_the_head(error) else TransportError
            raise kind(in_words(error)) from error
        except ValueError as error:  # a line break in a header, text that no encoding holds
            raise UnsendableError(str(error)) from error


class _DisconnectedError(TransportError):
    """The connection ended before anything of a response came."""


def _before_the_head(error: Exception) -> bool:
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)  # else it is the part of the head that came
    return isinstance(error, OSError) and not isinstance(error, asyncio.TimeoutError)


def _session(headers: Mapping[str, str], options: PoolOptions, *, kept: bool) -> aiohttp.ClientSession:
    """Make a pool whose connections are kept for later requests, or serve one each."""
    if kept:
        connector = aiohttp.TCPConnector(
            limit=options.max_connections, keepalive_timeout=options.keepalive_expiry_s, ssl=options.tls
        )
    else:
        connector = aiohttp.TCPConnector(limit=options.max_connections, force_close=True, ssl=options.tls)
    return aiohttp.ClientSession(
        connector=connector,
        headers={**headers, "accept-encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=options.connect_timeout_s),
        trust_env=False,
        read_bufsize=_READ_BUFFER_BYTES,
        max_line_size=_MAX_HEADER_BYTES,
        max_field_size=_MAX_HEADER_BYTES,
        skip_auto_headers=("user-agent",),
        trace_configs=[_tracing()],
    )


class _AiohttpResponse:
    """`Response` over aiohttp's."""

    __slots__ = ("_content", "_idle", "_response", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse, idle: IdleConnections | None) -> None:
        self._response = response
        self._idle = idle
        self._content = response.content
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def read(self) -> bytes:
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise TransportError(in_words(error)) from error

    @property
    def complete(self) -> bool:
        return self._content.at_eof()

    def end(self, why: Exception) -> None:
        if not self._content.is_eof():
            self._content.set_exception(why)

    def close(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None and self.complete and self.headers.get("connection", "").lower() != "close":
            idle.given_back()
        self._response.close()


def _tracing() -> aiohttp.TraceConfig:
    """Note in the `ConnectTrace` of each request what its connection cost."""

    async def queued(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:  # noqa: ARG001
        context.trace_request_ctx.queued = True

    async def began(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:  # noqa: ARG001
        trace: ConnectTrace = context.trace_request_ctx
        trace.queued, trace.began_s = False, trace.clock.now_s()

    async def ended(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:  # noqa: ARG001
        trace: ConnectTrace = context.trace_request_ctx
        trace.connect_s, trace.connected = trace.clock.now_s() - trace.began_s, True

    config = aiohttp.TraceConfig()
    config.on_connection_queued_start.append(queued)
    config.on_connection_create_start.append(began)
    config.on_connection_create_end.append(ended)
    return config
