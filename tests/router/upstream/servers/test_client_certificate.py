"""An upstream that asks for a certificate: one that it does not take is named, and a renewed one is shown at once."""

from __future__ import annotations

import datetime as dt
import ssl
from pathlib import Path

import pytest
import structlog
import trustme

from router.base.clock import MonotonicClock
from router.signals.link import Link
from router.upstream.http.client_tls import ClientTls
from router.upstream.servers.polled import ServerOptions
from router.upstream.servers.tier import UpstreamTier
from tests.support.secured import Files, secured
from tests.support.waiting import until

ENDED = dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=1)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path, trustme.CA())


@pytest.fixture
def device(files: Files) -> ServerOptions:
    options = ServerOptions(
        poll_interval_s=0.03,
        ca_file=files.ca,
        client_cert=files.folder / "device.pem",
        client_key=files.folder / "device.key",
    )
    show(options, files.authority.issue_cert("device-1", not_after=ENDED))
    return options


def show(options: ServerOptions, made: trustme.LeafCert) -> None:
    assert options.client_cert is not None
    assert options.client_key is not None
    options.client_key.write_bytes(made.private_key_pem.bytes())
    options.client_cert.write_bytes(made.cert_chain_pems[0].bytes())


async def test_a_certificate_that_has_ended_is_named_and_its_renewal_needs_no_restart(
    files: Files, device: ServerOptions
) -> None:
    asks = files.settings(client_ca_file=str(files.ca), client_certificates="required")
    async with secured(asks) as (port, _):
        tier = UpstreamTier(f"https://localhost:{port}", link=Link("up"), clock=MonotonicClock(), options=device)
        async with tier:
            await until(lambda: "perhaps it does not take the certificate" in tier.unreached)
            assert "device.pem" in tier.unreached
            show(device, files.authority.issue_cert("device-1"))
            await until(lambda: tier.condition.reachable)


async def test_who_has_no_certificate_to_show_is_told_which_key_names_one(files: Files) -> None:
    asks = files.settings(client_ca_file=str(files.ca), client_certificates="required")
    options = ServerOptions(poll_interval_s=0.03, ca_file=files.ca)
    async with secured(asks) as (port, _):
        tier = UpstreamTier(f"https://localhost:{port}", link=Link("up"), clock=MonotonicClock(), options=options)
        async with tier:
            await until(lambda: "perhaps it asks for a certificate (client_cert)" in tier.unreached)


async def test_a_server_whose_certificate_is_not_valid_yet_is_told_beside_this_machines_own_time(files: Files) -> None:
    soon = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=300)
    made = files.authority.issue_cert("localhost", not_before=soon, not_after=soon + dt.timedelta(days=9))
    files.key.write_bytes(made.private_key_pem.bytes())
    files.cert.write_bytes(made.cert_chain_pems[0].bytes())
    options = ServerOptions(poll_interval_s=0.03, ca_file=files.ca)
    async with secured(files.settings()) as (port, _):
        tier = UpstreamTier(f"https://localhost:{port}", link=Link("up"), clock=MonotonicClock(), options=options)
        async with tier:
            await until(lambda: "not yet valid" in tier.unreached)
            assert "the clock of this machine says 20" in tier.unreached


def test_half_of_a_renewal_changes_nothing_and_is_told_once(files: Files, device: ServerOptions) -> None:
    tls = ClientTls(device.ca_file, device.client_cert, device.client_key)
    assert not tls.renewed()
    assert device.client_cert is not None
    device.client_cert.write_bytes(files.authority.issue_cert("device-1").cert_chain_pems[0].bytes())
    with structlog.testing.capture_logs() as logs:
        assert not tls.renewed()
        assert not tls.renewed()
    assert [line["event"] for line in logs] == ["certificate not reloaded; the one before is shown on"]
    show(device, files.authority.issue_cert("device-1"))
    assert tls.renewed()
    assert not tls.renewed()


def test_authorities_are_renewed_too(files: Files) -> None:
    tls = ClientTls(files.ca, None, None)
    trustme.CA().cert_pem.write_to_path(str(files.ca))
    assert tls.renewed()
    assert isinstance(tls.context, ssl.SSLContext)
    assert len(tls.context.get_ca_certs()) == 2
