"""What `overspill fleet` prints at 80 columns can be read, and copied from."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from cloud_tier.fleet.listing import LiveListing, devices_as_table
from cloud_tier.fleet.operator import Event
from cloud_tier.fleet.show import view_as_table
from cloud_tier.fleet.view import DeviceView
from edge_agent.config import EdgeConfig
from router.fleetwire.documents import (
    DesiredConfig,
    Reported,
    Response,
    Snapshot,
    Status,
    Telemetry,
    decode_desired,
    encode,
)
from router.fleetwire.topics import Address, Leaf

LONG = "building-7-floor-3-camera-12-north-east-corner-behind-the-door"
REASON = "`router.policy` = 'bad': unknown policy; " + "known policies: local-first, cloud-first; " * 4
DESIRED = b'{"version": 8, "issued_at": "2026-03-01T00:00:00Z", "router": {"policy": "bad", "max_queue": 3}}'
ONLINE = Status(state="online", birth=3, session="s", reason="birth", at="2026-03-01T00:00:00Z")
EFFECTIVE: dict[str, Any] = msgspec.to_builtins(EdgeConfig())
REFUSED = Reported(state="refused", version=8, reason=REASON, applied_version=7, overrides={"router": {"max_queue": 3}})


def shown(renderable: RenderableType, width: int = 80, *, height: int | None = None) -> str:
    out = io.StringIO()
    terminal = Console(file=out, width=width, height=height, force_terminal=height is not None, color_system=None)
    terminal.print(renderable)
    assert all(len(line) <= width for line in out.getvalue().splitlines())
    return out.getvalue()


def squeezed(text: str) -> str:
    """Without what folding puts in."""
    return "".join(text.split())


def view(name: str, reported: Reported | None = REFUSED, status: Status | None = ONLINE) -> DeviceView:
    desired: DesiredConfig | None = decode_desired(DESIRED)
    return DeviceView(Address("site", name), desired=desired, reported=reported, status=status)


def board(*names: str) -> LiveListing:
    board = LiveListing("site")
    snapshot = Snapshot(load=1.25, temperature_c=61.4, memory_rss_bytes=312_000_000)
    sample = Telemetry(key="k", at="", uptime_s=1, birth=3, snapshot=snapshot)
    for name in names:
        reported = REFUSED if name == "picky" else Reported(state="applied", version=8, applied_version=8)
        payloads: list[tuple[Leaf, bytes]] = [("desired", DESIRED), ("status", encode(ONLINE))]
        payloads += [("reported", encode(reported)), ("telemetry", encode(sample))]
        for leaf, payload in payloads:
            board.take(Event(Address("site", name), leaf, payload, retained=True))
    return board


@pytest.mark.parametrize("width", [80, 120])
def test_a_refusal_takes_no_room_from_the_columns_of_watch(width: int) -> None:
    text = shown(board("cam-1", "picky").table(), width)
    assert "fleet site, 2 devices: 2 online, 1 refused" in text
    lines = [line.split() for line in text.splitlines() if not line.startswith(" ")]
    assert lines[1] == ["device", "status", "desired", "in", "force", "state", "load", "run", "queue", "°C", "MB"]
    assert ["cam-1", "online", "8", "8", "applied", "1.25", "0", "0", "61", "312"] in lines
    assert lines[2] == ["picky", "online", "8", "7", "refused", "1.25", "0", "0", "61", "312"], "trouble comes first"
    assert squeezed(REASON) in squeezed(text)


def test_a_long_name_folds_and_is_never_cut() -> None:
    text = shown(board(LONG).table())
    name = "".join(line.split(" ")[0] for line in text.splitlines()[2:])
    assert name == LONG
    assert "online" in text
    assert LONG in shown(board(LONG).table(), 140)
    listed = shown(devices_as_table([view(LONG), view("cam-l", None, None)]))
    assert "2 devices: 1 online, 1 never seen, 1 waiting, 1 refused" in listed
    assert "2026-03-01T00:00:00Z" in listed


def test_a_small_terminal_says_how_many_devices_it_leaves_out() -> None:
    text = shown(board("picky", *(f"cam-{number:02}" for number in range(40))).table(), height=24)
    assert len(text.splitlines()) <= 24
    assert "picky" in text
    assert "more; name some" in text


def test_an_empty_fleet_may_also_be_one_that_cannot_be_read() -> None:
    assert "or the access list does not let you read" in shown(LiveListing("site").table(), 200)


def test_a_forgotten_device_leaves_the_board() -> None:
    watched = board("cam-1", "cam-2")
    for leaf in ("desired", "reported", "status"):
        watched.take(Event(Address("site", "cam-1"), leaf, b"", retained=False))
    assert set(watched.views) == {"cam-2"}


def test_get_shows_the_overrides_first_and_all_only_on_demand() -> None:
    some = view("cam-1", msgspec.structs.replace(REFUSED, effective={**EFFECTIVE, "router": {"policy": "good"}}))
    text = shown(view_as_table(some))
    assert "desired (version 8)" in text
    assert "in force (version 7)" in text
    assert '"bad"' in text
    assert '"good"' in text
    assert "overload_answer_tokens" not in text
    assert len(text.splitlines()) < 16
    none = DeviceView(Address("site", "cam-1"), reported=Reported(state="none", effective=EFFECTIVE), status=ONLINE)
    assert "overrides: none; the device's own file is in force" in shown(view_as_table(none))


def test_get_never_cuts_a_key_or_a_value() -> None:
    effective = {**EFFECTIVE, "models": {**EFFECTIVE["models"], "variants": [f"variant-{n}-int8" for n in range(9)]}}
    text = shown(view_as_table(view("cam-1", Reported(state="applied", effective=effective)), everything=True))
    words = text.split()
    for table, values in effective.items():
        for key in values:
            assert any(word.startswith(f"{table}.{key}") for word in words), key
    assert "…" not in text
    assert squeezed('"variant-8-int8"]') in squeezed(text)


def test_what_devices_say_is_no_markup() -> None:
    named = view("cam-1", Reported(state="refused", version=8, reason="[red]not[/] a [tag]", effective={}))
    assert "[red]not[/] a [tag]" in shown(view_as_table(named))
    assert "[red]not[/] a [tag]" in shown(devices_as_table([named]))


def test_the_word_of_a_live_device_is_readable() -> None:
    snapshot = Snapshot(load=0.5, memory_available_bytes=2_000_000_000, decisions={"context": 7}, errors=("disk full",))
    answer = Response(command="status", birth=3, at="2026-03-01T00:00:00Z", snapshot=snapshot)
    text = shown(view_as_table(view("cam-1"), answer))
    assert "{" not in text
    for said in ("0.50", "2000 MB", "decided context", "disk full", "birth 3"):
        assert said in text
