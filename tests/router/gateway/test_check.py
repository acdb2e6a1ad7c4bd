"""A surface that could not serve is found out by `edge check` and `cloud check`, before anything is loaded."""

from __future__ import annotations

import importlib.util

import pytest

from router.base.errors import ConfigError
from router.gateway.check import check_surface
from router.gateway.grpc.settings import GrpcSettings
from router.gateway.http.settings import CorsSettings
from router.gateway.tls.settings import TlsSettings

NO_TLS, NO_GRPC, NO_CORS = TlsSettings(), GrpcSettings(), CorsSettings()


def test_the_defaults_need_nothing() -> None:
    check_surface(NO_TLS, NO_GRPC, NO_CORS, keyless=True)
    check_surface(NO_TLS, GrpcSettings(enabled=True), CorsSettings(allow_origins=("*",)), keyless=False)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        check_surface(TlsSettings(cert_file="nowhere.pem", key_file="k"), NO_GRPC, NO_CORS, keyless=False)
    with pytest.raises(ConfigError, match="API keys"):
        check_surface(NO_TLS, NO_GRPC, CorsSettings(allow_origins=("*",)), keyless=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"grpc\.enabled.*\[grpc\]"):
        check_surface(NO_TLS, GrpcSettings(enabled=True), NO_CORS, keyless=False)


def test_grpc_does_not_serve_beside_a_list_of_revoked_certificates() -> None:
    """Grpcio looks at none: a device that is locked out of HTTP would come in there."""
    tls = TlsSettings(
        cert_file="c", key_file="k", client_ca_file="a", client_crl_file="r", client_certificates="required"
    )
    with pytest.raises(ConfigError, match=r"client_crl_file.*keys revoke"):
        check_surface(tls, GrpcSettings(enabled=True), NO_CORS, keyless=False)


@pytest.mark.parametrize(
    ("port", "http", "found"), [(None, 8600, 8601), (None, 0, 0), (0, 8600, 0), (9000, 8600, 9000)]
)
def test_the_port_of_grpc_is_the_next_one_unless_it_is_named(port: int | None, http: int, found: int) -> None:
    assert GrpcSettings(port=port).beside(http) == found
