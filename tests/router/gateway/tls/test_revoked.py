"""Client certificates that an authority has revoked: a stolen device is locked out while the tier runs."""

from __future__ import annotations

import contextlib
import datetime as dt
import ssl
from pathlib import Path

import httpx
import pytest
import structlog
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from router.base.errors import ConfigError
from router.gateway.tls.certificates import ServerCertificates
from tests.support.secured import Files, secured
from tests.support.waiting import until_answered


def revoke(files: Files, *devices: trustme.LeafCert, authority: trustme.CA | None = None, for_days: int = 1) -> Path:
    """Write the list of what an authority has revoked."""
    issuer = authority or files.authority
    now = dt.datetime.now(dt.timezone.utc)
    issued_by = x509.load_pem_x509_certificate(issuer.cert_pem.bytes())
    made = x509.CertificateRevocationListBuilder(issued_by.subject)
    made = made.last_update(now - dt.timedelta(days=2)).next_update(now + dt.timedelta(days=for_days))
    for device in devices:
        serial = x509.load_pem_x509_certificate(device.cert_chain_pems[0].bytes()).serial_number
        one = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        made = made.add_revoked_certificate(one)
    secret = serialization.load_pem_private_key(issuer.private_key_pem.bytes(), None)
    written = made.sign(secret, hashes.SHA256())  # type: ignore[arg-type]  # of the kinds of keys, trustme makes one
    path = files.folder / "revoked.pem"
    path.write_bytes(written.public_bytes(serialization.Encoding.PEM))
    return path


def shown_by(files: Files, device: trustme.LeafCert) -> ssl.SSLContext:
    context = files.client()
    device.configure_cert(context)
    return context


async def is_let_in(port: int, context: ssl.SSLContext) -> bool:
    async with httpx.AsyncClient(verify=context) as http:
        with contextlib.suppress(httpx.HTTPError):
            return (await http.get(f"https://localhost:{port}/health")).status_code == 200
    return False


@pytest.mark.parametrize("mode", ["required", "optional"])
async def test_a_stolen_device_is_locked_out_while_the_tier_runs(files: Files, mode: str) -> None:
    stolen, kept = files.authority.issue_cert("bench-1"), files.authority.issue_cert("bench-2")
    settings = files.settings(
        client_ca_file=str(files.ca), client_certificates=mode, client_crl_file=str(revoke(files))
    )
    async with secured(settings) as (port, _):
        assert await is_let_in(port, shown_by(files, stolen))
        revoke(files, stolen)

        async def locked_out() -> bool:
            return not await is_let_in(port, shown_by(files, stolen))

        await until_answered(locked_out)
        assert await is_let_in(port, shown_by(files, kept))


async def test_what_an_authority_between_has_revoked_is_no_certificate_either(files: Files) -> None:
    between = files.authority.create_child_ca()
    stolen, kept = between.issue_cert("bench-1"), between.issue_cert("bench-2")
    settings = files.settings(
        client_ca_file=str(files.ca),
        client_certificates="required",
        client_crl_file=str(revoke(files, stolen, authority=between)),
    )
    async with secured(settings) as (port, _):
        assert not await is_let_in(port, shown_by(files, stolen))
        assert await is_let_in(port, shown_by(files, kept))


async def test_why_a_client_certificate_is_refused_stands_in_the_log_once(files: Files) -> None:
    """A list past its time lets nobody in: who looks for the cause finds it, and no line for each that knocks."""
    device = files.authority.issue_cert("bench-1")
    settings = files.settings(
        client_ca_file=str(files.ca), client_certificates="required", client_crl_file=str(revoke(files, for_days=-1))
    )
    with structlog.testing.capture_logs() as logged:
        async with secured(settings) as (port, _):
            for _ in range(3):
                assert not await is_let_in(port, shown_by(files, device))
    refused = [line for line in logged if line["event"] == "client certificate refused"]
    assert [(line["why"], line["log_level"]) for line in refused] == [("CRL has expired", "warning")]
    assert refused[0]["client"] == "127.0.0.1"


def test_what_is_no_list_of_revoked_certificates_ends_the_start_with_its_name(files: Files) -> None:
    for text in ("", "no list", files.ca.read_text()):
        path = files.folder / "revoked.pem"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"revoked\.pem"):
            ServerCertificates(
                files.settings(client_ca_file=str(files.ca), client_certificates="required", client_crl_file=str(path))
            )
