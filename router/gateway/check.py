"""What can be known to be wrong with the surface before anything serves: certificates, libraries, origins."""

from __future__ import annotations

import importlib.util

from router.base.errors import ConfigError
from router.base.extras import install
from router.gateway.grpc.settings import GrpcSettings
from router.gateway.http.settings import CorsSettings
from router.gateway.tls.certificates import ServerCertificates
from router.gateway.tls.settings import TlsSettings


def check_surface(tls: TlsSettings, grpc: GrpcSettings, cors: CorsSettings, *, keyless: bool) -> None:
    """Look at what the surface needs of this machine.

    Raises:
        ConfigError: naming the key, and the remedy.
    """
    check_origins(cors, keyless=keyless)
    check_revocation(tls, grpc)
    if tls.enabled:
        ServerCertificates(tls)
    if grpc.enabled and not all(_is_installed(name) for name in ("grpc", "google.protobuf")):
        raise ConfigError(f"grpc.enabled: grpcio is not installed; run: {install('grpc')}", param="grpc.enabled")


def check_revocation(tls: TlsSettings, grpc: GrpcSettings) -> None:
    """Let nobody in over gRPC who is locked out of HTTP.

    Raises:
        ConfigError: grpcio would believe a revoked certificate.
    """
    if grpc.enabled and tls.client_crl_file:
        raise ConfigError(
            "tls.client_crl_file: grpcio looks at no list of revoked certificates; take the digest out of the keys "
            "instead (`overspill cloud keys revoke`), or leave gRPC off (grpc.enabled)",
            param="tls.client_crl_file",
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what it would lie in is not even there
        return False


def check_origins(cors: CorsSettings, *, keyless: bool) -> None:
    """Keep a tier that anybody on its host may use from the pages that somebody there visits.

    Raises:
        ConfigError: all of them would be let in.
    """
    if keyless and "*" in cors.allow_origins:
        raise ConfigError(
            "cors.allow_origins = `*` would let every web page that somebody visits use this tier, which has no API "
            "keys: name the origins, or set API keys",
            param="cors.allow_origins",
        )
