"""What an operator of a thousand devices sees of one change: a screen, not a thousand lines."""

from __future__ import annotations

import datetime as dt
import io

from rich.console import Console, RenderableType

from cloud_tier.fleet.many import Change
from cloud_tier.fleet.summary import changes_as_table, plan_as_table
from cloud_tier.fleet.view import DeviceView, Outcome, Proposal
from router.fleetwire.documents import DesiredConfig
from router.fleetwire.topics import Address

SILENT = "no word within 10 s: the device is online and says nothing; its log may tell why"


def lines(renderable: RenderableType) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=False).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def changed(number: int, version: int, outcome: Outcome | None, max_queue: int = 8) -> Change:
    desired = DesiredConfig(
        version=version, issued_at=dt.datetime(2026, 3, 1, tzinfo=dt.timezone.utc), router={"max_queue": max_queue}
    )
    view = DeviceView(Address("default", f"cam-{number:04}"))
    return Change(view, Proposal(desired, True, view), outcome)


def test_devices_that_say_the_same_share_a_row_with_their_names() -> None:
    silent = [changed(number, 1, Outcome("timeout", SILENT)) for number in range(50)]
    refused = [changed(number, number % 3, Outcome("refused", "no room")) for number in range(50, 70)]
    kept = [changed(number, 1, Outcome("unpublished", "not begun: 5 devices had refused")) for number in range(70, 970)]
    applied = [changed(number, 1, Outcome("applied", "")) for number in range(970, 1000)]
    shown = lines(changes_as_table([*silent, *refused, *kept, *applied]))
    assert len(shown) < 40
    assert [line.split() for line in shown if " devices " in line and line[0].isdigit() and "," not in line] == [
        ["50", "devices", "never", "1", "no", "word"],
        ["20", "devices", "never", "*", "refused"],
        ["900", "devices", "never", "1", "not", "sent"],
    ]
    text = " ".join(line.strip() for line in shown)
    assert all(f"cam-{number:04}" in text for number in range(120))
    assert (SILENT in text, "cam-0120" in text, "… and 850 more: --json has all" in text) == (True, False, True)
    assert shown[-1] == "1000 devices: 900 not sent, 50 no word, 30 applied, 20 refused"


def test_one_that_says_something_else_keeps_its_row() -> None:
    silent = [changed(number, 1, Outcome("timeout", SILENT)) for number in range(40)]
    shown = lines(changes_as_table([*silent, changed(77, 1, Outcome("refused", "no room"))]))
    assert any(line.split() == ["cam-0077", "never", "1", "refused"] for line in shown)


def test_a_dry_run_shows_the_same_change_once() -> None:
    plan = [changed(number, number, None, max_queue=8 if number % 2 else 9) for number in range(1000)]
    shown = lines(plan_as_table(plan))
    assert len(shown) < 40
    assert sum("router.max_queue: the file's value →" in line for line in shown) == 2
    assert shown[-1] == "1000 of 1000 devices would get a new document; nothing was published"
