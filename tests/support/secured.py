"""A gateway that speaks TLS, and the files of its certificates."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import trustme

from router.gateway.app import create_app
from router.gateway.connection import ConnectionLimits
from router.gateway.deps import GatewayDeps
from router.gateway.listener import Listener, bind
from router.gateway.tls.certificates import ServerCertificates
from router.gateway.tls.settings import TlsSettings
from tests.support.gateway_fakes import gateway_deps


@dataclass
class Files:
    """An authority, and the files of a server of it."""

    folder: Path
    authority: trustme.CA

    def __post_init__(self) -> None:
        self.cert, self.key, self.ca = (self.folder / name for name in ("server.pem", "server.key", "ca.pem"))
        self.authority.cert_pem.write_to_path(str(self.ca))
        self.renew(self.authority)

    def renew(self, authority: trustme.CA) -> None:
        made = authority.issue_cert("localhost", "127.0.0.1")
        self.key.write_bytes(made.private_key_pem.bytes())
        self.cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))

    def settings(self, **more) -> TlsSettings:
        return TlsSettings(cert_file=str(self.cert), key_file=str(self.key), reload_s=0.05, **more)

    def client(self, *, identity: str = "") -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if identity:
            self.authority.issue_cert(identity).configure_cert(context)
        return context


@contextlib.asynccontextmanager
async def secured(
    settings: TlsSettings, deps: GatewayDeps | None = None, **limits
) -> AsyncIterator[tuple[int, Listener]]:
    with bind("127.0.0.1", 0, "gateway") as bound:
        listener = Listener(
            create_app(deps or gateway_deps()), ConnectionLimits(**limits), tls=ServerCertificates(settings)
        )
        async with listener.running(bound):
            yield bound.getsockname()[1], listener
