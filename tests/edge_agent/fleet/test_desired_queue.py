"""Documents that wait for their turn: none waits behind one that failed, and nothing is reported twice."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone
from pathlib import Path

import pytest

from edge_agent.fleet.description import Description
from edge_agent.fleet.session import FleetSession
from edge_agent.mqtt.config import FleetConfig
from router.fleetwire.documents import DesiredConfig, Snapshot, encode
from tests.support.fleet_rig import Broker, Spy
from tests.support.waiting import until

TOPIC = "overspill/v1/default/cam-1/"


def want(version: int) -> DesiredConfig:
    return DesiredConfig(version=version, issued_at=datetime.now(timezone.utc), router={"max_queue": version})


def session(port: int, folder: Path, obeyed: list[int]) -> FleetSession:
    config = FleetConfig(
        enabled=True, port=port, device="cam-1", state_dir=str(folder), reconnect_min_s=0.05, reconnect_max_s=0.1
    )

    def apply(document: DesiredConfig) -> None:
        obeyed.append(document.version)

    return FleetSession(config, apply=apply, describe=lambda: Description({}), telemetry=Snapshot)


async def test_a_document_whose_obedience_raises_keeps_the_next_one_not_waiting(tmp_path: Path) -> None:
    obeyed: list[int] = []
    fleet = session(1, tmp_path, obeyed)
    async with fleet:
        report, failures = fleet._configurator.on_change, iter([RuntimeError("no thread left")])

        async def fails_once() -> None:
            for error in failures:
                raise error
            await report()

        fleet._configurator.on_change = fails_once
        fleet._desired.extend(encode(want(version)) for version in (1, 2))
        fleet._desired_came.set()
        await until(lambda: fleet.standing.applied_version == 2)
        assert obeyed == [1, 2]


async def test_a_document_whose_obedience_raises_again_is_reported_as_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = session(1, tmp_path, [])
    async with fleet:
        failures = iter([RuntimeError("no thread left")] * 2)

        async def fails_twice(_self, _desired) -> None:
            raise next(failures)

        monkeypatch.setattr(type(fleet._configurator), "_settle", fails_twice)
        fleet._desired.append(encode(want(7)))
        fleet._desired_came.set()
        await until(lambda: fleet.standing.state == "refused")
        assert (fleet.standing.version, fleet.standing.applied_version) == (7, None)


@pytest.mark.broker
async def test_reported_goes_out_once_a_reconnect(broker: Broker, tmp_path: Path) -> None:
    obeyed: list[int] = []
    with Spy(broker.port) as spy:
        async with session(broker.port, tmp_path / "state", obeyed) as fleet:
            await until(lambda: _reports(spy))  # the birth, before there is anything to obey
            spy.publish(TOPIC + "desired", encode(want(1)), retain=True)
            await until(lambda: fleet.standing.state == "applied")
            for connection in (1, 2, 3):
                await until(lambda: fleet.connected)
                live = fleet._connection
                await until(lambda: fleet.outbox.pending == 0)
                await until(lambda want=connection + 1: len(_reports(spy)) >= want)
                await asyncio.sleep(0.3)  # a second one would come right after the first
                reports = _reports(spy)
                assert len(reports) == connection + 1, "birth, applied, then one each time"
                assert fleet._reports == connection + 1, "nor does a second one merely replace the first in the outbox"
                assert live is not None
                live._abort()
                await until(lambda live=live: fleet._connection is not live)


@pytest.mark.broker
async def test_an_old_document_of_a_crashed_broker_is_called_stale_and_changes_nothing(
    broker: Broker, tmp_path: Path
) -> None:
    obeyed: list[int] = []
    async with session(broker.port, tmp_path / "state", obeyed) as fleet:
        with Spy(broker.port) as spy:
            for version in (1, 2):
                spy.publish(TOPIC + "desired", encode(want(version)), retain=True)
                await until(lambda version=version: fleet.standing.applied_version == version)
            spy.publish(TOPIC + "desired", encode(want(1)), retain=True)
            await until(lambda: fleet.standing.state == "stale")
            said = await until(lambda: [r for r in spy.payloads("reported") if r["state"] == "stale"])
            assert (said[0]["version"], said[0]["applied_version"], said[0]["handled_version"]) == (1, 2, 2)
            assert obeyed == [1, 2]


def _reports(spy: Spy) -> list[bytes]:
    return [body for topic, body, retained in spy.seen if topic == TOPIC + "reported" and not retained]
