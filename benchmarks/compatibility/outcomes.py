"""What came out: checks of a client against a server, kept as JSON; a part that is run again replaces its own rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

Outcome = Literal["pass", "fail", "not run"]


class Check(msgspec.Struct, frozen=True):
    """One thing that a user needs of a client.

    Attributes:
        reason: of a failure, what the client said; of what was not run, why.
    """

    check: str
    outcome: Outcome
    reason: str = ""
    took_s: float = 0.0


class Run(msgspec.Struct, frozen=True):
    """All checks of one client against one server.

    Attributes:
        measured: the day, as 2026-11-22.
        commit: of this project, with a `+` where files differed from it.
        versions: of the client's packages and programs.
        server_version: what the server is.
    """

    client: str
    server: str
    measured: str
    commit: str
    versions: dict[str, str]
    server_version: str
    checks: list[Check]


class Results(msgspec.Struct, frozen=True):
    """The file `benchmarks/results/compatibility.json`."""

    machine: dict[str, str]
    runs: list[Run]


def load(path: Path) -> list[Run]:
    """Return the runs that a file holds; none where it does not exist."""
    return msgspec.json.decode(path.read_bytes(), type=Results).runs if path.exists() else []


def save(path: Path, runs: Sequence[Run], machine: dict[str, str]) -> None:
    """Write all runs, in the order of the servers within the clients."""
    told = msgspec.to_builtins(Results(machine, list(runs)))
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    staged.replace(path)


def merged(before: Iterable[Run], now: Iterable[Run], clients: Sequence[str], servers: Sequence[str]) -> list[Run]:
    """Return the runs of before with those of now over them, in the order of the registry; what it lacks is dropped."""
    by_place = {(run.client, run.server): run for run in (*before, *now)}
    return [by_place[client, server] for client in clients for server in servers if (client, server) in by_place]
