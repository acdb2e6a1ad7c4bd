"""grpcio's server, embedded: KServe V2 over gRPC on a port of its own, as long as its tier serves."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import structlog
from starlette.types import ASGIApp

from router.base.errors import ConfigError
from router.base.extras import install
from router.base.loopback import in_url
from router.gateway.deps import GatewayLimits
from router.gateway.grpc.settings import GrpcSettings
from router.gateway.tls.certificates import PemFiles, ServerCertificates

if TYPE_CHECKING:
    from router.gateway.grpc.servicer import Servicer

log = structlog.get_logger("router.gateway")

_HEAD_BYTES = 64 * 1024  # names, shapes and parameters beside the tensors; and of metadata
_SPARE_CALLS = 64  # probes, while inference takes all places
_CLOSE_S = 2.0


class GrpcListener:
    """Serves gRPC while `running`, where it is enabled; its owner drains the tier before it leaves.

    Attributes:
        port: that it listens on, once it runs.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: GrpcSettings,
        address: tuple[str, int],
        limits: GatewayLimits,
        *,
        tls: ServerCertificates | None = None,
    ) -> None:
        """Prepare; `running` serves.

        Args:
            address: host and port of the HTTP gateway, as configured.
            tls: what to serve TLS with; without, the port speaks plainly.
        """
        self._tls = tls
        self._app = app
        self._enabled = settings.enabled
        self._host = address[0]
        self._limits = limits
        self._servicer: Servicer | None = None
        self.port = settings.beside(address[1])

    @property
    def busy(self) -> int:
        """Calls being answered now."""
        return self._servicer.busy if self._servicer is not None else 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve until the block ends; whoever still waits for an answer then is cut off.

        Raises:
            ConfigError: grpcio is not installed, or the address is taken; names the remedy.
        """
        if not self._enabled:
            yield
            return
        try:
            import grpc  # noqa: PLC0415 - an extra, imported where it is asked for

            from router.gateway.grpc.exchange import Exchange  # noqa: PLC0415
            from router.gateway.grpc.servicer import Servicer  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(f"grpc.enabled: {error}; run: {install('grpc')}", param="grpc.enabled") from error
        self._servicer = Servicer(Exchange(self._app))
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._limits.max_body_bytes + _HEAD_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", _HEAD_BYTES),
                ("grpc.so_reuseport", 0),  # two tiers on one port would share its callers at random
            ],
            maximum_concurrent_rpcs=self._limits.max_requests + _SPARE_CALLS,
        )
        server.add_generic_rpc_handlers((self._servicer.handler(),))
        host = in_url(self._host)
        try:
            where = f"{host}:{self.port}"
            secured = None if self._tls is None else _credentials(self._tls)
            self.port = server.add_insecure_port(where) if secured is None else server.add_secure_port(where, secured)
        except RuntimeError as error:
            remedy = "choose another grpc.port, or stop what has it"
            raise ConfigError(f"cannot listen on {where} for gRPC: {remedy}", param="grpc.port") from error
        await server.start()
        log.info("serving gRPC", host=host, port=self.port, tls=self._tls is not None)
        try:
            yield
        finally:
            await server.stop(_CLOSE_S)


def _credentials(tls: ServerCertificates) -> Any:
    """Return credentials that follow the files: grpcio asks at each connection whether there are others."""
    import grpc  # noqa: PLC0415 - an extra, and at hand where this is called

    def configuration(files: PemFiles) -> Any:
        return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.authorities)

    served = tls.files

    def renewed() -> Any:
        nonlocal served
        if tls.files is served:
            return None
        served = tls.files
        return configuration(served)

    return grpc.dynamic_ssl_server_credentials(configuration(served), renewed, tls.wants_client_certificates)
