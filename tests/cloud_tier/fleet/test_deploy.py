"""`deploy/mosquitto` as it is: TLS, one certificate a device, and an access list that holds."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloud_tier.fleet.broker import BrokerAddress, BrokerError
from cloud_tier.fleet.operator import FleetOperator
from edge_agent.fleet.description import Description
from edge_agent.fleet.session import FleetSession
from edge_agent.mqtt.backoff import Backoff
from edge_agent.mqtt.config import FleetConfig, FleetTls
from edge_agent.mqtt.connection import End
from router.fleetwire.documents import Snapshot
from tests.support.fleet_devices import started
from tests.support.fleet_rig import Broker
from tests.support.paths import REPOSITORY
from tests.support.ports import accepts, unused_port
from tests.support.waiting import until, until_answered, until_true

pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates of this test"),
]

DEPLOY = REPOSITORY / "deploy" / "mosquitto"


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def certificate(folder: Path, file: str, name: str) -> None:
    """A key and a certificate of the test's authority, as docs/fleet.md makes them."""
    openssl(folder, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{file}.key")
    openssl(folder, "req", "-new", "-key", f"{file}.key", "-subj", f"/CN={name}", "-out", f"{file}.csr")
    (folder / "names.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names.ext")
    openssl(folder, "x509", "-req", "-in", f"{file}.csr", *signing, "-out", f"{file}.pem")


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    openssl(folder, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "ca.key")
    openssl(folder, "req", "-x509", "-new", "-key", "ca.key", "-subj", "/CN=Test", "-days", "2", "-out", "ca.pem")
    for file, name in (("broker", "localhost"), ("cam-1", "cam-1"), ("cam-2", "cam-2"), ("alice", "operator:alice")):
        certificate(folder, file, name)
    certificate(folder, "dashboard", "operator:dashboard")
    certificate(folder, "stranger", "operator:stranger")
    return folder


class Deployed(Broker):
    """The deployed configuration on free ports, with its files here."""

    def __init__(self, folder: Path, certs: Path) -> None:
        super().__init__(folder)
        self.operator_port = unused_port()
        text = (DEPLOY / "mosquitto.conf").read_text()
        for there, here in (
            ("listener 8883\n", f"listener {self.port} 127.0.0.1\n"),
            ("listener 8884\n", f"listener {self.operator_port} 127.0.0.1\n"),
            ("/etc/mosquitto/certs/", f"{certs}/"),
            ("/etc/mosquitto/overspill.acl", str(DEPLOY / "acl")),
            ("/var/lib/mosquitto/", f"{folder}/"),
        ):
            assert there in text
            text = text.replace(there, here)
        if os.geteuid() == 0:
            text += "user root\n"  # so that it can read the test's files
        self.config = text.replace("{", "{{").replace("}", "}}")

    def start(self) -> Broker:
        """Start; the operators' port opens after the devices' one."""
        super().start()
        until_true(lambda: accepts(self.operator_port))
        return self


@pytest.fixture
def broker(tmp_path: Path, certs: Path) -> Iterator[Deployed]:
    with Deployed(tmp_path, certs) as running:
        assert isinstance(running, Deployed)
        yield running


def device(broker: Deployed, certs: Path, folder: Path, name: str, certificate_of: str) -> FleetSession:
    config = FleetConfig(
        enabled=True,
        host="localhost",
        port=broker.port,
        device=name,
        state_dir=str(folder / "state"),
        telemetry_interval_s=0.1,
        reconnect_min_s=0.2,
        tls=FleetTls(
            ca_file=str(certs / "ca.pem"),
            cert_file=str(certs / f"{certificate_of}.pem"),
            key_file=str(certs / f"{certificate_of}.key"),
        ),
    )
    return FleetSession(config, apply=lambda _: None, describe=lambda: Description({}), telemetry=Snapshot)


def operator(port: int, certs: Path, name: str) -> FleetOperator:
    pems = (certs / "ca.pem", certs / f"{name}.pem", certs / f"{name}.key")
    return FleetOperator(BrokerAddress("localhost", port, True, *pems, connect_timeout_s=10))


async def test_a_device_and_an_operator_work_through_the_deployed_broker(
    broker: Deployed, certs: Path, tmp_path: Path
) -> None:
    async with device(broker, certs, tmp_path, "cam-1", "cam-1") as session:
        await until(lambda: session.connected)
        async with operator(broker.operator_port, certs, "alice") as alice:
            proposal = await alice.propose("cam-1", {"router": {"max_queue": 3}})
            assert (await alice.outcome("cam-1", proposal.desired, 10)).kind == "applied"
            assert (await alice.ask("cam-1", "ping")).command == "ping"
        async with operator(broker.operator_port, certs, "dashboard") as dashboard:
            assert (await dashboard.view("cam-1")).online
            with pytest.raises(BrokerError, match="Not authorized"):
                await dashboard.propose("cam-1", {"router": {"max_queue": 4}})
        await until(lambda: session._sender.outbox.stats().pending == 0)


async def fleet(broker: Deployed, certs: Path, name: str, *arguments: str) -> tuple[int, str]:
    """`overspill fleet …` as that person."""
    pems = ("--ca", f"{certs}/ca.pem", "--cert", f"{certs}/{name}.pem", "--key", f"{certs}/{name}.key")
    process = await started(*arguments, *pems, broker=f"mqtts://localhost:{broker.operator_port}")
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, output.decode()


def looks_online(alice: FleetOperator, name: str) -> Callable[[], Awaitable[bool]]:
    async def online() -> bool:
        return (await alice.view(name)).online

    return online


async def test_who_may_not_read_is_not_told_that_nobody_ever_connected(
    broker: Deployed, certs: Path, tmp_path: Path
) -> None:
    async with device(broker, certs, tmp_path, "cam-1", "cam-1") as session:
        await until(lambda: session.connected)
        code, output = await fleet(broker, certs, "stranger", "get", "cam-1")
        assert (code, "the access list does not let you read it" in output) == (3, True)
        code, output = await fleet(broker, certs, "stranger", "list")
        assert (code, "the access list does not let you read it" in output) == (3, True)
        code, output = await fleet(broker, certs, "dashboard", "get", "cam-1")
        assert (code, "status: online" in output) == (0, True)


async def test_an_operator_forgets_a_device_that_left_and_a_dashboard_cannot(
    broker: Deployed, certs: Path, tmp_path: Path
) -> None:
    async with device(broker, certs, tmp_path, "cam-1", "cam-1") as session:
        await until(lambda: session.connected)
        code, output = await fleet(broker, certs, "alice", "set", "--all", "router.max_queue=3")
        assert (code, "1 device: 1 applied" in output) == (0, True)
        code, output = await fleet(broker, certs, "alice", "forget", "cam-1", "--yes", "--force")
        assert (code, "announces itself again" in output) == (0, True)
        async with operator(broker.operator_port, certs, "alice") as alice:
            await until_answered(looks_online(alice, "cam-1"))
            assert session.standing.applied_version == 1, "what is in force stays"
    async with device(broker, certs, tmp_path, "cam-1", "cam-1") as session:
        await until(lambda: session.connected)
        code, output = await fleet(broker, certs, "alice", "set", "cam-1", "router.max_queue=4")
        assert (code, output) == (0, "cam-1: version 2 applied\n")
    code, output = await fleet(broker, certs, "dashboard", "forget", "cam-1", "--yes")
    assert (code, "Not authorized" in output) == (2, True)
    code, output = await fleet(broker, certs, "alice", "forget", "cam-1", "--yes")
    assert (code, output) == (0, "cam-1: forgotten (desired, reported, status)\n")
    code, output = await fleet(broker, certs, "alice", "list")
    assert code == 3


async def test_the_wrong_kind_of_connection_is_told_the_right_one(broker: Deployed, certs: Path) -> None:
    port = broker.operator_port
    with pytest.raises(BrokerError, match=f"if it speaks TLS there, write mqtts://localhost:{port}"):
        await FleetOperator(BrokerAddress("localhost", port, connect_timeout_s=5)).__aenter__()
    with pytest.raises(BrokerError, match="it may ask for a certificate of yours: --cert and --key"):
        await FleetOperator(BrokerAddress("localhost", port, True, certs / "ca.pem", connect_timeout_s=5)).__aenter__()


async def test_tls_to_a_broker_without_it_is_told_so(tmp_path: Path, certs: Path) -> None:
    with Broker(tmp_path) as plain:
        address = BrokerAddress("localhost", plain.port, True, certs / "ca.pem", connect_timeout_s=5)
        with pytest.raises(BrokerError, match=f"if it speaks no TLS there, write mqtt://localhost:{plain.port}"):
            await FleetOperator(address).__aenter__()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[End]:
    """How the connections of devices end, as they do."""
    noted: list[End] = []
    next_s = Backoff.next_s

    def note(backoff: Backoff, end: End, lasted_s: float) -> float:
        noted.append(end)
        return next_s(backoff, end, lasted_s)

    monkeypatch.setattr(Backoff, "next_s", note)
    return noted


async def test_a_device_cannot_speak_or_listen_for_another(
    broker: Deployed, certs: Path, tmp_path: Path, ends: list[End]
) -> None:
    async with device(broker, certs, tmp_path, "cam-1", "cam-2") as impostor:
        await until(lambda: ends)
        assert not impostor.connected
        assert ends[0].kind == "refused"
        assert "Not authorized" in ends[0].reason
        assert impostor.standing.applied_version is None
    async with operator(broker.operator_port, certs, "alice") as alice:
        view = await alice.view("cam-1")
        assert (view.status, view.reported) == (None, None)


async def test_a_device_whose_certificate_is_not_taken_says_so_and_comes_back_with_a_new_one(
    broker: Deployed, certs: Path, tmp_path: Path, ends: list[End]
) -> None:
    """It said `Unspecified error`, as paho does."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "ca.pem").write_bytes((certs / "ca.pem").read_bytes())
    making = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=cam-1")
    openssl(own, "req", *making, "-days", "2", "-keyout", "cam-1.key", "-out", "cam-1.pem")
    async with device(broker, own, tmp_path, "cam-1", "cam-1") as session:
        await until(lambda: any("cam-1.pem" in end.reason for end in ends))
        assert not session.connected
        for kind in ("pem", "key"):
            (own / f"cam-1.{kind}").write_bytes((certs / f"cam-1.{kind}").read_bytes())
        await until(lambda: session.connected)


async def test_nobody_enters_without_a_certificate(broker: Deployed, certs: Path) -> None:
    for port in (broker.port, broker.operator_port):
        for address in (
            BrokerAddress("localhost", port, connect_timeout_s=2),
            BrokerAddress("localhost", port, True, certs / "ca.pem", connect_timeout_s=2),
        ):
            with pytest.raises(BrokerError):
                await FleetOperator(address).__aenter__()


async def test_a_broker_that_cannot_prove_its_name_is_refused(broker: Deployed, certs: Path, tmp_path: Path) -> None:
    pems: tuple[Any, ...] = (None, certs / "alice.pem", certs / "alice.key")
    with pytest.raises(BrokerError, match="CERTIFICATE_VERIFY_FAILED"):
        await FleetOperator(BrokerAddress("localhost", broker.operator_port, True, *pems)).__aenter__()
