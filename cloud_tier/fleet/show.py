"""How a fleet looks on a terminal: one device side by side, many devices as a live table, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cloud_tier.fleet.operator import DeviceView, Event
from router.wire.fleet import OVERRIDABLE, BadDocument, Response, Telemetry, decode_as, utc_now
from router.wire.overrides import delta, leaves

_STATE_STYLE = {"applied": "green", "refused": "red", "applying": "yellow", "none": "dim"}


def view_as_json(view: DeviceView, live: Response | None = None) -> dict[str, Any]:
    """Return everything known about a device as plain JSON values."""
    return {
        "fleet": view.address.fleet,
        "device": view.address.device,
        "status": msgspec.to_builtins(view.status),
        "desired": msgspec.to_builtins(view.desired),
        "desired_error": view.desired_error or None,
        "reported": msgspec.to_builtins(view.reported),
        "delta": [{"key": gap.key, "desired": gap.desired, "reported": gap.reported} for gap in delta(*_both(view))],
        "live": msgspec.to_builtins(live),
    }


def view_as_table(view: DeviceView, live: Response | None = None) -> RenderableType:
    """Return desired and reported side by side, below the status."""
    desired, effective = _both(view)
    table = Table(title=f"{view.address.fleet} / {view.address.device}", title_justify="left")
    table.add_column("key")
    table.add_column(f"desired (version {view.desired.version if view.desired else '-'})")
    version = view.reported.applied_version if view.reported else None
    table.add_column(f"reported (version {version or 'file only'})" if view.reported else "reported (never)")
    settable = {name: effective[name] for name in OVERRIDABLE if name in effective}  # all of it: --json
    wanted, have = dict(leaves(desired)), dict(leaves(settable))
    for key in sorted({*wanted, *have}):
        differs = key in wanted and wanted[key] != have.get(key)
        table.add_row(key, _shown(wanted, key), Text(_shown(have, key), style="red" if differs else ""))
    return Group(_status_line(view), _outcome_line(view), *_extra_lines(view, live), table)


def _both(view: DeviceView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    desired = view.desired.overrides if view.desired is not None else {}
    return desired, view.reported.effective if view.reported is not None else {}


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key], ensure_ascii=False) if key in flat else ""


def _status_line(view: DeviceView) -> Text:
    if view.status is None:
        return Text("status: never connected", style="yellow")
    style = "green" if view.online else "red"
    words = f"status: {view.status.state} ({view.status.reason}) since {view.status.at}, birth {view.status.birth}"
    return Text(words, style=style)


def _outcome_line(view: DeviceView) -> Text:
    reported = view.reported
    if view.desired_error:
        return Text(f"desired: cannot be read: {view.desired_error}", style="red")
    if reported is None:
        return Text("reported: nothing yet", style="yellow")
    text = f"reported: version {reported.version or '-'} {reported.state}"
    if reported.reason:
        text += f": {reported.reason}"
    return Text(text, style=_STATE_STYLE.get(reported.state, ""))


def _extra_lines(view: DeviceView, live: Response | None) -> list[Text]:
    lines = []
    if view.reported is not None and view.reported.models:
        lines += [Text(f"model: {m.variant} ({m.state}) {m.digest[:19]}", style="dim") for m in view.reported.models]
    if live is not None:
        lines.append(Text(f"live: {json.dumps(msgspec.to_builtins(live.snapshot), ensure_ascii=False)}", style="cyan"))
    return lines


def event_as_json(event: Event) -> str:
    """Return one line of JSON; a payload that is no JSON is given as text."""
    try:
        payload = msgspec.json.decode(event.payload) if event.payload else None
    except msgspec.DecodeError:
        payload = event.payload.decode("utf-8", "replace")
    line = {
        "at": utc_now(),
        "fleet": event.address.fleet,
        "device": event.address.device,
        "leaf": event.leaf,
        "retained": event.retained,
        "payload": payload,
    }
    return json.dumps(line, ensure_ascii=False)


@dataclass(slots=True)
class Board:
    """The live table of `fleet watch`."""

    views: dict[str, DeviceView] = field(default_factory=dict)
    samples: dict[str, Telemetry] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        name = event.address.device
        if event.leaf == "telemetry":
            try:
                self.samples[name] = decode_as(event.payload, Telemetry)
            except BadDocument:
                return
        self.views.setdefault(name, DeviceView(event.address)).take(event.leaf, event.payload)

    def table(self) -> Table:
        table = Table(title="fleet", title_justify="left")
        for column in ("device", "status", "desired", "in force", "state", "load", "running", "queued", "°C", "RSS MB"):
            table.add_column(column, no_wrap=True)
        table.add_column("reason", no_wrap=True, overflow="ellipsis")
        for name in sorted(self.views):
            table.add_row(*self._row(name, self.views[name]))
        return table

    def _row(self, name: str, view: DeviceView) -> list[RenderableType]:
        reported, sample = view.reported, self.samples.get(name)
        snapshot = sample.snapshot if sample is not None else None
        state = reported.state if reported is not None else "none"
        status = view.status.state if view.status is not None else "unknown"
        rss = snapshot.memory_rss_bytes if snapshot is not None else None
        return [
            name,
            Text(status, style="green" if view.online else "red"),
            str(view.desired.version) if view.desired else "unreadable" if view.desired_error else "-",
            str(reported.applied_version) if reported and reported.applied_version else "file",
            Text(state, style=_STATE_STYLE.get(state, "")),
            f"{snapshot.load:.2f}" if snapshot is not None and snapshot.load is not None else "",
            str(sum(r.running for r in snapshot.replicas)) if snapshot is not None else "",
            str(sum(r.queued for r in snapshot.replicas)) if snapshot is not None else "",
            f"{snapshot.temperature_c:.0f}" if snapshot is not None and snapshot.temperature_c is not None else "",
            f"{rss / 1e6:.0f}" if rss is not None else "",
            reported.reason if reported is not None else "",
        ]
