"""The device's session against a real mosquitto: birth, desired, reported, telemetry, commands, goodbye."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from edge_agent.fleet.description import Description
from edge_agent.fleet.session import FleetSession
from edge_agent.fleet.takeover import Overwritten
from edge_agent.mqtt.config import FleetConfig
from router.base.errors import ConfigError
from router.fleetwire.documents import DesiredConfig, ModelReport, Snapshot
from router.fleetwire.overrides import lay_over
from tests.support.fleet_rig import Broker, Spy
from tests.support.waiting import until

pytestmark = pytest.mark.broker

FILE = {"router": {"policy": "first", "max_queue": 64}, "gateway": {"api_keys": ["secret"]}}
TOPIC = "overspill/v1/default/cam-1/"
NOW = "2026-03-01T12:00:00Z"


@pytest.fixture
def spy(broker: Broker) -> Iterator[Spy]:
    with Spy(broker.port) as client:
        yield client


class Device:
    """An agent's side: a configuration that refuses unknown policies."""

    def __init__(self) -> None:
        self.effective: dict[str, Any] = FILE
        self.applied: list[DesiredConfig] = []
        self.gate: Callable[[], Awaitable[None]] | None = None

    async def apply(self, desired: DesiredConfig) -> None:
        wanted = lay_over(FILE, desired.overrides)
        if wanted["router"]["policy"] not in {"first", "second"}:
            raise ConfigError(f"router.policy: unknown policy {wanted['router']['policy']!r}", param="router.policy")
        if wanted["router"].get("crash"):
            raise ZeroDivisionError("a bug")
        if self.gate is not None:
            await self.gate()
        self.effective = wanted
        self.applied.append(desired)

    def describe(self) -> Description:
        models = (ModelReport(variant="smollm2-135m-int8", digest="sha256:00", rung=1),)
        return Description(self.effective, agent_version="0.1.0", models=models)

    def snapshot(self) -> Snapshot:
        return Snapshot(load=0.5, decisions={"local": 2})

    def session(self, port: int, folder: Path, **more: Any) -> FleetSession:
        fast: dict[str, Any] = {
            "enabled": True,
            "reconnect_min_s": 0.05,
            "reconnect_max_s": 0.2,
            "telemetry_interval_s": 60.0,
            "connect_timeout_s": 2.0,
        }
        config = FleetConfig(port=port, device="cam-1", state_dir=str(folder / "state"), **{**fast, **more})
        return FleetSession(
            config,
            apply=self.apply,
            describe=self.describe,
            telemetry=self.snapshot,
            rng=random.Random(1),
        )


def want(version: int, **router: Any) -> dict[str, Any]:
    return {"version": version, "issued_at": NOW, "router": router}


async def reported(spy: Spy, **fields: Any) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        matching = (p for p in spy.payloads("reported") if all(p.get(key) == value for key, value in fields.items()))
        return next(matching, None)

    return await until(found)


async def test_birth_desired_reported_and_goodbye(broker: Broker, spy: Spy, tmp_path: Path) -> None:
    device = Device()
    async with device.session(broker.port, tmp_path) as session:
        first = await reported(spy, state="none")
        assert first["effective"]["router"] == FILE["router"]
        assert first["effective"]["gateway"]["api_keys"] == "***"
        assert first["models"] == [{"variant": "smollm2-135m-int8", "digest": "sha256:00", "rung": 1}]
        spy.publish(TOPIC + "desired", want(1, policy="second"), retain=True)
        applied = await reported(spy, state="applied", version=1)
        assert applied["effective"]["router"] == {"policy": "second", "max_queue": 64}
        assert applied["applied_version"] == 1
        assert session.standing.applied_version == 1
    await until(lambda: len(spy.payloads("status")) == 2)
    birth, goodbye = spy.payloads("status")
    assert (birth["state"], birth["reason"]) == ("online", "birth")
    assert (goodbye["state"], goodbye["reason"]) == ("offline", "goodbye")
    assert birth["birth"] == goodbye["birth"] == 1
    with Spy(broker.port) as late:
        await until(lambda: len(late.seen) == 3)
        assert all(retained for _, _, retained in late.seen)


def _json(tree: dict[str, Any]) -> bytes:
    return json.dumps(tree).encode()


# What is published on top of version n, the version the refusal names (relative to n), and what it says.
REFUSALS: list[tuple[Callable[[int], bytes], int | None, str]] = [
    (lambda _: b"{broken", None, "not valid JSON"),
    (lambda _: b"\x00\xff" * 10, None, "not valid UTF-8"),
    (lambda _: b"[1,2]", None, "not an object"),
    (lambda n: b'{"version": %d, "version": %d}' % (n + 1, n + 1), None, "appears twice"),
    (lambda n: _json({**want(n + 1), "colour": "red"}), 1, "unknown key `colour`"),
    (lambda n: _json(want(n + 1, policy="third")), 1, "unknown policy 'third'"),
    (lambda n: _json(want(n + 1, crash=True)), 1, "internal error while applying: ZeroDivisionError"),
    (lambda n: _json(want(n - 1, max_queue=1)), -1, "is stale"),
    (lambda n: _json(want(n, max_queue=1)), 0, "conflict"),
    (lambda n: _json(want(n + 1, pad="x" * 70_000)), None, "at most 65536"),
    (lambda n: _json({**want(n + 1), "gateway": {"host": "::"}}), 1, "unknown key `gateway`"),
    (lambda n: _json({**want(n + 1), "models": {"store": "/"}}), 1, "`models.store` cannot be set"),
]


async def test_what_cannot_be_obeyed_is_refused_aloud_and_the_old_configuration_stays(
    broker: Broker, spy: Spy, tmp_path: Path
) -> None:
    device = Device()
    async with device.session(broker.port, tmp_path):
        for number, (payload, offset, says) in enumerate(REFUSALS, 1):
            good = 10 * number
            spy.publish(TOPIC + "desired", want(good, policy="second"), retain=True)
            await reported(spy, state="applied", version=good)
            spy.publish(TOPIC + "desired", payload(good), retain=True)
            state = "stale" if says == "is stale" else "refused"
            refusal = await reported(spy, state=state, applied_version=good)
            assert refusal["handled_version"] >= good
            assert says in refusal["reason"]
            assert refusal.get("version") == (good + offset if offset is not None else None)
            assert refusal["effective"]["router"]["policy"] == "second"


async def test_the_last_good_configuration_survives_a_restart_without_a_broker(
    broker: Broker, spy: Spy, tmp_path: Path
) -> None:
    device = Device()
    async with device.session(broker.port, tmp_path):
        spy.publish(TOPIC + "desired", want(3, max_queue=7), retain=True)
        await reported(spy, state="applied", version=3)
        spy.publish(TOPIC + "desired", want(4, policy="third"), retain=True)
        await reported(spy, state="refused", version=4)
    broker.stop(signal.SIGKILL)
    device = Device()
    began_s = time.monotonic()
    async with device.session(broker.port, tmp_path) as session:
        assert device.effective["router"]["max_queue"] == 7
        assert (session.standing.state, session.standing.applied_version) == ("applied", 3)
        assert not session.connected
    assert time.monotonic() - began_s < 10


async def test_the_broker_may_come_later_and_go_and_come_back(broker: Broker, tmp_path: Path) -> None:
    broker.stop()
    device = Device()
    async with device.session(broker.port, tmp_path) as session:
        await asyncio.sleep(0.2)
        assert not session.connected
        for birth_at_least in (1, 2):
            broker.start()
            await until(lambda: session.connected)
            with Spy(broker.port) as spy:
                await until(lambda spy=spy: spy.payloads("status"))
                assert spy.payloads("status")[-1]["state"] == "online"
                assert spy.payloads("status")[-1]["birth"] >= birth_at_least
                await reported(spy, state="none")
            broker.stop(signal.SIGKILL)
            await until(lambda: not session.connected)


async def test_telemetry_waits_on_disk_and_arrives_after_the_broker_is_back(broker: Broker, tmp_path: Path) -> None:
    device = Device()
    quick = {"telemetry_interval_s": 0.05}
    broker.stop()
    async with device.session(broker.port, tmp_path, **quick) as session:
        await until(lambda: session.outbox.pending >= 5)
    broker.start()
    with Spy(broker.port) as spy:
        async with device.session(broker.port, tmp_path, **quick) as session:
            await until(lambda: len(spy.payloads("telemetry")) >= 8)
            keys = [sample["key"] for sample in spy.payloads("telemetry")]
            assert len(set(keys)) == len(keys)
            assert len({key.split(":")[0] for key in keys}) == 2, "samples of both lives"
            assert spy.payloads("telemetry")[0]["snapshot"] == {"load": 0.5, "decisions": {"local": 2}}
            assert any(p is not None and ("key", keys[0]) in p.UserProperty for p in _user_properties(spy))
            assert session.connected


def _user_properties(spy: Spy) -> list[Any]:
    return [p for p in spy.properties if hasattr(p, "UserProperty")]


async def test_telemetry_of_quality_zero_is_sent_when_connected(broker: Broker, spy: Spy, tmp_path: Path) -> None:
    device = Device()
    async with device.session(broker.port, tmp_path, telemetry_qos=0, telemetry_interval_s=0.05) as session:
        await until(lambda: len(spy.payloads("telemetry")) >= 2)
        assert session.outbox.dropped == 0


async def test_commands_are_answered_to_the_own_response_topic_only(broker: Broker, spy: Spy, tmp_path: Path) -> None:
    device = Device()
    async with device.session(broker.port, tmp_path):
        await reported(spy, state="none")
        ask: dict[str, Any] = {"ResponseTopic": TOPIC + "response", "CorrelationData": b"42"}
        spy.publish(
            TOPIC + "command", {"command": "ping"}, **{**ask, "ResponseTopic": "overspill/v1/default/x/desired"}
        )
        spy.publish(TOPIC + "command", {"command": "ping"}, ResponseTopic=TOPIC + "response")
        spy.publish(TOPIC + "command", {"command": "reboot"}, **ask)
        spy.publish(TOPIC + "command", b"garbage", **ask)
        spy.publish(TOPIC + "command", {"command": "ping"}, **ask)
        spy.publish(TOPIC + "command", {"command": "status"}, **ask)
        await until(lambda: len(spy.payloads("response")) == 4)
        unknown, garbage, ping, status = spy.payloads("response")
        assert "unknown command 'reboot'" in unknown["error"]
        assert "not valid JSON" in garbage["error"]
        assert (ping["command"], ping["birth"], ping.get("error")) == ("ping", 1, None)
        assert status["snapshot"]["load"] == 0.5
        assert status["reported"]["effective"]["router"] == FILE["router"]
        assert {bytes(p.CorrelationData) for p in spy.properties if hasattr(p, "MessageExpiryInterval")} >= {b"42"}
        assert not [topic for topic, _, _ in spy.seen if "/x/" in topic]


async def test_a_lost_device_is_announced_and_a_stale_will_is_corrected(
    broker: Broker, spy: Spy, tmp_path: Path
) -> None:
    device = Device()
    async with device.session(broker.port, tmp_path, will_delay_s=0) as session:
        await until(lambda: session.connected)
        stale = {"state": "offline", "birth": 0, "session": "other", "reason": "will"}
        spy.publish(TOPIC + "status", stale, retain=True)
        await until(lambda: spy.payloads("status")[-1]["state"] == "online" and len(spy.payloads("status")) >= 3)
        connection = session._connection
        assert connection is not None
        connection._abort()  # the cable is pulled
        await until(lambda: [s for s in spy.payloads("status") if s["state"] == "offline" and s["birth"] == 1])
        await until(lambda: spy.payloads("status")[-1]["state"] == "online")
        assert spy.payloads("status")[-1]["birth"] == 2


async def test_a_second_agent_of_the_same_name_makes_the_first_stay_away(broker: Broker, tmp_path: Path) -> None:
    async with Device().session(broker.port, tmp_path / "a", takeover_min_s=0.3) as first:
        await until(lambda: first.connected)
        async with Device().session(broker.port, tmp_path / "b", takeover_min_s=0.3) as second:
            await until(lambda: second.connected and not first.connected)
            await until(lambda: first._backoff.takeovers >= 2)
            await until(lambda: second.connected and not first.connected)
            assert second._backoff.takeovers == 0, "the newer one keeps the name"
            assert first._birth <= 4
        await until(lambda: first.connected)  # the other one said goodbye: the name is free


async def test_requests_in_flight_are_not_touched_and_newer_documents_wait_their_turn(
    broker: Broker, spy: Spy, tmp_path: Path
) -> None:
    device = Device()
    gate = asyncio.Event()

    async def slow() -> None:
        await gate.wait()

    device.gate = slow
    async with device.session(broker.port, tmp_path):
        spy.publish(TOPIC + "desired", want(1, max_queue=1), retain=True)
        applying = await reported(spy, state="applying", version=1)
        assert applying["effective"]["router"]["max_queue"] == 64
        for version in range(2, 30):
            spy.publish(TOPIC + "desired", want(version, max_queue=version), retain=True)
        gate.set()
        done = await reported(spy, state="applied", version=29)
        assert done["effective"]["router"]["max_queue"] == 29


async def test_an_apply_that_never_ends_is_refused(broker: Broker, spy: Spy, tmp_path: Path) -> None:
    device = Device()

    async def forever() -> None:
        await asyncio.Event().wait()

    device.gate = forever
    async with device.session(broker.port, tmp_path, apply_timeout_s=0.2):
        spy.publish(TOPIC + "desired", want(1, max_queue=1), retain=True)
        refusal = await reported(spy, state="refused", version=1)
        assert "not in force after 0.2 s" in refusal["reason"]


async def test_nothing_is_opened_when_the_fleet_is_not_enabled(tmp_path: Path) -> None:
    session = Device().session(1, tmp_path, enabled=False)
    async with session:
        await session.report()
    assert not (tmp_path / "state").exists()


async def test_a_broken_sensor_or_description_does_not_silence_the_device(
    broker: Broker, spy: Spy, tmp_path: Path
) -> None:
    device = Device()

    def broken() -> Any:
        raise RuntimeError("sensor on fire")

    device.describe = device.snapshot = broken  # type: ignore[method-assign]
    async with device.session(broker.port, tmp_path, telemetry_interval_s=0.05):
        said = await reported(spy, state="none")
        assert "sensor on fire" in said["effective"]["unknown"]
        await until(lambda: spy.payloads("telemetry"))
        assert "no snapshot" in spy.payloads("telemetry")[0]["snapshot"]["errors"][0]


async def test_who_writes_over_a_status_again_and_again_is_not_answered_each_time() -> None:
    """Another agent of this name, behind a broker that is bridged, would answer each answer."""
    said: list[None] = []
    overwritten = Overwritten(lambda: said.append(None))
    with structlog.testing.capture_logs() as logs:
        for _ in range(200):
            overwritten.note(None)
    assert len(said) == 1
    assert len(logs) == 8
    await until(lambda: len(said) == 2)
    overwritten.close()


@pytest.mark.parametrize(
    ("leaves", "reads"), [(("reported", "status"), False), (("reported",), False), (("reported",), True)]
)
async def test_what_is_cleared_of_a_device_is_back_with_its_next_sample(
    broker: Broker, spy: Spy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: tuple[str, ...], *, reads: bool
) -> None:
    """Its status tells that it was forgotten; a `reported` that it may not read comes back when its hour is over."""
    if leaves == ("reported",) and not reads:
        monkeypatch.setattr("edge_agent.fleet.session._REPORT_AGAIN_S", 0.5)
    device = Device()
    async with device.session(broker.port, tmp_path, telemetry_interval_s=0.1) as session:
        session._watches_report = reads
        await until(lambda: session.connected and spy.payloads("reported"))
        for leaf in leaves:
            spy.publish(TOPIC + leaf, b"", retain=True)

        def bodies() -> list[bytes]:
            return [body for topic, body, _ in spy.seen if topic.endswith("/reported")]

        await until(lambda: b"" in bodies() and bodies()[-1])


@pytest.mark.parametrize("foreign", [b"garbage", b'{"state":"applied","version":7}'])
async def test_a_report_of_somebody_else_is_overwritten_and_its_own_are_not(
    broker: Broker, spy: Spy, tmp_path: Path, foreign: bytes
) -> None:
    def bodies() -> list[bytes]:
        return [body for topic, body, _ in spy.seen if topic.endswith("/reported")]

    device = Device()
    async with device.session(broker.port, tmp_path, telemetry_interval_s=0.1) as session:
        await until(lambda: session.connected and bodies())
        said = len(bodies())
        for _ in range(2):
            spy.publish(TOPIC + "reported", foreign, retain=True)
            await until(lambda: foreign in bodies() and bodies()[-1] != foreign)
            spy.seen.clear()
        await session.report()
        await until(bodies)
        samples = len(spy.payloads("telemetry"))
        await until(lambda: len(spy.payloads("telemetry")) > samples + 5)
        assert said == len(bodies()) == 1


async def test_a_status_that_is_no_text_is_overwritten(broker: Broker, spy: Spy, tmp_path: Path) -> None:
    device = Device()
    async with device.session(broker.port, tmp_path) as session:
        await until(lambda: session.connected and spy.payloads("status"))
        spy.publish(TOPIC + "status", b'{"state":"\xff"}', retain=True)
        await until(lambda: any(b"\xff" in body for _, body, _ in spy.seen))
        await until(lambda: b'"online"' in [body for topic, body, _ in spy.seen if topic == TOPIC + "status"][-1])
