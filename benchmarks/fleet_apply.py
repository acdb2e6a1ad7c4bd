"""How long a policy change takes over MQTT, until every device has reported that it is in force.

    python -m benchmarks.fleet_apply [--json FILE] [--devices N …] [--rounds N]

One mosquitto on loopback and N device sessions in this process, each with its connection, its threads, its outbox and
its state on disk. Every device checks the whole configuration before it takes it over; models are left out. Timed from
the operator's first publish to the last device's report, and for each device from that publish to its own report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import statistics
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

import msgspec
import uvloop

from cloud_tier.fleet.broker import BrokerAddress, BrokerConnection, Message
from edge_agent.config import EdgeConfig
from edge_agent.fleet.description import Description
from edge_agent.fleet.session import FleetSession
from edge_agent.mqtt.config import FleetConfig
from examples.demo.processes import Child, find_mosquitto, free_port
from router.base import logs
from router.base.config import decode
from router.fleetwire.documents import DesiredConfig, Reported, Snapshot, decode_as, encode
from router.fleetwire.overrides import lay_over
from router.fleetwire.topics import topic_filter

FLEET = "site"
POLICIES = ("local-first", "cloud-first")
LIMIT_S = 120.0
FILES_A_DEVICE = 12  # its socket, paho's pair, the outbox's files, the lock
MOSQUITTO_CONF = """\
listener {port} 127.0.0.1
allow_anonymous true
persistence false
"""


class Device:
    """One device: its session, and the configuration that is in force on it."""

    def __init__(self, port: int, number: int, folder: Path) -> None:
        self.name = f"device-{number}"
        self.effective = EdgeConfig()
        config = FleetConfig(enabled=True, port=port, fleet=FLEET, device=self.name, state_dir=str(folder))
        self.session = FleetSession(
            config, apply=self._apply, describe=lambda: Description(self.effective), telemetry=Snapshot
        )

    async def _apply(self, desired: DesiredConfig) -> None:
        tree = lay_over(msgspec.to_builtins(EdgeConfig()), desired.overrides)
        self.effective = decode(tree, EdgeConfig, source=f"desired version {desired.version}")


class Reports:
    """Listens to what the devices report, and notes when each has a version in force."""

    def __init__(self) -> None:
        self.version = 0
        self.at_s: dict[str, float] = {}
        self.came = asyncio.Event()

    def take(self, message: Message) -> None:
        """A callback of the operator's connection."""
        reported = decode_as(message.payload, Reported)
        if reported.applied_version == self.version:
            self.at_s.setdefault(message.topic, time.perf_counter())
            self.came.set()

    async def of_all(self, devices: int) -> list[float]:
        """Return when each device reported; fails if one does not in time."""
        ends_s = time.perf_counter() + LIMIT_S
        while len(self.at_s) < devices:
            self.came.clear()
            await asyncio.wait_for(self.came.wait(), ends_s - time.perf_counter())
        return sorted(self.at_s.values())


async def measure(port: int, count: int, rounds: int) -> dict[str, object]:
    """Change the policy of `count` devices `rounds` times; medians over the rounds."""
    reports = Reports()
    whole_s: list[float] = []
    median_s: list[float] = []
    async with contextlib.AsyncExitStack() as stack:
        operator = await stack.enter_async_context(BrokerConnection(BrokerAddress("127.0.0.1", port), reports.take))
        await operator.subscribe(topic_filter(FLEET, "reported"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overspill-fleet-")))
        devices = [Device(port, number, folder) for number in range(count)]
        for device in devices:
            await stack.enter_async_context(device.session)
        ends_s = time.perf_counter() + LIMIT_S
        while not all(device.session.connected for device in devices):
            assert time.perf_counter() < ends_s, "not every device came online"
            await asyncio.sleep(0.05)
        for version in range(1, rounds + 1):
            policy = POLICIES[version % len(POLICIES)]
            reports.version, reports.at_s = version, {}
            wanted = encode(
                DesiredConfig(version=version, issued_at=datetime.now(timezone.utc), router={"policy": policy})
            )
            began_s = time.perf_counter()
            topics = [device.session.address.topic("desired") for device in devices]
            await asyncio.gather(*(operator.publish(topic, wanted, retain=True) for topic in topics))
            took_s = [at_s - began_s for at_s in await reports.of_all(count)]
            assert all(device.effective.router.policy == policy for device in devices)
            whole_s.append(took_s[-1])
            median_s.append(statistics.median(took_s))
    return {
        "devices": count,
        "all_s": round(statistics.median(whole_s), 3),
        "all_worst_s": round(max(whole_s), 3),
        "device_median_s": round(statistics.median(median_s), 3),
    }


async def run(counts: list[int], rounds: int) -> list[dict[str, object]]:
    """Start a broker for each number of devices, and measure."""
    rows = []
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="overspill-broker-") as name:
            port, folder = free_port(), Path(name)
            (folder / "mosquitto.conf").write_text(MOSQUITTO_CONF.format(port=port))
            broker = Child("mosquitto", [find_mosquitto(), "-c", str(folder / "mosquitto.conf")], folder / "log")
            broker.start()
            try:
                await broker.wait_port(port)
                rows.append(await measure(port, count, rounds))
            finally:
                await broker.stop()
    return rows


def main() -> None:
    """Print the table, and write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--devices", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    wanted = max(arguments.devices) * FILES_A_DEVICE + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else hard, hard))
    logs.configure("warning", "console")
    rows = uvloop.run(run(arguments.devices, arguments.rounds))
    print(f"{'devices':>8}{'in force on all, s':>21}{'slowest round, s':>19}{'median device, s':>19}")
    for row in rows:
        print(f"{row['devices']:>8}{row['all_s']:>21}{row['all_worst_s']:>19}{row['device_median_s']:>19}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rounds": arguments.rounds, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
