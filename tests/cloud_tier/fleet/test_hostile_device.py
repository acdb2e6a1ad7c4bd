"""A device that says what no device should: it costs the operator the row of that device, and no other's."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from typing import Literal

import pytest
from rich.console import Console, RenderableType

from cloud_tier.fleet.listing import LiveListing, device_as_json, devices_as_table, event_as_json
from cloud_tier.fleet.operator import Event
from cloud_tier.fleet.show import view_as_json, view_as_table
from cloud_tier.fleet.summary import change_as_text
from cloud_tier.fleet.view import DeviceView, Outcome, Proposal
from router.base.json_output import as_json
from router.fleetwire.documents import decode_desired
from router.fleetwire.topics import Address, Leaf
from tests.support.fleet_devices import PREFIX, fleet
from tests.support.fleet_rig import Broker, Spy

OBEYED = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\r\x7f"
"""What a terminal obeys: a title, an empty screen, a colour, letters backwards."""
ONLINE = b'{"state":"online","birth":1,"session":"s"}'
DEEP = b'{"a":' * 900 + b"1" + b"}" * 900
GARBAGE: tuple[bytes, ...] = (
    b"\x00",
    b"\xff\xfe",
    b'{"state":"\xff","birth":1,"session":"s"}',
    b'{"state":"applied","reason":"\xff"}',
    b'{"state":"applied","overrides":%b}' % DEEP,
    b'{"state":"applied","effective":{"a":%b}}' % DEEP,
    b'{"state":"applied","effective":' + b"[" * 100_000,
    b'{"state":"applied","version":' + b"9" * 4300 + b"}",
    b'{"key":"k","at":"","uptime_s":1,"birth":1,"snapshot":{"memory_rss_bytes":' + b"9" * 400 + b"}}",
    b'{"key":"k","at":"","uptime_s":1,"birth":1,"snapshot":{"replicas":[{"replica_id":"\xff"}]}}',
    b"[" * 900 + b"]" * 900,
)
LEAVES: tuple[Leaf, ...] = ("desired", "reported", "status", "telemetry")


def shown(renderable: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=False).print(renderable)
    return out.getvalue()


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("payload", GARBAGE, ids=[f"garbage-{number}" for number in range(len(GARBAGE))])
def test_garbage_of_one_device_leaves_the_others_in_the_listing(leaf: Leaf, payload: bytes) -> None:
    board = LiveListing("site")
    for name, said in (("bad", payload), ("fine", ONLINE)):
        event = Event(Address("site", name), leaf if name == "bad" else "status", said, retained=True)
        board.take(event)
        json.loads(event_as_json(event))
    assert "fine" in shown(board.table())
    views = list(board.views.values())
    assert "fine" in shown(devices_as_table(views))
    as_json([device_as_json(view) for view in views])
    for view in views:
        shown(view_as_table(view, everything=True))
        as_json(view_as_json(view))


def test_no_terminal_obeys_a_device() -> None:
    told = {"state": "refused", "version": 1, "reason": OBEYED, "privacy_held": OBEYED, "overrides": {OBEYED: OBEYED}}
    models = [{"variant": OBEYED, "digest": OBEYED, "state": OBEYED}]
    view = DeviceView(Address("site", "cam-1"))
    view.take("reported", json.dumps({**told, "models": models, "effective": {OBEYED: 1}}).encode())
    view.take(
        "status", json.dumps({"state": "online", "birth": 1, "session": "s", "at": OBEYED, "reason": OBEYED}).encode()
    )
    view.take("desired", json.dumps({"version": 1, "issued_at": "2026-03-01T00:00:00Z", OBEYED: 1}).encode())
    desired = decode_desired(b'{"version": 1, "issued_at": "2026-03-01T00:00:00Z"}')
    event = Event(view.address, "telemetry", OBEYED.encode(), retained=False)
    said = [
        shown(view_as_table(view, everything=True)),
        shown(devices_as_table([view])),
        as_json(view_as_json(view), indent=2),
        as_json(device_as_json(view)),
        event_as_json(event),
        *(change_as_text("cam-1", Proposal(desired, fresh=True, view=view), Outcome(kind, OBEYED)) for kind in KINDS),
    ]
    for text in said:
        assert "evil" in text, "it is shown"
        assert not {*text} & {*OBEYED.replace("evil", "")} - {*"]0;owned[2J31m"}, "and does nothing"


KINDS: tuple[Literal["refused", "timeout"], ...] = ("refused", "timeout")


@pytest.fixture
def spy(broker: Broker) -> Iterator[Spy]:
    with Spy(broker.port) as client:
        yield client


@pytest.mark.broker
async def test_the_tools_of_an_operator_outlive_a_hostile_device(broker: Broker, spy: Spy) -> None:
    for number, payload in enumerate(GARBAGE):
        for leaf in LEAVES:
            spy.publish(f"{PREFIX}/bad-{number}/{leaf}", payload, retain=True)
    spy.publish(f"{PREFIX}/huge/reported", b"x" * (2 * 1024 * 1024), retain=True)
    spy.publish(f"{PREFIX}/fine/status", ONLINE, retain=True)
    commands = (
        ("list",),
        ("list", "--json"),
        ("watch", "--duration", "1"),
        ("watch", "--duration", "1", "--json"),
        ("get", "bad-3", "--all"),
        ("set", "--all", "router.max_queue=5", "--dry-run"),
    )
    told = await asyncio.gather(*(fleet(broker, *command) for command in commands))
    for command, (_, output) in zip(commands, told, strict=True):
        assert "Traceback" not in output, command
        assert "Exception" not in output, command
        assert "fine" in output or "get" in command, command
