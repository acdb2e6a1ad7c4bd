"""Devices that report as an agent would, over one raw client, and `overspill fleet` as a process."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any

from router.fleetwire.documents import (
    Command,
    DesiredConfig,
    ReplicaTelemetry,
    Reported,
    Response,
    Snapshot,
    decode_as,
    decode_desired,
    digest_of,
    encode,
)
from tests.support.fleet_rig import Broker, Spy
from tests.support.paths import REPOSITORY

PREFIX = "overspill/v1/default"


class ScriptedDevices:
    """Online devices: `policy = "bad"` is refused, and so is a version used before; `mute-…` never reports.

    Each takes `apply_s` for a document, all at the same time.
    """

    def __init__(self, broker: Broker, *names: str, offline: tuple[str, ...] = (), apply_s: float = 0.0) -> None:
        self.apply_s = apply_s
        self.spy = Spy(broker.port, *(f"{PREFIX}/{name}/{leaf}" for name in names for leaf in ("desired", "command")))
        self.spy.client.on_message = self._on_message
        self.force: dict[str, DesiredConfig] = {}
        self.received: list[tuple[str, DesiredConfig]] = []
        for name in (*names, *offline):
            state = "offline" if name in offline else "online"
            status = {"state": state, "birth": 1, "session": "s", "at": "2026-03-01T00:00:00Z"}
            self.spy.publish(f"{PREFIX}/{name}/status", status, retain=True)

    def _on_message(self, client: Any, _data: object, message: Any) -> None:
        name = message.topic.split("/")[3]
        if not message.payload:
            return
        if message.topic.endswith("command"):
            assert decode_as(message.payload, Command).command in {"ping", "status"}
            replica = ReplicaTelemetry(replica_id="local/int8", running=2)
            snapshot = Snapshot(load=0.5, replicas=(replica,), memory_rss_bytes=250_000_000)
            answer = encode(Response(command="status", birth=1, snapshot=snapshot))
            client.publish(message.properties.ResponseTopic, answer, properties=_correlated(message))
            return
        desired = decode_desired(message.payload)
        self.received.append((name, desired))
        if name.startswith("mute"):
            return
        report = (f"{PREFIX}/{name}/reported", encode(self._obey(name, desired)), 1, True)
        if self.apply_s:
            threading.Timer(self.apply_s, client.publish, report).start()
        else:
            client.publish(*report)

    def _obey(self, name: str, desired: DesiredConfig) -> Reported:
        before = self.force.get(name)
        late = before is not None and desired.version <= before.version and desired != before
        bad = late or desired.router.get("policy") == "bad"
        if not bad:
            self.force[name] = desired
        force = self.force.get(name)
        return Reported(
            state="refused" if bad else "applied",
            version=desired.version,
            digest=digest_of(desired),
            reason="conflict" if late else "unknown policy 'bad'" if bad else "",
            applied_version=force.version if force else None,
            applied_digest=digest_of(force) if force else "",
            overrides=force.overrides if force else {},
            effective={"router": {"policy": "good", "overload_answer_tokens": 64, **(force.router if force else {})}},
        )

    def __enter__(self) -> ScriptedDevices:
        self.spy.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.spy.__exit__()


def _correlated(message: Any) -> Any:
    properties = type(message.properties)(3)
    properties.CorrelationData = message.properties.CorrelationData
    return properties


async def started(*arguments: str, broker: str, width: int = 200) -> asyncio.subprocess.Process:
    """Start `overspill fleet …`; what it says comes as one stream."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "overspill", "fleet", *arguments, "--broker", broker),
        cwd=REPOSITORY,
        env={**os.environ, "COLUMNS": str(width)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def fleet(broker: Broker, *arguments: str, width: int = 200) -> tuple[int, str]:
    """Run `overspill fleet …` to its end; returns its exit code and all that it said."""
    process = await started(*arguments, broker=f"127.0.0.1:{broker.port}", width=width)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, output.decode()
