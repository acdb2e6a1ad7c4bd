"""Many devices: `overspill fleet list`, `forget`, and one change to all of them, against a real mosquitto."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from paho.mqtt.reasoncodes import ReasonCode

from cloud_tier.fleet.broker import BrokerAddress, BrokerConnection, BrokerError
from cloud_tier.fleet.many import ManyChanges, NothingSeen, choose, split_words, to_read
from cloud_tier.fleet.operator import FleetOperator
from cloud_tier.fleet.view import DeviceView
from router.base.errors import ConfigError
from router.fleetwire.documents import Status
from router.fleetwire.topics import Address
from tests.support.fleet_devices import PREFIX, ScriptedDevices, fleet, started
from tests.support.fleet_rig import CONFIG, Broker, Spy
from tests.support.waiting import until

ONLINE = ("cam-1", "cam-2", "door-1")


@pytest.mark.parametrize(
    ("words", "devices", "assignments"),
    [
        (["cam-1", "router.a=1"], ["cam-1"], ["router.a=1"]),
        (["cam-1", "cam-*", "router.a=x.y", "router.b=[1]"], ["cam-1", "cam-*"], ["router.a=x.y", "router.b=[1]"]),
        (["router.a=1"], [], ["router.a=1"]),
        (["router.5", "router.a=1"], ["router.5"], ["router.a=1"]),
        ([], [], []),
    ],
)
def test_devices_come_before_assignments(words: list[str], devices: list[str], assignments: list[str]) -> None:
    assert split_words(words) == (devices, assignments)


@pytest.mark.parametrize(
    "words", [["cam-1", "router.a"], ["cam-1", "models.x", "router.a=1"], ["a", "router.a=1", "b"]]
)
def test_a_forgotten_equals_sign_makes_no_device(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="is no assignment"):
        split_words(words)


def test_patterns_mean_only_what_was_seen_and_names_mean_themselves() -> None:
    views = {name: DeviceView(Address("f", name)) for name in ("cam-1", "cam-2", "ghost")}
    for name in ("cam-1", "cam-2"):
        views[name].status = Status(state="online", birth=1, session="s")
    assert choose(views, ["*"]) == ["cam-1", "cam-2"]
    assert choose(views, ["*"], unseen=True) == ["cam-1", "cam-2", "ghost"]
    assert choose(views, ["cam-[13]", "ghost", "new", "cam-1"]) == ["cam-1", "ghost", "new"]
    for pattern in ("g*", "door-?"):
        with pytest.raises(NothingSeen, match="matches"):
            choose(views, ["cam-1", pattern])
    assert to_read("f", ["cam-1"]) == ["cam-1"]
    assert to_read("f", ["cam-1", "c*"]) is None
    with pytest.raises(ConfigError, match="no valid name"):
        to_read("f", ["c*", "a/b"])


@pytest.fixture
def devices(broker: Broker) -> Iterator[ScriptedDevices]:
    with ScriptedDevices(broker, *ONLINE, offline=("cam-off",)) as scripted:
        yield scripted


def rows(output: str) -> list[list[str]]:
    """Return the words of every row of a table; reasons below them are indented."""
    lines = output.splitlines()[1:-1]
    return [line.split() for line in lines if not line.startswith(" ")]


@pytest.mark.broker
async def test_a_mistyped_device_is_listed_and_forgotten(broker: Broker, devices: ScriptedDevices) -> None:
    code, output = await fleet(broker, "set", "cam-l", "router.max_queue=3", "--wait", "0.3")
    assert (code, "overspill fleet forget cam-l" in output) == (3, True)
    await fleet(broker, "set", "cam-1", "router.max_queue=3")
    code, output = await fleet(broker, "list", "--json")
    listed = {device["device"]: device for device in json.loads(output)}
    assert code == 0
    assert set(listed) == {*ONLINE, "cam-off", "cam-l"}
    assert (listed["cam-l"]["status"], listed["cam-l"]["state"]) == ("never", "waiting")
    assert [listed["cam-1"][key] for key in ("status", "applied_version", "converged")] == ["online", 1, True]
    code, output = await fleet(broker, "list", "--delta", width=80)
    assert (code, output.count("cam-")) == (0, 1)
    assert "1 device: 1 never seen, 1 waiting" in output
    code, output = await fleet(broker, "get", "cam-l")
    assert (code, "cam-l was never seen" in output, "router.max_queue" in output) == (3, True, True)
    code, output = await fleet(broker, "forget", "cam-l")
    assert (code, "add --yes" in output) == (2, True)
    code, output = await fleet(broker, "forget", "cam-l", "--yes", "--json")
    said = {"device": "cam-l", "forgotten": True, "cleared": ["desired"], "reason": "forgotten (desired)"}
    assert (code, json.loads(output)) == (0, [said])
    code, output = await fleet(broker, "forget", "cam-l", "--yes")
    assert (code, output.startswith("cam-l: nothing can be read here")) == (3, True)
    code, output = await fleet(broker, "list", "cam-l")
    assert (code, "cam-l: no such device was ever seen" in output) == (3, True)


@pytest.mark.broker
async def test_an_online_device_is_forgotten_only_by_force(broker: Broker, devices: ScriptedDevices) -> None:
    code, output = await fleet(broker, "forget", "cam-*", "--yes")
    assert code == 1
    assert "cam-1: it is online, so it was not forgotten; --force does it all the same" in output
    assert "cam-off: forgotten (status)" in output
    code, output = await fleet(broker, "list", "--json")
    assert {device["device"] for device in json.loads(output)} == set(ONLINE)
    code, output = await fleet(broker, "forget", "cam-1", "--yes", "--force")
    assert (code, "cam-1: forgotten (status); it is online" in output) == (0, True)


@pytest.mark.broker
async def test_one_change_reaches_everyone_that_was_ever_seen(broker: Broker, devices: ScriptedDevices) -> None:
    ghost = f"{PREFIX}/ghost/desired"
    devices.spy.publish(ghost, {"version": 1, "issued_at": "2026-03-01T00:00:00Z"}, retain=True)
    code, output = await fleet(broker, "set", "cam-*", "router.max_queue=3", "--dry-run", width=80)
    assert (code, devices.received) == (0, [])
    assert rows(output) == [["cam-1", "online", "1"], ["cam-2", "online", "1"], ["cam-off", "offline", "1"]]
    assert "router.max_queue: the file's value → 3" in output
    assert "3 of 3 devices would get a new document; nothing was published" in output

    code, output = await fleet(broker, "set", "--all", "router.max_queue=3", "--json")
    told = json.loads(output)
    assert (code, told["outcomes"]) == (3, {"applied": 3, "waiting": 1})
    assert {device["device"] for device in told["devices"]} == {*ONLINE, "cam-off"}
    assert {name for name, _ in devices.received} == set(ONLINE)
    code, output = await fleet(broker, "get", "cam-off", "--json")
    assert json.loads(output)["desired"]["router"] == {"max_queue": 3}, "it waits for the device at the broker"
    code, output = await fleet(broker, "set", "door-1", "cam-1", "router.max_queue=3")
    assert (code, "2 devices: 2 unchanged" in output) == (0, True)
    code, output = await fleet(broker, "watch", "door-*", "--duration", "0.5", "--json")
    assert (code, {json.loads(line)["device"] for line in output.splitlines()}) == (0, {"door-1"})
    code, output = await fleet(broker, "set", "window-*", "router.max_queue=3")
    assert (code, "no device that was ever seen matches 'window-*'" in output) == (3, True)


@pytest.mark.broker
async def test_failures_are_named_and_the_worst_decides(broker: Broker, devices: ScriptedDevices) -> None:
    with ScriptedDevices(broker, "mute-1"):
        code, output = await fleet(broker, "set", "cam-?", "mute-1", "cam-new", "router.max_queue=3", "--wait", "0.5")
    assert code == 3
    assert ["mute-1", "online", "1", "no", "word"] in rows(output)
    assert "no device of this name has ever connected" in output
    assert "4 devices: 2 applied, 2 no word" in output
    code, output = await fleet(broker, "set", "cam-1", "cam-off", "router.policy=bad", width=80)
    assert code == 1
    assert rows(output) == [["cam-1", "online", "2", "refused"], ["cam-off", "offline", "1", "waiting"]]
    assert "unknown policy 'bad'" in output


@pytest.mark.broker
async def test_enough_refusals_stop_a_change(broker: Broker, devices: ScriptedDevices) -> None:
    bad = ("router.policy=bad", "--parallel", "1", "--max-refused", "2", "--json")
    code, output = await fleet(broker, "set", "--all", *bad)
    assert (code, json.loads(output)["outcomes"]) == (1, {"refused": 2, "not sent": 2})
    assert len(devices.received) == 2


@pytest.mark.broker
async def test_a_limit_of_refusals_goes_in_waves(broker: Broker) -> None:
    names = [f"mute-{number}" for number in range(6)]
    with ScriptedDevices(broker, *names) as mute:
        async with FleetOperator(BrokerAddress(port=broker.port)) as operator, operator.survey() as survey:
            many = ManyChanges(survey, names, {"router": {"max_queue": 1}}, parallel=2, max_refused=1, wait_s=60)
            running = asyncio.create_task(many.run(operator))
            await until(lambda: len(mute.received) == 2)
            await operator.survey(["mute-0"]).__aenter__()  # several round trips later
            assert len(mute.received) == 2
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            reasons = [change.outcome.reason for change in many.changes if change.outcome is not None]
            assert reasons == ["interrupted before its word came"] * 2 + ["not begun: interrupted"] * 4


@pytest.mark.broker
async def test_waves_grow_while_nobody_refuses(broker: Broker) -> None:
    names = [f"cam-{number:02}" for number in range(14)]
    with ScriptedDevices(broker, *names, apply_s=0.5) as devices:
        async with FleetOperator(BrokerAddress(port=broker.port)) as operator, operator.survey(names) as survey:
            many = ManyChanges(survey, names, {"router": {"max_queue": 9}}, parallel=2, max_refused=1)
            began_s = time.monotonic()
            await many.run(operator)
            took_s = time.monotonic() - began_s
    assert {change.outcome.kind for change in many.changes if change.outcome is not None} == {"applied"}
    assert len(devices.received) == len(names)
    assert 1.5 <= took_s < 7 * 0.5, "three waves, of 2, 4 and 8"


@pytest.mark.broker
async def test_a_slow_apply_holds_no_slot(broker: Broker) -> None:
    """All are published at once, and their words are counted as they come: the whole takes as long as one apply."""
    names = [f"cam-{number:02}" for number in range(40)]
    with ScriptedDevices(broker, *names, apply_s=1.0) as devices:
        async with FleetOperator(BrokerAddress(port=broker.port)) as operator, operator.survey(names) as survey:
            many = ManyChanges(survey, names, {"router": {"max_queue": 9}}, parallel=4, wait_s=10)
            began_s = time.monotonic()
            await many.run(operator)
            took_s = time.monotonic() - began_s
    assert [change.outcome.kind for change in many.changes if change.outcome is not None] == ["applied"] * 40
    assert len(devices.received) == 40
    assert took_s < 8.0, "not 40 / 4 of them"


@pytest.mark.broker
async def test_an_interrupted_change_says_how_far_it_came(broker: Broker) -> None:
    with ScriptedDevices(broker, "mute-1", "mute-2") as mute:
        process = await started(
            *("set", "mute-*", "router.max_queue=3", "--parallel", "1", "--max-refused", "1", "--wait", "60"),
            broker=f"127.0.0.1:{broker.port}",
        )
        await until(lambda: mute.received)
        process.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130
    assert b"interrupted before its word came" in output
    assert b"not begun: interrupted" in output


@pytest.mark.broker
async def test_an_interrupted_change_of_one_device_says_that_it_was_published(broker: Broker) -> None:
    with ScriptedDevices(broker, "mute-1") as mute:
        process = await started(
            *("set", "mute-1", "router.max_queue=3", "--wait", "60"), broker=f"127.0.0.1:{broker.port}"
        )
        await until(lambda: mute.received)
        process.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130
    assert b"mute-1: version 1 published; interrupted before its word: `overspill fleet get mute-1`" in output


@pytest.mark.broker
async def test_an_interruption_in_the_turn_of_the_acknowledgement_is_not_lost(broker: Broker) -> None:
    class Interrupted(BrokerConnection):
        def _on_acknowledged(self, mid: int, code: ReasonCode) -> None:
            super()._on_acknowledged(mid, code)
            publishing.cancel()

    async with Interrupted(BrokerAddress(port=broker.port), lambda _: None) as connection:
        publishing = asyncio.create_task(connection.publish("a/topic", b"a word"))
        with pytest.raises(asyncio.CancelledError):
            await publishing


@pytest.mark.broker
async def test_a_lost_broker_leaves_no_device_without_an_outcome(broker: Broker) -> None:
    names = ["mute-1", "mute-2", "mute-3"]
    with ScriptedDevices(broker, *names) as mute:
        async with FleetOperator(BrokerAddress(port=broker.port)) as operator, operator.survey(names) as survey:
            many = ManyChanges(survey, names, {"router": {"max_queue": 1}}, parallel=1, max_refused=3, wait_s=60)
            running = asyncio.create_task(many.run(operator))
            await until(lambda: mute.received)
            broker.stop(signal.SIGKILL)
            await asyncio.wait_for(running, 30)
    kinds = [change.outcome.kind for change in many.changes if change.outcome is not None]
    assert kinds == ["timeout", "unpublished", "unpublished"]


LARGE = 700


async def fill(broker: Broker) -> None:
    status = msgspec.json.encode(Status(state="online", birth=1, session="s"))
    async with BrokerConnection(BrokerAddress(port=broker.port), lambda _: None) as connection:
        topics = [f"{PREFIX}/cam-{number}/status" for number in range(LARGE)]
        await asyncio.gather(*(connection.publish(topic, status, retain=True) for topic in topics))


@pytest.mark.broker
@pytest.mark.parametrize(("limit", "complete"), [(LARGE, True), (LARGE - 200, False)])
async def test_a_broker_that_holds_devices_back_is_found_out(tmp_path: Path, limit: int, complete: bool) -> None:
    """Mosquitto drops what it cannot queue for one subscriber: half of a fleet must not pass for all of it."""
    with Broker(tmp_path, CONFIG + f"max_queued_messages {limit}\n") as broker:
        await fill(broker)
        code, output = await fleet(broker, "list", "--json")
    if complete:
        assert (code, len(json.loads(output))) == (0, LARGE)
    else:
        assert (code, "raise its limit (mosquitto: max_queued_messages" in output) == (2, True)


@pytest.mark.broker
async def test_every_leaf_of_a_large_fleet_is_read_twice_at_most(tmp_path: Path) -> None:
    with Broker(tmp_path, CONFIG + f"max_queued_messages {LARGE}\n") as broker:
        await fill(broker)
        async with FleetOperator(BrokerAddress(port=broker.port)) as operator:
            came: list[str] = []
            operator._listeners.append(lambda message: came.append(message.topic))
            async with operator.survey() as survey:
                assert len(survey.views) == LARGE
                status = msgspec.json.encode(Status(state="offline", birth=1, session="s"))
                async with BrokerConnection(BrokerAddress(port=broker.port), lambda _: None) as other:
                    await other.publish(f"{PREFIX}/cam-1/status", status, retain=True)
                await until(lambda: survey.views["cam-1"].connection == "offline")
                assert len(came) <= 2 * LARGE + 1


@pytest.mark.broker
async def test_a_device_that_has_said_everything_is_read_without_waiting(
    broker: Broker, devices: ScriptedDevices
) -> None:
    await fleet(broker, "set", "cam-1", "router.max_queue=9")
    async with FleetOperator(BrokerAddress(port=broker.port), settle_s=30) as operator:
        view = await asyncio.wait_for(operator.view("cam-1"), 10)
    assert view.converged


@pytest.mark.broker
async def test_a_survey_follows_what_happens_and_knows_only_its_own(broker: Broker, devices: ScriptedDevices) -> None:
    async with FleetOperator(BrokerAddress(port=broker.port)) as operator:
        async with operator.survey(["cam-1"]) as survey:
            with Spy(broker.port) as spy:
                spy.publish(f"{PREFIX}/cam-1/status", {"state": "offline", "birth": 1, "session": "s"}, retain=True)
            await until(lambda: survey.views["cam-1"].connection == "offline")
            assert set(survey.views) == {"cam-1"}
            broker.stop(signal.SIGKILL)
            with pytest.raises(BrokerError, match="was lost"):
                await survey.settled(60)
        assert not operator._listeners
