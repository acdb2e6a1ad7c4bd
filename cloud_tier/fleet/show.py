"""How one device looks on a terminal: where it stands, its overrides, all that is in force, and its own word."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cloud_tier.fleet.listing import STATE_STYLE
from cloud_tier.fleet.table import as_text, said
from cloud_tier.fleet.view import UNREADABLE, DeviceView
from router.fleetwire.documents import Response
from router.fleetwire.overrides import delta, leaves

_MAX_KEY = 48
_ABSENT = "-"


def view_as_json(view: DeviceView, live: Response | None = None) -> dict[str, Any]:
    """Return everything known about a device as plain JSON values."""
    desired = view.desired.overrides if view.desired is not None else {}
    return {
        "fleet": view.address.fleet,
        "device": view.address.device,
        "status": msgspec.to_builtins(view.status),
        "desired": msgspec.to_builtins(view.desired),
        "desired_error": view.desired_error or None,
        "reported": msgspec.to_builtins(view.reported),
        "delta": [
            {"key": gap.key, "desired": gap.desired, "reported": gap.reported}
            for gap in delta(desired, _effective(view))
        ],
        "live": msgspec.to_builtins(live),
    }


def view_as_table(view: DeviceView, live: Response | None = None, *, everything: bool = False) -> RenderableType:
    """Return the status and the overrides, then whatever else was asked for."""
    shown: list[RenderableType] = [Text(f"{view.address.fleet} / {view.address.device}", style="bold")]
    shown += [_status_line(view), *_desired_lines(view), *_reported_lines(view)]
    if view.seen or view.desired is not None:
        shown.append(_overrides(view))
    if everything:
        shown.append(_in_force(view))
    if live is not None:
        shown.append(live_as_table(live))
    return Group(*shown)


def live_as_table(live: Response) -> RenderableType:
    """Return what a device answered to `status`."""
    lines = list(_live_lines(live))
    return Group(Text("live, the device's own word", style="bold"), _table(("what", "now"), lines))


def _effective(view: DeviceView) -> Mapping[str, Any]:
    return view.reported.effective if view.reported is not None else {}


def _overrides(view: DeviceView) -> RenderableType:
    """Return desired against in force, for every key that either of them overrides."""
    reported = view.reported
    desired = dict(leaves(view.desired.overrides)) if view.desired is not None else {}
    applied = dict(leaves(reported.overrides)) if reported is not None else {}
    have = dict(leaves(_effective(view)))
    if not desired and not applied:
        return Text("overrides: none; the device's own file is in force", style="dim")
    version = reported.applied_version if reported is not None else None
    wanted = f"desired (version {view.desired.version})" if view.desired is not None else "desired (none)"
    titles = ("override", wanted, f"in force (version {version})" if version else "in force (the file)")
    rows = []
    for key in sorted({*desired, *applied}):
        differs = key in desired and desired[key] != have.get(key)
        # A key that is no longer desired goes back to the file's value once the device has read so.
        cells = (_shown(desired, key), _shown(have, key))
        rows.append((key, cells[0], said(cells[1], "red" if differs else "")))
    return _table(titles, rows)


def _in_force(view: DeviceView) -> RenderableType:
    overridden = dict(leaves(view.reported.overrides)) if view.reported is not None else {}
    have = dict(leaves(_effective(view)))
    rows = [(key, _shown(have, key), "fleet" if key in overridden else "file") for key in sorted(have)]
    return _table(("key", "in force", "from"), rows) if rows else Text("in force: unknown", style="yellow")


def _table(titles: tuple[str, ...], rows: Sequence[tuple[str | Text, ...]]) -> Table:
    """Return a table whose keys stay whole and whose values fold: everything can be read and copied at 80 columns."""
    keys = max((len(row[0]) for row in rows), default=0)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column(titles[0], overflow="fold", min_width=min(keys, _MAX_KEY))
    for title in titles[1:]:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(as_text, row))
    return table


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key], ensure_ascii=False) if key in flat else _ABSENT


def _status_line(view: DeviceView) -> Text:
    if not view.seen:
        return Text(f"status: {UNREADABLE}", style="yellow")
    if view.status is None:
        return Text("status: unknown, although the device has reported", style="yellow")
    style = "green" if view.online else "red"
    words = f"status: {view.status.state} ({view.status.reason}) since {view.status.at}, birth {view.status.birth}"
    return said(words, style)


def _desired_lines(view: DeviceView) -> list[Text]:
    if view.desired_error:
        return [said(f"desired: cannot be read: {view.desired_error}", "red")]
    if view.desired is None:
        return []
    by = f" by {view.desired.issued_by}" if view.desired.issued_by else ""
    at = view.desired.issued_at.isoformat(timespec="seconds")
    return [said(f"desired: version {view.desired.version}{by}, {at}")]


def _reported_lines(view: DeviceView) -> list[Text]:
    reported = view.reported
    if reported is None:
        return [Text("reported: nothing yet", style="yellow")] if view.seen else []
    text = f"reported: version {reported.version or _ABSENT} {reported.state}"
    if reported.reason:
        text += f": {reported.reason}"
    lines = [said(text, STATE_STYLE.get(reported.state, ""))]
    if reported.privacy_held:
        lines.append(said(f"privacy: every request stays on the device: {reported.privacy_held}", "red"))
    lines += [said(f"model: {m.variant} ({m.state}) {m.digest[:19]}", "dim") for m in reported.models]
    return lines


def _live_lines(live: Response) -> Iterator[tuple[str | Text, ...]]:
    yield "answered", f"{live.at or _ABSENT}, birth {live.birth}"
    if live.error:
        yield "error", said(live.error, "red")
    if live.reported is not None:
        version = live.reported.applied_version
        yield "in force", f"version {version}" if version else "the file alone"
    snapshot = live.snapshot
    if snapshot is None:
        return
    if snapshot.load is not None:
        yield "load", f"{snapshot.load:.2f}"
    for replica in snapshot.replicas:
        state = "" if replica.available else ", not available"
        yield f"replica {replica.replica_id}", f"{replica.running} running, {replica.queued} queued{state}"
    for name, value, unit in (
        ("temperature", snapshot.temperature_c, "°C"),
        ("memory of the agent", _megabytes(snapshot.memory_rss_bytes), "MB"),
        ("memory left", _megabytes(snapshot.memory_available_bytes), "MB"),
    ):
        if value is not None:
            yield name, f"{value:.0f} {unit}"
    for reason, count in sorted(snapshot.decisions.items()):
        yield f"decided {reason}", str(count)
    for error in snapshot.errors:
        yield "wrong now", said(error, "red")


def _megabytes(size_bytes: int | None) -> float | None:
    return size_bytes / 1e6 if size_bytes is not None else None
