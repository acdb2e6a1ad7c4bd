"""How long a policy change takes over MQTT, until every device has reported that it is in force; and the commands.

    python -m benchmarks fleet_apply -- [--devices N …] [--rounds N] [--simulated N] [--apply-s S]
                                     [--baseline DIR]

Sessions: one mosquitto on loopback and N device sessions in this process, each with its connection, its threads, its
outbox and its state on disk. Every device checks the whole configuration before it takes it over; models are left out.
Timed from the operator's first publish to the last device's report, and for each device from that publish to its own.

Commands: `overspill fleet …` as processes, from their start to their end, against `--simulated` devices behind one
connection that report `--apply-s` after each document. With `--baseline`, the same by turns with the code in another
checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from cloud_tier.fleet.broker import BrokerAddress, BrokerConnection, Message
from edge_agent.config import EdgeConfig
from edge_agent.fleet.description import Description
from edge_agent.fleet.session import FleetSession
from edge_agent.mqtt.config import FleetConfig
from examples.demo.processes import Child, find_mosquitto, free_port, overspill
from router.base import logs
from router.base.config import decode
from router.fleetwire.documents import (
    DesiredConfig,
    Reported,
    Snapshot,
    Status,
    decode_as,
    decode_desired,
    digest_of,
    encode,
    utc_now,
)
from router.fleetwire.overrides import lay_over
from router.fleetwire.topics import Address, parse_topic, topic_filter

FLEET = "site"
POLICIES = ("local-first", "cloud-first")
LIMIT_S = 120.0
PUBLISHES = 200
COMMAND_ROUNDS = 7
REPOSITORY = Path(__file__).resolve().parent.parent
FILES_A_DEVICE = 12  # its socket, paho's pair, the outbox's files, the lock
MOSQUITTO_CONF = """\
listener {port} 127.0.0.1
allow_anonymous true
persistence false
max_queued_messages 100000
max_queued_bytes 268435456
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


class SimulatedDevices:
    """Devices that announce themselves and report each document `apply_s` after it came, behind one connection."""

    def __init__(self, connection: BrokerConnection, count: int, apply_s: float) -> None:
        self.connection = connection
        self.addresses = [Address(FLEET, f"simulated-{number:05}") for number in range(count)]
        self.apply_s = apply_s
        self._reporting: set[asyncio.Task[None]] = set()

    async def announce(self) -> None:
        status = encode(Status(state="online", birth=1, session="s", at=utc_now()))
        reported = encode(Reported(state="none", handled_version=0))
        for begin in range(0, len(self.addresses), PUBLISHES):
            part = self.addresses[begin : begin + PUBLISHES]
            await asyncio.gather(
                *(self.connection.publish(address.topic("status"), status, retain=True) for address in part),
                *(self.connection.publish(address.topic("reported"), reported, retain=True) for address in part),
            )
        await self.connection.subscribe(topic_filter(FLEET, "desired"))

    def take(self, message: Message) -> None:
        """A callback of the connection."""
        parsed = parse_topic(message.topic)
        if parsed is not None and message.payload and not message.retained:
            task = asyncio.ensure_future(self._report(parsed[0], decode_desired(message.payload)))
            self._reporting.add(task)
            task.add_done_callback(self._reporting.discard)

    async def _report(self, address: Address, desired: DesiredConfig) -> None:
        await asyncio.sleep(self.apply_s)
        digest, version = digest_of(desired), desired.version
        reported = Reported(
            state="applied",
            version=version,
            digest=digest,
            applied_version=version,
            applied_digest=digest,
            handled_version=version,
            overrides=desired.overrides,
        )
        await self.connection.publish(address.topic("reported"), encode(reported), retain=True)


async def command_s(port: int, code: Path, *arguments: str) -> tuple[float, float]:
    """Run `overspill fleet …` with the code of a checkout; return how long it took, and how long it computed."""
    argv = overspill("fleet", *arguments, "--fleet", FLEET, "--broker", f"127.0.0.1:{port}")
    began_s, computed_s = time.perf_counter(), children_cpu_s()
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=code,
        env={**os.environ, "PYTHONPATH": str(code)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-2000:]
    return time.perf_counter() - began_s, children_cpu_s() - computed_s


def children_cpu_s() -> float:
    """CPU time of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def measure_commands(port: int, count: int, apply_s: float, codes: dict[str, Path]) -> list[dict[str, object]]:
    """Time the commands, each version's by turns."""
    rows: list[dict[str, object]] = []
    devices: list[SimulatedDevices] = []

    def deliver(message: Message) -> None:
        devices[-1].take(message)

    async with BrokerConnection(BrokerAddress("127.0.0.1", port), deliver) as connection:
        few = SimulatedDevices(connection, 1, 0.0)
        devices.append(few)
        await few.announce()
        one = few.addresses[0].device
        timed: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for turn in range(COMMAND_ROUNDS):
            for name, code in list(codes.items())[:: 1 if turn % 2 == 0 else -1]:
                for command in (("get", one), ("list",), ("set", one, f"router.max_queue={turn + 10}")):
                    timed.setdefault((name, command[0]), []).append(await command_s(port, code, *command))
        for (name, word), took_s in timed.items():
            rows.append(command_row(name, f"{word}, 1 device", took_s))
        devices.append(SimulatedDevices(connection, count, apply_s))
        await devices[-1].announce()
        for turn, (name, code) in enumerate(codes.items()):
            change = f"router.max_queue={turn + 40}"
            for of_all in (("list",), ("set", "--all", change, "--wait", str(3 * apply_s + 60))):
                took_s = [await command_s(port, code, *of_all)]
                rows.append(command_row(name, f"{of_all[0]}, {count} devices", took_s))
    return rows


def command_row(code: str, command: str, took_s: list[tuple[float, float]]) -> dict[str, object]:
    """Return the medians of one command."""
    wall_s, cpu_s = (round(statistics.median(values), 2) for values in zip(*took_s, strict=True))
    return {"code": code, "command": command, "s": wall_s, "cpu_s": cpu_s}


@contextlib.asynccontextmanager
async def broker() -> AsyncIterator[int]:
    """A broker of its own; yields its port."""
    with tempfile.TemporaryDirectory(prefix="overspill-broker-") as name:
        port, folder = free_port(), Path(name)
        (folder / "mosquitto.conf").write_text(MOSQUITTO_CONF.format(port=port))
        child = Child("mosquitto", [find_mosquitto(), "-c", str(folder / "mosquitto.conf")], folder / "log")
        child.start()
        try:
            await child.wait_port(port)
            yield port
        finally:
            await child.stop()


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Start a broker for each measurement, and measure."""
    rows = []
    for count in arguments.devices:
        async with broker() as port:
            rows.append(await measure(port, count, arguments.rounds))
    codes = {"this": REPOSITORY, **({"baseline": arguments.baseline} if arguments.baseline else {})}
    async with broker() as port:
        commands = await measure_commands(port, arguments.simulated, arguments.apply_s, codes)
    return {"rounds": arguments.rounds, "rows": rows, "apply_s": arguments.apply_s, "commands": commands}


def main() -> None:
    """Print the tables, and write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--devices", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--simulated", type=int, default=1000)
    parser.add_argument("--apply-s", type=float, default=5.0)
    parser.add_argument("--baseline", type=Path)
    arguments = parser.parse_args()
    wanted = max(arguments.devices) * FILES_A_DEVICE + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else hard, hard))
    logs.configure("warning", "console")
    result = uvloop.run(run(arguments))
    rows: Any = result["rows"]
    commands: Any = result["commands"]
    print(f"{'devices':>8}{'in force on all, s':>21}{'slowest round, s':>19}{'median device, s':>19}")
    for row in rows:
        print(f"{row['devices']:>8}{row['all_s']:>21}{row['all_worst_s']:>19}{row['device_median_s']:>19}")
    print(f"\n{'code':<10}{'command':<24}{'s':>8}{'CPU, s':>9}")
    for row in commands:
        print(f"{row['code']:<10}{row['command']:<24}{row['s']:>8}{row['cpu_s']:>9}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
