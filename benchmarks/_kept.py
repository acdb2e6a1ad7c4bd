"""What a run that measured a part leaves of the results before it: each figure has the stamp of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Result = dict[str, Any]

ROWS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "batches": {"online": ("engine", "batch"), "p95_ratio": (), "slack": ("engine", "load"), "killed": ("engine",)},
    "engine_quality": {"rows": ("dtype",)},
    "router_decision": {"rows": ("policy", "candidates", "running")},
    "structured": {},
    "tenants": {},
}
"""Benchmarks whose options choose a part, and what tells the rows of their lists apart. A part that is not named here
is measured whole or not at all. Where figures count beside each other in one run, as in `gateway`, nothing is kept."""
_STAMP = ("measured", "machine", "commit")


def merged(name: str, before: Any, now: Result) -> Result:
    """Return the result of a partial run with what it did not measure, as it was `before`.

    What stays and was measured on another day, machine or commit holds those as its `stamp`.
    """
    if name not in ROWS or not isinstance(before, dict):
        return now
    was, new = before.get("result", before), now.get("result", now)
    if not isinstance(was, dict) or not isinstance(new, dict):
        return now
    own = {field: before[field] for field in _STAMP if field in before}
    stamp = {} if own == {field: now[field] for field in _STAMP if field in now} else own
    found: Result = {}
    for part in dict.fromkeys((*was, *new)):
        if part in _STAMP:
            found[part] = new.get(part)
        elif part not in new:
            found[part] = _stamped(was[part], stamp)
        elif part in was and part in ROWS[name]:
            found[part] = _joined(was[part], new[part], ROWS[name][part], stamp)
        else:
            found[part] = new[part]
    return {**now, "result": found} if "result" in now else {field: value for field, value in found.items() if value}


def _joined(was: Any, new: Any, keys: tuple[str, ...], stamp: Result) -> Any:
    """Return the new rows, or entries of an object, each in the place of the one that it replaces."""
    if isinstance(new, dict):
        return {**was, **new}
    of_key = {tuple(row[key] for key in keys): row for row in new}
    rows = [of_key.pop(tuple(row.get(key) for key in keys), None) or _stamped(row, stamp) for row in was]
    return [*rows, *of_key.values()]


def _stamped(part: Any, stamp: Result) -> Any:
    """Return a part that was not measured again with its stamp, where it can hold one and has none yet."""
    if isinstance(part, list):
        return [_stamped(row, stamp) for row in part]
    return {**part, "stamp": part.get("stamp", stamp)} if isinstance(part, dict) and stamp else part
