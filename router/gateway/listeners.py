"""Where a tier listens: HTTP on a bound socket and, where it is enabled, gRPC beside it, with one certificate."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from router.base.clock import Clock
from router.gateway.check import check_revocation
from router.gateway.connection import ConnectionLimits
from router.gateway.deps import GatewayLimits
from router.gateway.grpc.listener import GrpcListener
from router.gateway.grpc.settings import GrpcSettings
from router.gateway.listener import Listener
from router.gateway.tls.certificates import ServerCertificates
from router.gateway.tls.settings import TlsSettings

_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Listening:
    """How a tier listens.

    Attributes:
        address: host and port of HTTP, as configured.
    """

    address: tuple[str, int]
    connections: ConnectionLimits
    limits: GatewayLimits
    grpc: GrpcSettings
    tls: TlsSettings


class Listeners:
    """Both listeners of a tier; its owner drains it before it leaves `running`.

    Attributes:
        tls: whether they speak TLS.
    """

    def __init__(self, app: ASGIApp, how: Listening, registry: CollectorRegistry) -> None:
        """Prepare; `running` serves.

        Args:
            registry: where to tell of the connections.

        Raises:
            ConfigError: the files of `[tls]` are none, or gRPC could not hold to them.
        """
        check_revocation(how.tls, how.grpc)
        certificates = ServerCertificates(how.tls) if how.tls.enabled else None
        self.tls = certificates is not None
        self.http = Listener(app, how.connections, registry, certificates)
        self.grpc = GrpcListener(app, how.grpc, how.address, how.limits, tls=certificates)

    @property
    def busy(self) -> int:
        """Requests being answered now."""
        return self.http.busy + self.grpc.busy

    @contextlib.asynccontextmanager
    async def running(self, bound: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
        """Serve until the block ends; whoever still waits for an answer then is cut off.

        Yields:
            The task that serves HTTP: see `Listener.running`.

        Raises:
            ConfigError: gRPC is enabled and cannot be served; names the remedy.
        """
        async with self.http.running(bound) as serving, self.grpc.running():
            yield serving

    async def wait_idle(self, limit_s: float, clock: Clock, hurry: asyncio.Event) -> None:
        """Wait until no request is being answered: for `limit_s` at most, and not once somebody is in a `hurry`."""
        ends_at_s = clock.now_s() + limit_s
        while self.busy and not hurry.is_set() and clock.now_s() < ends_at_s:
            await clock.sleep(_LOOK_S)
