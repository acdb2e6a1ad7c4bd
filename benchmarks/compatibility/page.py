"""`docs/compatibility.md`: the results as a table, what fails and why, and what peers pass and we do not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.compatibility.outcomes import Check, Run
from benchmarks.compatibility.registry import Client
from benchmarks.compatibility.servers import Kind

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REASONS = Path(__file__).resolve().parent / "reasons.toml"
_MARKS = {"pass": "✓", "fail": "✗", "not run": "–"}
_TOLD_CHARS = 200

HEAD = """\
# Compatibility: which clients work, unmodified, against which servers

Written by `make compatibility`; edit nothing here. `make compatibility CLIENTS="langchain litellm" SERVERS="edge"`
runs a part and replaces its rows; other makers' servers are named by `OVERSPILL_LIVE_VLLM`, `OVERSPILL_LIVE_VLLM_MODEL`
and `OVERSPILL_LIVE_TRITON`, as for the live tests. Each check is a function in `benchmarks/compatibility/clients/`,
asserts what a user needs of the reply, and runs in an environment of its own with the client as it was published. The
model is SmolLM2-135M-Instruct. With times, commits and whole messages: `benchmarks/results/compatibility.json`.

✓ passes · ✗ fails · – not run; the number leads to what was said. Empty: that server does not speak the protocol.
*Peers* are what ours are measured against.
"""


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a check fails on our side and is left so."""

    client: str
    check: str
    servers: tuple[str, ...]
    why: str


class _Reasons(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One check on one server, and our reason where it has one."""

    client: str
    server: str
    check: Check
    why: str = ""


def reasons(path: Path = REASONS) -> dict[tuple[str, str, str], str]:
    """Return the accepted reasons by client, check and server."""
    told = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Reasons).reasons
    return {(one.client, one.check, server): one.why for one in told for server in one.servers}


def cells(runs: Sequence[Run], why: dict[tuple[str, str, str], str]) -> dict[tuple[str, str, str], Cell]:
    """Return every cell of the table by client, check and server."""
    return {
        (run.client, check.check, run.server): Cell(
            run.client, run.server, check, why.get((run.client, check.check, run.server), "")
        )
        for run in runs
        for check in run.checks
    }


def regressions(found: dict[tuple[str, str, str], Cell], kinds: Sequence[Kind]) -> list[Cell]:
    """Return what a peer passes and one of ours fails without a reason of ours."""
    peers = [kind.name for kind in kinds if kind.peer]
    passed = {(cell.client, name) for (_, name, server), cell in found.items() if server in peers and _passes(cell)}
    return [
        cell
        for (client, name, server), cell in found.items()
        if server not in peers and cell.check.outcome == "fail" and not cell.why and (client, name) in passed
    ]


def stale(found: dict[tuple[str, str, str], Cell], why: dict[tuple[str, str, str], str]) -> list[str]:
    """Return the reasons for what does not fail any more."""
    return [" · ".join(place) for place in why if place in found and _passes(found[place])]


def _passes(cell: Cell) -> bool:
    return cell.check.outcome == "pass"


class Page:
    """The page of some runs; `text()` writes it."""

    def __init__(self, runs: Sequence[Run], clients: Sequence[Client], kinds: Sequence[Kind]) -> None:
        self._runs = {(run.client, run.server): run for run in runs}
        self._clients = [client for client in clients if any(run.client == client.name for run in runs)]
        self._kinds = [kind for kind in kinds if any(run.server == kind.name for run in runs)]
        self._cells = cells(runs, reasons())
        self._notes: dict[str, int] = {}

    def text(self) -> str:
        tables = [line for client in self._clients for line in self._table(client)]
        lost = regressions(self._cells, self._kinds)
        parts = [HEAD, *self._servers(), *self._summary(), *tables, "## Notes", ""]
        parts += [f"{number}. {note}" for note, number in self._notes.items()] or ["None."]
        parts += ["", "## What a peer passes and we fail without a reason", ""]
        parts += [f"- {line}" for line in lines_of(lost)] or ["Nothing."]
        return "\n".join(parts) + "\n"

    def _servers(self) -> list[str]:
        lines = ["| server | what | measured |", "|---|---|---|"]
        for kind in self._kinds:
            runs = [run for (_, server), run in self._runs.items() if server == kind.name]
            versions = ", ".join(sorted({run.server_version for run in runs}))
            days = sorted({run.measured for run in runs})
            peer = " (peer)" if kind.peer else ""
            lines.append(f"| {kind.title}{peer} | {versions} | {' to '.join(sorted({days[0], days[-1]}))} |")
        return [*lines, ""]

    def _summary(self) -> list[str]:
        lines = ["## Passed of run", "", self._header("client"), self._rule()]
        for client in self._clients:
            row = [client.title]
            for kind in self._kinds:
                run = self._runs.get((client.name, kind.name))
                counted = [check for check in run.checks if check.outcome != "not run"] if run else []
                passed = sum(check.outcome == "pass" for check in counted)
                row.append(f"{passed} / {len(counted)}" if counted else "–" if run else "")
            lines.append(f"| {' | '.join(row)} |")
        return [*lines, ""]

    def _table(self, client: Client) -> list[str]:
        runs = [run for (name, _), run in self._runs.items() if name == client.name]
        versions = ", ".join(sorted({f"{name} {version}" for run in runs for name, version in run.versions.items()}))
        names = list(dict.fromkeys(check.check for run in runs for check in run.checks))
        lines = [f"## {client.title}", "", *([versions, ""] if versions else []), self._header("check"), self._rule()]
        for name in names:
            row = [self._shown(self._cells.get((client.name, name, kind.name))) for kind in self._kinds]
            lines.append(f"| {_plain(name)} | {' | '.join(row)} |")
        return [*lines, ""]

    def _header(self, first: str) -> str:
        return f"| {first} | {' | '.join(kind.title for kind in self._kinds)} |"

    def _rule(self) -> str:
        return "|---|" + ":-:|" * len(self._kinds)

    def _shown(self, cell: Cell | None) -> str:
        if cell is None:
            return ""
        mark = _MARKS[cell.check.outcome]
        said = _plain(cell.check.reason[:_TOLD_CHARS])
        note = f"**{cell.why}** {said}" if cell.why else said
        if cell.check.outcome == "pass" or not note:
            return mark
        return f"{mark} {self._notes.setdefault(note, len(self._notes) + 1)}"


def lines_of(lost: Sequence[Cell]) -> list[str]:
    """Return a line for each cell."""
    return [f"{cell.server}: {cell.client}: {_plain(cell.check.check)}" for cell in lost]


def _plain(text: str) -> str:
    """Return text that a table of Markdown shows as it is."""
    for mark in ("\\", "|", "<", ">", "*", "_", "`", "[", "]"):
        text = text.replace(mark, "&lt;" if mark == "<" else "\\" + mark)
    return text
