"""uvicorn, embedded: a socket bound before anything is loaded, and connections that cannot be held open for nothing.

uvicorn takes the signals for itself, and bounds no connection: the first is put right here, the second in `connection`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import structlog
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from router.base.errors import ConfigError
from router.base.timers import end
from router.gateway.accept import PlainAcceptor
from router.gateway.connection import ConnectionLimits, GuardedProtocol, ServerSettings
from router.gateway.metrics import ConnectionMetrics
from router.gateway.tls.accept import TlsAcceptor
from router.gateway.tls.certificates import ServerCertificates

log = structlog.get_logger("router.gateway")

_CLOSE_S = 2  # after the drain: what uvicorn may take to close connections
_SPARE_FILES = 256  # sockets and pipes of engines, log files, the model store
_LOOK_S = 0.01


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

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        registry: CollectorRegistry | None = None,
        tls: ServerCertificates | None = None,
    ) -> None:
        """Prepare; `running` serves.

        Args:
            registry: where to tell of the connections.
            tls: what to serve TLS with; without, the socket speaks plainly.
        """
        self._settings = ServerSettings(app, _within_open_files(limits), close_s=_CLOSE_S)
        self._tls = tls
        super().__init__(self._settings)
        if registry is not None:
            registry.register(ConnectionMetrics(self._settings.table))

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
        task = asyncio.create_task(self.serve(sockets=[]), name="gateway")
        accepting = self._accept(bound)
        for one in accepting:
            one.add_done_callback(lambda _: self._leave())
        try:
            while not self.started and not task.done():  # noqa: ASYNC110 - uvicorn announces nothing
                await asyncio.sleep(_LOOK_S)
            if task.done():
                task.result()
            yield task
        finally:
            self.should_exit = True
            await end(*accepting)
            await asyncio.wait({task})
        task.result()
        for one in accepting:
            if not one.cancelled():
                one.result()

    def _leave(self) -> None:
        """End the listener: one that accepts nothing, or follows no certificate, must not seem to serve."""
        self.should_exit = True

    def _accept(self, bound: socket.socket) -> list[asyncio.Task[None]]:
        """Accept on `bound`; with TLS, follow the files of its certificate too."""
        if self._tls is None:
            plain = PlainAcceptor(lambda: GuardedProtocol(self._settings, self.server_state, {}))
            return [asyncio.create_task(plain.run(bound), name="accept")]

        def protocol(certificate: str) -> GuardedProtocol:
            return GuardedProtocol(self._settings, self.server_state, {}, certificate=certificate)

        handshake_s = self._settings.limits.header_timeout_s
        acceptor = TlsAcceptor(self._settings.table, self._tls, handshake_s, protocol)
        return [
            asyncio.create_task(acceptor.run(bound), name="tls"),
            asyncio.create_task(self._tls.watch(), name="certificates"),
        ]


def _within_open_files(limits: ConnectionLimits) -> ConnectionLimits:
    """Bound the connections by what the system lets open: one that cannot be accepted can make nobody give way."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits
    return replace(limits, max_connections=max(1, min(limits.max_connections, soft - min(_SPARE_FILES, soft // 2))))


def _unusable(host: str, port: int, table: str, error: OSError) -> ConfigError:
    taken = error.errno == errno.EADDRINUSE
    choose = "--port" if table != "grpc" else "grpc.port"
    remedy = f"another process has it: choose another {choose}, or stop that one" if taken else "choose another host"
    reason = (error.strerror or str(error)).lower()
    return ConfigError(
        f"cannot listen on {host}:{port} ({reason}); {remedy}", param=f"{table}.{'port' if taken else 'host'}"
    )
