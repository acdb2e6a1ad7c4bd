"""TLS of the gateway with real certificates: who may connect, renewal while it serves, strangers who never finish."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import ssl
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import trustme
import uvloop
from tritonclient.grpc import service_pb2, service_pb2_grpc

from router.base.clock import MonotonicClock
from router.base.errors import ConfigError
from router.base.timers import end
from router.gateway.app import create_app
from router.gateway.connection import ConnectionLimits
from router.gateway.connection_table import ConnectionTable
from router.gateway.grpc.listener import GrpcListener
from router.gateway.grpc.settings import GrpcSettings
from router.gateway.listener import Listener, bind
from router.gateway.tls.accept import TlsAcceptor
from router.gateway.tls.certificates import ServerCertificates
from router.gateway.tls.settings import TlsSettings
from router.tenants.keys_edit import NewKey, add_key
from router.tenants.tenancy import KeySources, Tenancy
from tests.support.gateway_fakes import FAMILY, gateway_deps
from tests.support.secured import Files, secured
from tests.support.waiting import until, until_answered

CHAT = {"model": FAMILY, "messages": [{"role": "user", "content": "say a b c"}]}


async def test_requests_and_streams_go_over_tls(files: Files) -> None:
    async with secured(files.settings()) as (port, _), httpx.AsyncClient(verify=files.client()) as http:
        url = f"https://localhost:{port}/v1/chat/completions"
        assert (await http.post(url, json=CHAT)).json()["choices"][0]["message"]["content"] == "a b c"
        assert (await http.post(url, json={**CHAT, "stream": True})).text.endswith("data: [DONE]\n\n")
        large = {**CHAT, "messages": [{"role": "user", "content": "say " + "word " * 60_000}]}
        assert (await http.post(url, json=large)).status_code == 200


@pytest.mark.process
def test_it_serves_on_the_loop_that_tiers_run_on(files: Files) -> None:
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(test_requests_and_streams_go_over_tls(files))
        loop.run_until_complete(test_a_request_that_comes_with_the_handshake_is_not_lost(files))
        loop.run_until_complete(test_a_renewed_certificate_is_served_without_a_restart(files))
        loop.run_until_complete(test_plain_http_is_told_to_use_tls(files))
        loop.run_until_complete(test_plain_http_that_never_ends_is_cut(files))
    finally:
        loop.close()


async def test_a_request_that_comes_with_the_handshake_is_not_lost(files: Files) -> None:
    """A client of TLS 1.3 may send its request in the same piece as the end of its handshake."""
    async with secured(files.settings()) as (port, _):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = files.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await asyncio.wait_for(reader.read(65536), 10))
        tls.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        writer.write(outgoing.read())  # the client's Finished and the request, in one piece
        reply = b""
        while not reply.startswith(b"HTTP/1.1 200 "):
            incoming.write(await asyncio.wait_for(reader.read(65536), 10))
            with contextlib.suppress(ssl.SSLWantReadError):
                reply += tls.read(65536)
        writer.close()


async def test_a_handshake_that_makes_room_before_it_has_begun_is_closed(files: Files) -> None:
    table = ConnectionTable(max_connections=2)
    acceptor = TlsAcceptor(table, ServerCertificates(files.settings()), 5.0, lambda _: asyncio.Protocol())
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as clients:
        accepted = []
        for _ in range(2):
            clients.enter_context(socket.create_connection(server.getsockname()))
            accepted.append(server.accept()[0])
            accepted[-1].setblocking(False)
        for one in accepted:
            acceptor._begin(one, ("192.0.2.1", 1))
        await until(lambda: accepted[0].fileno() == -1)  # it made room for the second
        assert len(table) == 1
        await end(*acceptor._handshakes)
        await until(lambda: accepted[1].fileno() == -1)
    assert len(table) == 0


async def test_a_listener_that_accepts_nothing_any_more_ends(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    async def crashes(*_: object) -> None:
        raise RuntimeError("no selector left")

    monkeypatch.setattr(TlsAcceptor, "run", crashes)
    with bind("127.0.0.1", 0, "gateway") as bound:
        listener = Listener(create_app(gateway_deps()), ConnectionLimits(), tls=ServerCertificates(files.settings()))

        async def serves() -> None:
            async with listener.running(bound) as serving:
                await asyncio.wait({serving})

        with pytest.raises(RuntimeError, match="no selector left"):
            await asyncio.wait_for(serves(), 20)


async def test_plain_http_is_told_to_use_tls(files: Files) -> None:
    async with secured(files.settings()) as (port, listener):
        async with httpx.AsyncClient() as http:
            for told in (
                await http.get(f"http://127.0.0.1:{port}/health"),
                await http.post(f"http://127.0.0.1:{port}/v1/chat/completions", content=b"x" * 3_000_000),
            ):
                assert told.status_code == 400
                assert told.json()["error"]["code"] == "tls_required"
                assert "https://" in told.json()["error"]["message"]
                assert told.headers["x-request-id"]
        await until(lambda: len(listener._settings.table) == 0)
        async with httpx.AsyncClient(verify=files.client()) as http:
            assert (await http.get(f"https://localhost:{port}/health")).status_code == 200, "others are served on"


async def test_plain_http_that_never_ends_is_cut(files: Files) -> None:
    async with secured(files.settings(), header_timeout_s=0.3) as (port, listener):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n")
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 10)
        await until(lambda: len(listener._settings.table) == 0)
        writer.close()


async def test_strangers_and_old_protocols_are_refused(files: Files) -> None:
    async with secured(files.settings()) as (port, _):
        stranger = ssl.create_default_context()
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            async with httpx.AsyncClient(verify=stranger) as http:
                await http.get(f"https://localhost:{port}/health")
        async with httpx.AsyncClient(verify=files.client()) as http:
            assert (await http.get(f"https://localhost:{port}/health")).status_code == 200, "others are served on"


# ── renewal ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def served(port: int, context: ssl.SSLContext) -> str:
    """Return the digest of the certificate that a new connection meets."""
    _, writer = await asyncio.open_connection("localhost", port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return hashlib.sha256(found).hexdigest()


async def test_a_renewed_certificate_is_served_without_a_restart(files: Files) -> None:
    context = files.client()
    async with secured(files.settings()) as (port, _), httpx.AsyncClient(verify=context) as kept:
        assert (await kept.get(f"https://localhost:{port}/health")).status_code == 200
        before = await served(port, context)
        files.renew(files.authority)

        async def renewed() -> bool:
            return await served(port, context) != before

        await until_answered(renewed)
        assert (await kept.get(f"https://localhost:{port}/health")).status_code == 200, "open connections stay"


async def test_half_of_a_renewal_is_not_served(files: Files) -> None:
    settings, context = files.settings(), files.client()
    certificates = ServerCertificates(settings)
    key = files.key.read_bytes()
    async with secured(settings) as (port, listener):
        before = await served(port, context)
        files.renew(files.authority)
        new_key = files.key.read_bytes()
        files.key.write_bytes(key)
        await until(lambda: listener._tls.fault)
        assert await served(port, context) == before
        files.key.write_bytes(new_key)
        await until(lambda: not listener._tls.fault)
        assert await served(port, context) != before
    files.cert.unlink()
    certificates.refresh()
    assert "server.pem" in certificates.fault
    assert certificates.readings == 1


async def test_client_authorities_are_renewed_too(files: Files) -> None:
    other = trustme.CA()
    settings = files.settings(client_ca_file=str(files.ca), client_certificates="required")
    stranger = files.client()
    other.issue_cert("device-2").configure_cert(stranger)
    async with secured(settings) as (port, _):
        url = f"https://localhost:{port}/health"
        async with httpx.AsyncClient(verify=stranger) as http:
            with pytest.raises(httpx.HTTPError):
                await http.get(url)
        other.cert_pem.write_to_path(str(files.ca))

        async def let_in() -> bool:
            async with httpx.AsyncClient(verify=stranger) as http:
                with contextlib.suppress(httpx.HTTPError):
                    return (await http.get(url)).status_code == 200
            return False

        await until_answered(let_in)
        async with httpx.AsyncClient(verify=files.client(identity="device-1")) as http:
            with pytest.raises(httpx.HTTPError):
                await http.get(url)


# ── client certificates ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["required", "optional"])
async def test_who_shows_no_certificate_comes_in_only_where_it_is_optional(files: Files, mode: str) -> None:
    settings = files.settings(client_ca_file=str(files.ca), client_certificates=mode)
    async with secured(settings) as (port, _):
        url = f"https://localhost:{port}/health"
        async with httpx.AsyncClient(verify=files.client(identity="device-1")) as http:
            assert (await http.get(url)).status_code == 200
        async with httpx.AsyncClient(verify=files.client()) as http:
            if mode == "optional":
                assert (await http.get(url)).status_code == 200
            else:
                with pytest.raises(httpx.HTTPError):
                    await http.get(url)


async def test_a_certificate_opens_the_tier_where_its_digest_is_a_key(files: Files, tmp_path: Path) -> None:
    device = files.authority.issue_cert("bench-1")
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(device.cert_chain_pems[0].bytes().decode())).hexdigest()
    add_key(tmp_path / "keys", NewKey("fleet", device="bench-1", certificate=digest), {})
    tenancy = Tenancy(KeySources(path=tmp_path / "keys").directory(), MonotonicClock())
    known = files.client()
    device.configure_cert(known)
    settings = files.settings(client_ca_file=str(files.ca), client_certificates="optional")
    async with secured(settings, gateway_deps(tenancy=tenancy)) as (port, _):
        url = f"https://localhost:{port}/v1/models"
        for context, status in ((known, 200), (files.client(identity="bench-2"), 401), (files.client(), 401)):
            async with httpx.AsyncClient(verify=context) as http:
                assert (await http.get(url)).status_code == status


# ── strangers ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_handshake_that_never_ends_is_cut_and_counts_as_a_connection(files: Files) -> None:
    loop = asyncio.get_running_loop()
    async with secured(files.settings(), header_timeout_s=0.3, max_connections=4) as (port, listener):
        with contextlib.ExitStack() as held:
            silent = [held.enter_context(socket.socket()) for _ in range(6)]
            for one in silent:
                one.setblocking(False)
                await loop.sock_connect(one, ("127.0.0.1", port))
            await until(lambda: listener._settings.table.closed >= 4)
            assert len(listener._settings.table) <= 2, "half of the table is for who has shown nothing"
            async with httpx.AsyncClient(verify=files.client()) as http:
                assert (await http.get(f"https://localhost:{port}/health")).status_code == 200
            for one in silent:
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(loop.sock_recv(one, 10), 10) == b""
        await until(lambda: len(listener._settings.table) == 0)


async def test_an_idle_client_that_does_not_agree_to_the_end_is_closed_all_the_same(files: Files) -> None:
    """One that has to give way would otherwise hold its file for half a minute, in no table."""
    async with secured(files.settings(), max_connections=2) as (port, listener):
        silent = await asyncio.open_connection("localhost", port, ssl=files.client())
        silent[1].transport.pause_reading()  # type: ignore[attr-defined]  # it never answers `close_notify`
        own = silent[1].get_extra_info("sockname")[1]
        async with httpx.AsyncClient(verify=files.client()) as http:
            assert (await http.get(f"https://localhost:{port}/health")).status_code == 200
            assert listener._settings.table.closed == 1
            assert own in served_ends(port)
            await until(lambda: own not in served_ends(port), 10)
        silent[1].transport.abort()


def served_ends(port: int) -> set[int]:
    """Return the ports of the clients whose connections this process still holds open as their server."""
    held = psutil.Process().net_connections("tcp")
    return {one.raddr.port for one in held if one.laddr.port == port and one.raddr}


async def test_garbage_instead_of_a_handshake_costs_nobody_a_traceback(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async with secured(files.settings(), header_timeout_s=1.0) as (port, listener):
        for garbage in (b"\x00" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"a" * 70_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(garbage)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 10)
            writer.close()
        await until(lambda: len(listener._settings.table) == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_refusal_of_a_head_reaches_its_caller(files: Files) -> None:
    async with secured(files.settings()) as (port, _):
        reader, writer = await asyncio.open_connection("localhost", port, ssl=files.client())
        writer.write(b"GET /" + b"a" * 70_000)
        reply = await asyncio.wait_for(reader.readuntil(b"}}"), 10)
        writer.close()
    assert reply.startswith(b"HTTP/1.1 414 ")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "uri_too_long"


# ── gRPC ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def channel(files: Files, port: int, device: trustme.LeafCert | None = None) -> grpc.aio.Channel:
    own = (device.private_key_pem.bytes(), device.cert_chain_pems[0].bytes()) if device is not None else (None, None)
    secret = grpc.ssl_channel_credentials(files.ca.read_bytes(), *own)
    return grpc.aio.secure_channel(f"localhost:{port}", secret)


async def test_grpc_has_the_same_tls_and_knows_devices_by_their_certificates(files: Files, tmp_path: Path) -> None:
    device = files.authority.issue_cert("bench-1")
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(device.cert_chain_pems[0].bytes().decode())).hexdigest()
    add_key(tmp_path / "keys", NewKey("fleet", device="bench-1", certificate=digest), {})
    tenancy = Tenancy(KeySources(path=tmp_path / "keys").directory(), MonotonicClock())
    settings = files.settings(client_ca_file=str(files.ca), client_certificates="required")
    certificates, deps = ServerCertificates(settings), gateway_deps(tenancy=tenancy)
    listener = GrpcListener(
        create_app(deps), GrpcSettings(enabled=True), ("127.0.0.1", 0), deps.limits, tls=certificates
    )
    request = service_pb2.ServerMetadataRequest()
    async with listener.running():
        for shown, code in (
            (device, None),
            (files.authority.issue_cert("bench-2"), grpc.StatusCode.UNAUTHENTICATED),
            (None, grpc.StatusCode.UNAVAILABLE),
        ):
            async with channel(files, listener.port, shown) as one:
                call = service_pb2_grpc.GRPCInferenceServiceStub(one).ServerMetadata(request, timeout=10)
                if code is None:
                    assert (await call).name == "overspill"
                else:
                    with pytest.raises(grpc.RpcError) as raised:
                        await call
                    assert raised.value.code() is code
        files.renew(files.authority)
        certificates.refresh()
        found = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", listener.port))
    assert found.strip() in files.cert.read_text()


# ── configuration ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"cert_file": "a"}, "key_file"),
        ({"key_file": "a"}, "cert_file"),
        ({"cert_file": "a", "key_file": "b", "client_certificates": "required"}, "client_ca_file"),
        ({"cert_file": "a", "key_file": "b", "client_ca_file": "c"}, "client_certificates"),
        ({"client_ca_file": "c", "client_certificates": "required"}, "cert_file"),
        ({"cert_file": "a", "key_file": "b", "client_crl_file": "c"}, "client_ca_file"),
    ],
)
def test_what_does_not_belong_together_is_named(more: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TlsSettings(**more)


def test_files_that_are_none_end_the_start_with_their_names(files: Files, tmp_path: Path) -> None:
    other = trustme.CA().issue_cert("localhost")
    files.key.write_bytes(other.private_key_pem.bytes())
    with pytest.raises(ConfigError, match=r"server\.key"):
        ServerCertificates(files.settings())
    missing = TlsSettings(cert_file=str(tmp_path / "no.pem"), key_file=str(files.key))
    with pytest.raises(ConfigError, match=r"no\.pem"):
        ServerCertificates(missing)
