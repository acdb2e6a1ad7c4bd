"""Many devices on a terminal or as JSON: what `fleet list` prints once and `fleet watch` shows live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from cloud_tier.fleet.operator import Event
from cloud_tier.fleet.table import FoldingTable, Row, said
from cloud_tier.fleet.view import OR_UNREADABLE, DeviceView
from router.base.json_input import UNREADABLE
from router.base.json_output import as_json
from router.fleetwire.documents import BadDocument, Telemetry, decode_as, utc_now
from router.fleetwire.overrides import delta
from router.fleetwire.strict_json import is_deep

STATE_STYLE = {
    "applied": "green",
    "applied-volatile": "yellow",
    "applying": "yellow",
    "waiting": "yellow",
    "stale": "yellow",
    "partial": "red",
    "refused": "red",
    "unreadable": "red",
}
_CONNECTION_STYLE = {"online": "green", "offline": "red", "never": "magenta", "unknown": "yellow"}
_STANDING = (("status", 7), ("desired", 7), ("in force", 8), ("state", 10))
_LOAD = (("load", 5), ("run", 3), ("queue", 5), ("°C", 3), ("MB", 5))
_COUNTED = ("waiting", "applying", "stale", "partial", "applied-volatile", "refused", "unreadable")
_TROUBLE = {"refused", "partial", "stale", "applied-volatile", "unreadable"}


def devices_as_table(views: Iterable[DeviceView]) -> RenderableType:
    """Return one row for each device, and the sum of them."""
    views = list(views)
    rows = [Row([*_standing(view), view.status.at if view.status else ""], _note(view)) for view in views]
    summed = summary(views)
    if any(view.astray for view in views):
        summed += "; `overspill fleet republish` gives the broker back what is in force where it is stale or gone"
    return Group(FoldingTable("device", (*_STANDING, ("since", 24)), rows), Text(summed, style="bold"))


def device_as_json(view: DeviceView) -> dict[str, Any]:
    """Return one row of `fleet list` as plain JSON values."""
    reported, status = view.reported, view.status
    effective = reported.effective if reported is not None else {}
    return {
        "fleet": view.address.fleet,
        "device": view.address.device,
        "status": view.connection,
        "since": status.at if status is not None else None,
        "desired_version": view.desired.version if view.desired is not None else None,
        "applied_version": reported.applied_version if reported is not None else None,
        "state": view.state,
        "astray": view.astray,
        "reason": _note(view),
        "delta": [gap.key for gap in delta(view.desired.overrides, effective)] if view.desired is not None else [],
        "converged": view.converged,
        "agent_version": reported.agent_version if reported is not None else "",
    }


def summary(views: Iterable[DeviceView]) -> str:
    """Return how many devices there are, by connection and by what is not in force."""
    views = list(views)
    connections = Counter(view.connection for view in views)
    states = Counter(view.state for view in views)
    counted = [f"{connections[name]} {name}" for name in ("online", "offline", "unknown") if connections[name]]
    counted += [f"{connections['never']} never seen"] if connections["never"] else []
    counted += [f"{states[name]} {name}" for name in _COUNTED if states[name]]
    return f"{len(views)} device{'' if len(views) == 1 else 's'}: {', '.join(counted) or 'none'}"


def event_as_json(event: Event) -> str:
    """Return one line of JSON; a payload that is no JSON, or nested without end, is given as text."""
    try:
        payload = msgspec.json.decode(event.payload) if event.payload else None
        readable = not is_deep(payload)
    except UNREADABLE:
        readable = False
    if not readable:
        payload = event.payload.decode("utf-8", "replace")
    line = {
        "at": utc_now(),
        "fleet": event.address.fleet,
        "device": event.address.device,
        "leaf": event.leaf,
        "retained": event.retained,
        "payload": payload,
    }
    return as_json(line)


@dataclass(slots=True)
class LiveListing:
    """The live table of `fleet watch`."""

    fleet: str = "default"
    views: dict[str, DeviceView] = field(default_factory=dict)
    samples: dict[str, Telemetry] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        name = event.address.device
        view = self.views.setdefault(name, DeviceView(event.address))
        view.take(event.leaf, event.payload)
        if event.leaf == "telemetry":
            try:
                self.samples[name] = decode_as(event.payload, Telemetry)
            except BadDocument:
                return
        elif not event.payload and not view.kept:  # forgotten
            self.views.pop(name)
            self.samples.pop(name, None)

    def table(self) -> RenderableType:
        """Return the table as it is now: by name, devices with a trouble first."""
        if not self.views:
            return Text(
                f"fleet {self.fleet}: nothing can be read yet: no device ever connected, {OR_UNREADABLE}",
                style="yellow",
            )
        views = sorted(self.views.values(), key=lambda view: (view.state not in _TROUBLE, view.address.device))
        rows = [Row([*_standing(view), *self._load(view.address.device)], _note(view)) for view in views]
        title = Text(f"fleet {self.fleet}, {summary(views)}", style="bold")
        return Group(title, FoldingTable("device", (*_STANDING, *_LOAD), rows, fit=True))

    def _load(self, name: str) -> list[str]:
        sample = self.samples.get(name)
        if sample is None:
            return [""] * len(_LOAD)
        snapshot = sample.snapshot
        rss = snapshot.memory_rss_bytes
        return [
            f"{snapshot.load:.2f}" if snapshot.load is not None else "",
            str(sum(replica.running for replica in snapshot.replicas)),
            str(sum(replica.queued for replica in snapshot.replicas)),
            f"{snapshot.temperature_c:.0f}" if snapshot.temperature_c is not None else "",
            f"{rss / 1e6:.0f}" if rss is not None else "",
        ]


def _standing(view: DeviceView) -> list[str | Text]:
    reported = view.reported
    return [
        view.address.device,
        Text(view.connection, style=_CONNECTION_STYLE[view.connection]),
        str(view.desired.version) if view.desired else "-",
        "-" if reported is None else str(reported.applied_version or "file"),
        said(view.state, STATE_STYLE.get(view.state, "")),
    ]


def _note(view: DeviceView) -> str:
    if view.desired_error:
        return view.desired_error
    if view.reported is None:
        return ""
    why = view.reported.reason if view.state in _TROUBLE else ""
    return "; ".join(dict.fromkeys(part for part in (why, view.reported.privacy_held) if part))
