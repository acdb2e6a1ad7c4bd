"""One change carried out for a command of `overspill fleet`: for one device or many, with progress and an exit code."""

from __future__ import annotations

import asyncio
import getpass
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console

from cloud_tier.fleet.connection_options import Reach
from cloud_tier.fleet.many import ManyChanges, NothingSeen, choose, to_read
from cloud_tier.fleet.operator import FleetOperator
from cloud_tier.fleet.summary import (
    EXIT,
    change_as_json,
    change_as_text,
    changes_as_json,
    changes_as_table,
    counted,
    exit_code,
    plan_as_json,
    plan_as_table,
)
from cloud_tier.fleet.view import Outcome, Proposal
from router.base import timers
from router.base.json_output import print_json

T = TypeVar("T")

_NO_WORD = 3
_INTERRUPTED = 130
_REDRAW_S = 0.25


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an operator asked for.

    Attributes:
        edits: see `edits.read_edits`.
        astray_only: leave out devices whose document the broker still keeps.
        options: of `ManyChanges`.
    """

    edits: Mapping[str, Any] = field(default_factory=dict)
    replace: bool = False
    wait_s: float = 10.0
    dry_run: bool = False
    as_json: bool = False
    astray_only: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def change_one(reach: Reach, device: str, wanted: Wanted) -> None:
    """Change one device, say what became of it and exit; a device that is not there is waited for."""
    begun: list[Proposal] = []

    async def change(operator: FleetOperator) -> Outcome | None:
        proposal = await operator.propose(
            device, wanted.edits, replace=wanted.replace, issued_by=_whoami(), begins=begun.append
        )
        return await operator.outcome(device, proposal.desired, wanted.wait_s) if wanted.wait_s > 0 else None

    outcome, interrupted = None, False
    try:
        outcome = asyncio.run(with_operator(reach, change))
    except KeyboardInterrupt:
        interrupted = True
    proposal = begun[0] if begun else None
    if wanted.as_json:
        typer.echo(json.dumps(change_as_json(device, proposal, outcome), ensure_ascii=False))
    elif proposal is None:
        typer.echo(f"{device}: interrupted before anything was published")
    else:
        until = f"; interrupted before its word: `overspill fleet get {device}` tells it" if interrupted else ""
        typer.echo(f"{change_as_text(device, proposal, outcome)}{until}")
    if interrupted:
        raise typer.Exit(_INTERRUPTED)
    raise typer.Exit(EXIT[outcome.kind] if outcome is not None else 0)


def change_many(reach: Reach, words: list[str], wanted: Wanted) -> None:
    """Change every device that `words` mean, print the table and exit."""
    begun: list[ManyChanges] = []

    async def change(operator: FleetOperator) -> None:
        async with operator.survey(to_read(reach.fleet, words)) as survey:
            devices = choose(survey.views, words)
            if wanted.astray_only:
                devices = [device for device in devices if survey.view(device).astray]
            many = ManyChanges(
                survey,
                devices,
                wanted.edits,
                replace=wanted.replace,
                issued_by=_whoami(),
                wait_s=wanted.wait_s,
                **wanted.options,
            )
            begun.append(many)
            if wanted.dry_run:
                many.plan()
            else:
                await _with_progress(many.run(operator), many)

    interrupted = False
    try:
        asyncio.run(with_operator(reach, change))
    except NothingSeen as error:
        no_word(error.message)
    except KeyboardInterrupt:
        interrupted = True
    changes = begun[0].changes if begun else []
    if wanted.as_json:
        told = plan_as_json(changes) if wanted.dry_run else changes_as_json(changes)
        print_json(told)
    else:
        Console().print(plan_as_table(changes) if wanted.dry_run else changes_as_table(changes))
    raise typer.Exit(_INTERRUPTED if interrupted else exit_code(changes))


async def _with_progress(work: Awaitable[None], many: ManyChanges) -> None:
    """Say on a terminal how far it is; nothing where no person looks."""
    console = Console(stderr=True)
    if not console.is_terminal:
        await work
        return
    with console.status("") as status:

        async def tell() -> None:
            while True:
                settled = [change for change in many.changes if change.outcome is not None]
                status.update(f"of {len(many.changes)}: {counted(settled)}" if settled else "waiting for the first")
                await asyncio.sleep(_REDRAW_S)

        telling = asyncio.create_task(tell(), name="fleet-progress")
        try:
            await work
        finally:
            await timers.end(telling)


def no_word(message: str) -> NoReturn:
    """Say why nothing can be said, and exit."""
    typer.echo(f"overspill: {message}", err=True)
    raise typer.Exit(_NO_WORD)


async def with_operator(reach: Reach, work: Callable[[FleetOperator], Awaitable[T]]) -> T:
    """Connect, and let `work` do the rest."""
    async with FleetOperator(reach.broker, reach.fleet) as operator:
        return await work(operator)


def _whoami() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return socket.gethostname()
