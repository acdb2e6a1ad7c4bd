"""The operator's side: edits, verdicts, and `overspill fleet` as a process against a real mosquitto."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloud_tier.fleet.broker import BrokerAddress, BrokerError, parse_broker
from cloud_tier.fleet.edits import read_edits, read_value
from cloud_tier.fleet.operator import FleetOperator
from cloud_tier.fleet.view import DeviceView, judge
from router.base.errors import ConfigError
from router.fleetwire.documents import DesiredConfig, DesiredRefused, Reported, digest_of
from router.fleetwire.topics import Address
from tests.support.fleet_devices import ScriptedDevices, fleet
from tests.support.fleet_rig import Broker, Spy
from tests.support.waiting import until

NOW = dt.datetime(2026, 3, 1, tzinfo=dt.timezone.utc)
TOPIC = "overspill/v1/default/cam-1/"


def want(version: int, **router: Any) -> DesiredConfig:
    return DesiredConfig(version=version, issued_at=NOW, router=router)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ("null", None),
        ('"3"', "3"),
        ("[1, 2]", [1, 2]),
        ("fast", "fast"),
        ("", ""),
    ],
)
def test_values_are_toml_and_plain_words_are_strings(text: str, value: object) -> None:
    assert read_value(text) == value


def test_file_assignments_and_removals_make_one_tree(tmp_path: Path) -> None:
    file = tmp_path / "desired.toml"
    file.write_text('[router]\nmax_queue = 3\npolicy = "a"\n[router.breaker]\nfailures = 2\n')
    assert read_edits(["router.max_queue=9", "router.breaker.open_ms=5.0"], ["router.policy"], file) == {
        "router": {"max_queue": 9, "policy": None, "breaker": {"failures": 2, "open_ms": 5.0}}
    }
    as_json = tmp_path / "desired.json"
    as_json.write_text('{"version": 7, "issued_at": "2026-03-01T00:00:00Z", "router": {"policy": null}}')
    assert read_edits([], [], as_json) == {"router": {"policy": None}}


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("router.max_queue", "is no assignment"),
        ("=3", "is no assignment"),
        ("router..x=3", "empty part"),
        ("router=3", "`router` is a table"),
        ("agent.port=3", "`agent` cannot be set"),
        ("gateway.api_keys=[]", "`gateway` cannot be set"),
    ],
)
def test_wrong_assignments_are_named(assignment: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_edits([assignment])
    assert says in error.value.message


@pytest.mark.parametrize("content", ["[router", "", "router = 3"])
def test_wrong_files_are_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / ("desired.toml" if content else "missing.json")
    if content:
        file.write_text(content)
    with pytest.raises((ConfigError, DesiredRefused)):
        read_edits([], [], file)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "[1.0, nan]"])
def test_a_number_that_json_cannot_say_is_refused(text: str) -> None:
    """It went out as null, which takes the override away, and the device reported "applied"."""
    with pytest.raises(ConfigError):
        read_edits([f"router.ttft_slo_ms={text}"])


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("site", ("site", 1883, False)),
        ("10.0.0.1:1884", ("10.0.0.1", 1884, False)),
        ("[::1]:9", ("::1", 9, False)),
        ("mqtts://broker.example", ("broker.example", 8883, True)),
        ("mqtt://broker:5/", ("broker", 5, False)),
    ],
)
def test_broker_addresses(text: str, parsed: tuple[str, int, bool]) -> None:
    assert parse_broker(text) == parsed


@pytest.mark.parametrize("text", ["", "http://x", "a:b", "a:99999", "a:1:2"])
def test_what_is_no_broker_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        parse_broker(text)


def test_verdicts() -> None:
    mine, other = want(8, a=1), want(8, a=2)
    digest, foreign = digest_of(mine), digest_of(other)
    cases = [
        (Reported(state="applied", version=8, digest=digest, applied_version=8, applied_digest=digest), "applied"),
        (Reported(state="refused", version=8, digest=digest, reason="no", applied_version=7), "refused"),
        (Reported(state="refused", version=8, digest=digest, reason="conflict", applied_version=8), "conflict"),
        (Reported(state="applied", version=8, digest=foreign, applied_version=8, applied_digest=foreign), "conflict"),
        (Reported(state="refused", version=8, digest=foreign, applied_version=8, applied_digest=digest), "applied"),
        (Reported(state="applied", version=9, digest="x", applied_version=9, applied_digest="x"), "superseded"),
    ]
    for report, kind in cases:
        outcome = judge(mine, report)
        assert outcome is not None
        assert outcome.kind == kind
    for report in (
        Reported(state="none"),
        Reported(state="applied", version=7, digest="x", applied_version=7),
        Reported(state="applying", version=8, digest=digest, applied_version=7),
        Reported(state="refused", reason="garbage", applied_version=7),
    ):
        assert judge(mine, report) is None


def test_a_change_begins_from_what_is_in_force_when_the_last_document_was_refused() -> None:
    view = DeviceView(Address("default", "cam-1"), desired=want(8, policy="typo", max_queue=3))
    assert view.base == {"router": {"policy": "typo", "max_queue": 3}}
    view.reported = Reported(state="refused", version=8, applied_version=7, overrides={"router": {"max_queue": 3}})
    assert view.base == {"router": {"max_queue": 3}}
    view.desired = want(9, policy="newer")
    assert view.base == {"router": {"policy": "newer"}}


def test_unreadable_retained_payloads_do_not_hide_the_rest() -> None:
    view = DeviceView(Address("default", "cam-1"))
    view.take("desired", b"{garbage")
    view.take("reported", b"\xff")
    view.take("status", b"[]")
    assert "not valid JSON" in view.desired_error
    assert (view.reported, view.status, view.online, view.highest_version) == (None, None, False, 0)


@pytest.fixture
def device(broker: Broker) -> Iterator[ScriptedDevices]:
    with ScriptedDevices(broker, "cam-1") as scripted:
        yield scripted


@pytest.mark.broker
async def test_set_get_and_watch_as_an_operator_types_them(broker: Broker, device: ScriptedDevices) -> None:
    assert await fleet(broker, "set", "cam-1", "router.max_queue=32") == (0, "cam-1: version 1 applied\n")
    code, output = await fleet(broker, "set", "cam-1", "router.max_queue=32")
    assert (code, "nothing published" in output) == (0, True)
    code, output = await fleet(broker, "set", "cam-1", "router.policy=bad")
    assert (code, output) == (1, "cam-1: version 2 refused: unknown policy 'bad'\n")
    code, output = await fleet(broker, "set", "cam-1", "router.max_queue=null", "--json")
    said = json.loads(output)
    assert (code, said["outcome"], said["version"]) == (0, "applied", 3)
    assert "router" not in said["desired"], "the refused policy is not carried along"
    code, output = await fleet(broker, "get", "cam-1", "--json", "--live")
    said = json.loads(output)
    assert (code, said["delta"], said["status"]["state"]) == (0, [], "online")
    assert said["live"]["command"] == "status"
    code, output = await fleet(broker, "get", "cam-1")
    assert (code, "version 3 applied" in output) == (0, True)
    code, output = await fleet(broker, "watch", "--json", "--duration", "0.5")
    lines = [json.loads(line) for line in output.splitlines()]
    assert (code, {line["leaf"] for line in lines}) == (0, {"desired", "reported", "status"})


@pytest.mark.broker
async def test_no_device_no_broker_no_sense(broker: Broker) -> None:
    code, output = await fleet(broker, "set", "nobody", "router.max_queue=3", "--wait", "0.3")
    assert (code, "no device of this name has ever connected" in output) == (3, True)
    assert "`overspill fleet forget nobody` takes the document back" in output
    code, output = await fleet(broker, "set", "a/b", "router.max_queue=3")
    assert (code, "no valid name" in output) == (2, True)
    code, output = await fleet(broker, "set", "nobody")
    assert (code, "nothing to set" in output) == (2, True)
    broker.stop()
    code, output = await fleet(broker, "get", "nobody")
    assert (code, "cannot connect to the broker" in output) == (2, True)
    assert "is it running, and is this its address? --broker or $OVERSPILL_FLEET_BROKER names another" in output


class Slow(FleetOperator):
    """Publishes only when the other one has read, too."""

    other: Slow
    has_read = False

    async def view(self, device: str) -> DeviceView:
        view = await super().view(device)
        self.has_read = True
        await until(lambda: self.other.has_read)
        return view


@pytest.mark.broker
async def test_two_operators_at_once_learn_who_was_first(broker: Broker, device: ScriptedDevices) -> None:
    address = BrokerAddress(port=broker.port)
    one, two = Slow(address), Slow(address)
    async with one, two:
        one.other, two.other = two, one
        first, second = await asyncio.gather(
            one.propose("cam-1", {"router": {"max_queue": 1}}), two.propose("cam-1", {"router": {"max_queue": 2}})
        )
        assert first.fresh
        assert second.fresh
        assert first.desired.version == second.desired.version == 1
        kinds = {
            (await one.outcome("cam-1", first.desired, 5)).kind,
            (await two.outcome("cam-1", second.desired, 5)).kind,
        }
        assert kinds == {"applied", "conflict"}


@pytest.mark.broker
async def test_a_lost_broker_is_an_error_for_a_change_and_a_pause_for_a_watch(broker: Broker) -> None:
    address = BrokerAddress(port=broker.port, connect_timeout_s=2)
    async with FleetOperator(address) as operator:
        events: list[str] = []

        async def follow() -> None:
            async for event in operator.watch():
                events.append(event.leaf)  # noqa: PERF401 - read while it grows

        watching = asyncio.create_task(follow())

        def seen(leaf: str) -> bool:
            with Spy(broker.port) as spy:
                spy.publish(TOPIC + leaf, {"state": "online", "birth": 1, "session": "s"}, retain=leaf == "status")
            return leaf in events

        await until(lambda: seen("telemetry"))
        broker.stop(9)
        broker.start()
        async with FleetOperator(address) as other:
            waiting = asyncio.create_task(other.outcome("cam-1", want(1), 60))
            await asyncio.sleep(0.2)

            await until(lambda: seen("status"))
            broker.stop(9)
            with pytest.raises(BrokerError, match="was lost"):
                await waiting
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
