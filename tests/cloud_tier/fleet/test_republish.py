"""A broker that crashed serves what it had saved before: devices say stale, operators publish anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from cloud_tier.fleet.view import DeviceView, draft, judge
from edge_agent.fleet.description import Description
from edge_agent.fleet.session import FleetSession
from edge_agent.mqtt.config import FleetConfig
from router.fleetwire.documents import DesiredConfig, Reported, Snapshot, digest_of, encode
from router.fleetwire.topics import Address
from tests.support.fleet_devices import PREFIX, fleet
from tests.support.fleet_rig import Broker, Spy
from tests.support.waiting import until


def want(version: int, **router: Any) -> DesiredConfig:
    return DesiredConfig(version=version, issued_at=datetime.now(timezone.utc), router=router)


def stale_view() -> DeviceView:
    old, new = want(6, max_queue=6), want(8, policy="local-only", max_queue=8)
    view = DeviceView(Address("default", "cam-1"), desired=old)
    view.reported = Reported(
        state="stale",
        version=6,
        digest=digest_of(old),
        applied_version=8,
        applied_digest=digest_of(new),
        handled_version=8,
        overrides=new.overrides,
    )
    return view


def test_a_change_of_a_stale_device_begins_from_what_is_in_force() -> None:
    view = stale_view()
    assert (view.state, view.astray, view.converged, view.highest_version) == ("stale", True, False, 8)
    proposal = draft(view, {"router": {"max_queue": 9}})
    assert proposal.desired.version == 9
    assert proposal.desired.router == {"policy": "local-only", "max_queue": 9}
    again = draft(view, {})
    assert (again.fresh, again.desired.version) == (True, 9)
    assert again.desired.router == {"policy": "local-only", "max_queue": 8}


def test_whoever_waits_for_a_stale_document_is_told() -> None:
    view = stale_view()
    assert view.desired is not None
    assert view.reported is not None
    outcome = judge(view.desired, view.reported)
    assert outcome is not None
    assert outcome.kind == "superseded"


def test_a_change_of_a_device_whose_document_is_gone_keeps_what_is_in_force() -> None:
    view = stale_view()
    view.desired = None
    assert view.astray
    assert draft(view, {"router": {"max_queue": 9}}).desired.router == {"policy": "local-only", "max_queue": 9}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    folder = tmp_path / "broker"
    folder.mkdir()
    config = (
        "listener {port} 127.0.0.1\nallow_anonymous true\npersistence true\npersistence_location {folder}/\n"
        "autosave_interval 0\nuser root\n"
    )
    with Broker(folder, config) as running:
        yield running


@pytest.mark.broker
async def test_after_a_crash_of_the_broker_everything_is_published_anew(broker: Broker, tmp_path: Path) -> None:
    """The broker saves version 1, dies without a farewell after version 3, and comes back with version 1."""
    config = FleetConfig(
        enabled=True,
        port=broker.port,
        device="cam-1",
        state_dir=str(tmp_path / "state"),
        reconnect_min_s=0.1,
        reconnect_max_s=0.3,
    )
    session = FleetSession(config, apply=lambda _: None, describe=lambda: Description({}), telemetry=Snapshot)
    async with session:
        with Spy(broker.port) as spy:
            spy.publish(f"{PREFIX}/cam-1/desired", encode(want(1, max_queue=11)), retain=True)
            await until(lambda: session.standing.applied_version == 1)
        broker.stop()  # saves
        broker.start()
        await until(lambda: session.connected)
        with Spy(broker.port) as spy:
            for version in (2, 3):
                spy.publish(f"{PREFIX}/cam-1/desired", encode(want(version, max_queue=10 + version)), retain=True)
            await until(lambda: session.standing.applied_version == 3)
        broker.stop(9)
        broker.start()
        await until(lambda: session.standing.state == "stale")
        assert session.standing.applied_version == 3
        code, output = await fleet(broker, "list", "--json")
        assert (code, json.loads(output)[0]["state"]) == (0, "stale")
        code, output = await fleet(broker, "list")
        assert "1 stale" in output
        assert "overspill fleet republish" in output
        code, output = await fleet(broker, "republish", "--all", "--json")
        said = json.loads(output)
        assert (code, said["outcomes"]) == (0, {"applied": 1})
        assert said["devices"][0]["desired"]["router"] == {"max_queue": 13}
        assert session.standing.applied_version == 4
        code, output = await fleet(broker, "republish", "--all", "--json")
        assert (code, json.loads(output)["devices"]) == (0, [])
        code, output = await fleet(broker, "list", "--json")
        assert json.loads(output)[0]["converged"]
