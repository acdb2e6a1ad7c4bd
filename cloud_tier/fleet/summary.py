"""What became of a change, for one device and for many: as words, as a table, as JSON, as an exit code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from cloud_tier.fleet.many import Change
from cloud_tier.fleet.table import LIST_EACH, FoldingTable, Row, in_groups, said
from cloud_tier.fleet.view import Outcome, Proposal
from router.base.terminal import plain
from router.fleetwire.overrides import leaves

EXIT = {"applied": 0, "refused": 1, "unpublished": 2, "timeout": 3, "conflict": 4, "superseded": 4, "volatile": 5}
_WORST_FIRST = (1, 2, 4, 5, 3)
_NAMES = {"timeout": "no word", "unpublished": "not sent", None: "published"}
_STYLE = {"applied": "green", "unchanged": "green", "refused": "red", "not sent": "red", "published": ""}


def exit_code(changes: Sequence[Change]) -> int:
    """Return the exit code of one command that changed many devices: of what went wrong, the worst."""
    codes = {EXIT[change.outcome.kind] for change in changes if change.outcome is not None}
    return next((code for code in _WORST_FIRST if code in codes), 0)


def change_as_text(device: str, proposal: Proposal, outcome: Outcome | None) -> str:
    """Return one line about one device."""
    version = proposal.desired.version
    lead = f"{device}: version {version}" + ("" if proposal.fresh else " (desired already, nothing published)")
    if outcome is None:
        return f"{lead} published"
    if outcome.kind == "applied":
        return f"{lead} applied"
    if outcome.kind == "timeout":
        return f"{lead}{' published' if proposal.fresh else ''}; {plain(outcome.reason)}"
    return f"{lead} {outcome.kind}: {_reason(outcome)}"


def change_as_json(device: str, proposal: Proposal | None, outcome: Outcome | None) -> dict[str, Any]:
    """Return what became of one device's change as plain JSON values."""
    return {
        "device": device,
        "version": proposal.desired.version if proposal is not None else None,
        "published": proposal is not None and proposal.fresh and (outcome is None or outcome.kind != "unpublished"),
        "desired": msgspec.to_builtins(proposal.desired) if proposal is not None else None,
        "outcome": outcome.kind if outcome is not None else None,
        "reason": outcome.reason if outcome is not None else None,
        "key": outcome.key if outcome is not None else None,
        "reported": msgspec.to_builtins(outcome.reported) if outcome is not None else None,
    }


def counted(changes: Sequence[Change]) -> str:
    """Return how many devices came to what."""
    counts = Counter(map(_word, changes))
    words = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    return f"{len(changes)} device{'' if len(changes) == 1 else 's'}: {words or 'nothing to do'}"


def changes_as_table(changes: Sequence[Change]) -> RenderableType:
    """Return a few devices each, of many the failures by name and reason, those alike together; and the sum."""
    fine = {"applied", "unchanged", "published"}
    shown = [change for change in changes if len(changes) <= LIST_EACH or _word(change) not in fine]
    rows = []
    for change in shown:
        version = str(change.proposal.desired.version) if change.proposal is not None else "-"
        word = _word(change)
        cells = (change.device, change.view.connection, version, Text(word, style=_STYLE.get(word, "yellow")))
        rows.append(Row(cells, _reason(change.outcome) if change.outcome is not None else ""))
    table = [FoldingTable("device", (("status", 7), ("version", 8), ("outcome", 10)), in_groups(rows))] if rows else []
    return Group(*table, Text(counted(changes), style="bold"))


def changes_as_json(changes: Sequence[Change]) -> dict[str, Any]:
    """Return what became of every device, and the sum."""
    return {
        "outcomes": dict(Counter(map(_word, changes))),
        "devices": [change_as_json(change.device, change.proposal, change.outcome) for change in changes],
    }


def plan_as_table(changes: Sequence[Change]) -> RenderableType:
    """Return who would be touched, and what would change there."""
    rows = []
    for change in changes:
        version = f"{change.proposal.desired.version}" if change.proposal is not None and change.proposal.fresh else "-"
        edits = [f"{edit['key']}: {_json(edit['from'])} → {_json(edit['to'])}" for edit in _edits(change)]
        failed = said(change.outcome.reason, "red") if change.outcome is not None else None
        quiet = "nothing is published: it is desired already" if version == "-" else "the same again"
        rows.append(Row((change.device, change.view.connection, version), failed or "\n".join(edits) or quiet))
    touched = sum(change.proposal is not None and change.proposal.fresh for change in changes)
    touch = f"{touched} of {len(changes)} devices would get a new document; nothing was published"
    return Group(FoldingTable("device", (("status", 7), ("version", 8)), in_groups(rows)), Text(touch, style="bold"))


def plan_as_json(changes: Sequence[Change]) -> dict[str, Any]:
    """Return who would be touched, and what would change there, as plain JSON values."""
    devices = [
        {
            "device": change.device,
            "status": change.view.connection,
            "version": change.proposal.desired.version if change.proposal is not None else None,
            "would_publish": change.proposal is not None and change.proposal.fresh,
            "edits": _edits(change),
            "reason": change.outcome.reason if change.outcome is not None else None,
        }
        for change in changes
    ]
    return {"dry_run": True, "devices": devices}


def _edits(change: Change) -> list[dict[str, Any]]:
    if change.proposal is None:
        return []
    before, after = dict(leaves(change.view.base)), dict(leaves(change.proposal.desired.overrides))
    keys = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
    return [{"key": key, "from": before.get(key), "to": after.get(key)} for key in keys]


def _json(value: object) -> str:
    return "the file's value" if value is None else json.dumps(value, ensure_ascii=False)


def _reason(outcome: Outcome) -> str:
    hint = "; run the command again" if outcome.kind in {"conflict", "superseded"} else ""
    return f"{plain(outcome.reason)}{hint}"


def _word(change: Change) -> str:
    kind = change.outcome.kind if change.outcome is not None else None
    fresh = change.proposal is not None and change.proposal.fresh
    if not fresh and kind in {"applied", None}:
        return "unchanged"
    if kind == "timeout" and change.view.seen and not change.view.online:
        return "waiting"
    return _NAMES.get(kind, str(kind))
