"""Real processes, real kills: the agent with SIGKILL, the broker frozen with SIGSTOP, many devices at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from edge_agent.fleet.description import Description
from edge_agent.fleet.session import FleetSession
from edge_agent.mqtt.config import FleetConfig
from router.fleetwire.documents import Snapshot
from tests.support.fleet_rig import CONFIG, Broker, Spy
from tests.support.paths import REPOSITORY
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.broker

AGENT = textwrap.dedent(
    """
    import asyncio, json, sys
    from edge_agent.mqtt.config import FleetConfig
    from edge_agent.outbox.outbox import Outbox
    from edge_agent.fleet.description import Description
    from edge_agent.fleet.session import FleetSession
    from router.fleetwire.documents import Snapshot

    class Loud(Outbox):
        def put(self, row):
            stored = super().put(row)
            if row.kind == "telemetry":
                print("stored", row.key, flush=True)
            return stored

    async def main():
        config = FleetConfig(enabled=True, port=int(sys.argv[1]), device="cam-1", state_dir=sys.argv[2],
                             telemetry_interval_s=0.02, reconnect_min_s=0.05, reconnect_max_s=0.2, will_delay_s=0)
        force = {}
        session = FleetSession(config, apply=lambda d: force.update(d.overrides), describe=lambda: Description(force),
                               telemetry=Snapshot)
        loud = Loud(session._sender.outbox.path)
        session._sender.outbox = loud
        async with session:
            print("started", json.dumps(force), flush=True)
            await asyncio.Event().wait()

    asyncio.run(main())
    """
)


class Agent:
    """An agent in a process of its own."""

    def __init__(self, port: int, state: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(port), str(state)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        self.stored: list[str] = []
        self.started = ""

    def read_until(self, samples: int) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._take(line)
            if len(self.stored) >= samples:
                return

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._take(line)
        self.process.stdout.close()
        self.process.wait()

    def _take(self, line: str) -> None:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "stored":
            self.stored.append(rest)
        elif word == "started":
            self.started = rest


async def test_kill_nine_loses_no_stored_sample_and_announces_the_loss(broker: Broker, tmp_path: Path) -> None:
    stored: list[str] = []
    with Spy(broker.port) as spy:
        desired = {"version": 1, "issued_at": "2026-03-01T00:00:00Z", "router": {"max_queue": 5}}
        spy.publish("overspill/v1/default/cam-1/desired", desired, retain=True)
        for life in range(3):
            agent = Agent(broker.port, tmp_path / "state")
            try:
                await asyncio.to_thread(agent.read_until, 10)
                if life == 0:
                    await until(lambda: [r for r in spy.payloads("reported") if r["state"] == "applied"])
            finally:
                await asyncio.to_thread(agent.kill)
            assert agent.started == ("{}" if life == 0 else '{"router": {"max_queue": 5}}')
            stored += agent.stored
            births = [s["birth"] for s in spy.payloads("status") if s["state"] == "online"]
            await until(
                lambda births=births: [
                    s for s in spy.payloads("status") if s["reason"] == "will" and s["birth"] >= max(births)
                ]
            )
        last = Agent(broker.port, tmp_path / "state")
        try:
            await until(lambda: set(stored) <= {sample["key"] for sample in spy.payloads("telemetry")})
        finally:
            await asyncio.to_thread(last.kill)
        births = [s["birth"] for s in spy.payloads("status") if s["state"] == "online"]
        assert sorted(set(births)) == births


def session(port: int, folder: Path, device: str = "cam-1", **more: Any) -> FleetSession:
    options: dict[str, Any] = {"reconnect_min_s": 0.1, **more}
    config = FleetConfig(enabled=True, port=port, device=device, state_dir=str(folder / "state"), **options)
    return FleetSession(config, apply=lambda _: None, describe=lambda: Description({}), telemetry=Snapshot)


class Beside:
    """A thread that ticks beside the event loop, as long as the process runs at all.

    Attributes:
        most: its ticks of 10 ms between two of the loop's: a machine that stalls holds up both, and counts for nothing.
    """

    def __init__(self) -> None:
        self.most = 0
        self._ticks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick)

    async def __aenter__(self) -> Beside:
        self._thread.start()
        self._loop_ticks = asyncio.create_task(self._compare())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop_ticks.cancel()
        await asyncio.gather(self._loop_ticks, return_exceptions=True)
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._over.wait(0.01):
            self._ticks += 1

    async def _compare(self) -> None:
        while True:
            before = self._ticks
            await asyncio.sleep(0.01)
            self.most = max(self.most, self._ticks - before)


async def test_a_frozen_broker_never_holds_up_the_event_loop_or_the_shutdown(broker: Broker, tmp_path: Path) -> None:
    assert broker.process is not None
    try:
        async with Beside() as beside, contextlib.AsyncExitStack() as sessions:
            running = session(broker.port, tmp_path, telemetry_interval_s=0.02, keepalive_s=1)
            await sessions.enter_async_context(running)
            await until(lambda: running.connected)
            broker.process.send_signal(signal.SIGSTOP)
            await until(lambda: not running.connected)
            async with session(broker.port, tmp_path, device="late", connect_timeout_s=0.3) as late:
                await asyncio.sleep(1.0)
                assert not late.connected
            await asyncio.wait_for(sessions.aclose(), PATIENCE_S)
        assert beside.most < 100, "the loop was held up"
    finally:
        broker.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def address(given: str) -> Iterator[None]:
    """An address of this machine's own while the block lasts."""
    subprocess.run(["ip", "addr", "add", f"{given}/32", "dev", "lo"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "addr", "del", f"{given}/32", "dev", "lo"], check=True)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="only root changes addresses, with iproute2"
)
async def test_a_device_that_left_its_network_comes_back_without_waiting_for_its_keepalive(tmp_path: Path) -> None:
    moved = "198.18.77.200"  # RFC 2544: kept for benchmarks
    with Broker(tmp_path, CONFIG.replace("{port} 127.0.0.1", "{port}")) as broker:
        running = session(broker.port, tmp_path, host=moved, keepalive_s=3600, reconnect_max_s=0.5)
        async with contextlib.AsyncExitStack() as left:
            with address(moved):
                await left.enter_async_context(running)
                await until(lambda: running.connected)
            with structlog.testing.capture_logs() as told:
                await until(lambda: not running.connected)
                await until(lambda: told)
            assert "left the network" in told[0]["reason"]
            with address(moved):
                await until(lambda: running.connected)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="only root changes addresses, with iproute2"
)
async def test_a_new_network_is_tried_at_once_however_long_the_device_was_to_stay_away(tmp_path: Path) -> None:
    moved = "198.18.77.201"
    with Broker(tmp_path, CONFIG.replace("{port} 127.0.0.1", "{port}")) as broker:
        running = session(
            broker.port, tmp_path, host=moved, keepalive_s=3600, reconnect_min_s=3600.0, reconnect_max_s=3600.0
        )
        async with contextlib.AsyncExitStack() as left:
            with structlog.testing.capture_logs() as told:
                with address(moved):
                    await left.enter_async_context(running)
                    await until(lambda: running.connected)
                await until(lambda: any(event.get("retry_s", 0) > PATIENCE_S for event in told))
                with address(moved):
                    await until(lambda: running.connected)


async def test_the_kernel_watches_over_the_connection_to_the_broker(broker: Broker, tmp_path: Path) -> None:
    async with session(broker.port, tmp_path) as running:
        await until(lambda: running.connected)
        assert running._connection is not None
        sock = running._connection._client.socket()
        assert isinstance(sock, socket.socket)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


async def test_a_site_full_of_devices_comes_back_after_the_broker_was_killed(broker: Broker, tmp_path: Path) -> None:
    fleet = [session(broker.port, tmp_path, device=f"cam-{n}", reconnect_max_s=0.5) for n in range(20)]
    await asyncio.gather(*(device.__aenter__() for device in fleet))
    try:
        await until(lambda: all(device.connected for device in fleet))
        broker.stop(signal.SIGKILL)
        await until(lambda: not any(device.connected for device in fleet))
        broker.start()
        await until(lambda: all(device.connected for device in fleet), 30)
        with Spy(broker.port) as spy:
            await until(lambda: {s["birth"] for s in spy.payloads("status")} and len(spy.payloads("status")) == 20)
            await until(lambda: len(spy.payloads("reported")) == 20)
    finally:
        await asyncio.gather(*(device.__aexit__() for device in fleet))
