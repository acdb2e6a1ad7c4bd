"""`overspill fleet set|republish|get|list|watch|forget`: configure devices over MQTT.

Exit codes of `set` and `republish`: 0 applied, 1 refused, 2 wrong use or no broker, 3 no word in time, 4 another
operator was faster, 5 in force and not on the device's disk; of several devices, the worst. `get`, `list` and `forget`
exit with 3 when nothing can be read.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from cloud_tier.fleet.changing import Wanted, change_many, change_one, no_word, with_operator
from cloud_tier.fleet.connection_options import Reach, commands_of
from cloud_tier.fleet.edits import read_edits
from cloud_tier.fleet.listing import LiveListing, device_as_json, devices_as_table, event_as_json
from cloud_tier.fleet.many import NothingSeen, choose, is_pattern, split_words, to_read
from cloud_tier.fleet.operator import Event, FleetOperator, NoAnswer
from cloud_tier.fleet.show import view_as_json, view_as_table
from cloud_tier.fleet.view import OR_UNREADABLE, UNREADABLE, DeviceView
from router.base import timers
from router.base.errors import ConfigError
from router.base.json_output import print_json
from router.fleetwire.documents import Response

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Configure devices over MQTT: set, republish, get, list, watch, forget.",
)
_command = commands_of(app)

_NO_WORD = 3
_LEFT_ALONE = 1
_REDRAW_S = 0.25

Device = Annotated[str, typer.Argument(help="Name of the device.", metavar="DEVICE")]
Patterns = Annotated[
    list[str] | None, typer.Argument(metavar="[DEVICE]...", help="Names, or patterns such as 'cam-*'; all if left out.")
]
Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait for a device's word; 0: do not wait.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List who would get what; publish nothing.")]
Parallel = Annotated[int, typer.Option(min=1, max=1000, help="Documents on their way to the broker at a time.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@_command
def set_(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DEVICE... [KEY=VALUE]...",
            help="Names or patterns ('cam-*'), then TOML values: router.max_queue=32; null removes an override.",
        ),
    ] = None,
    *,
    file: Annotated[Path | None, typer.Option(help="TOML or JSON with tables router, models.")] = None,
    unset: Annotated[list[str] | None, typer.Option(help="Remove an override; may be repeated.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Begin from no overrides instead of merging.")] = False,
    wait: Wait = 10.0,
    everyone: Annotated[bool, typer.Option("--all", help="Every device that was ever seen.")] = False,
    dry_run: DryRun = False,
    parallel: Parallel = 32,
    max_refused: Annotated[
        int | None, typer.Option(min=1, help="Go in waves (--parallel, then doubled); end once so many refused.")
    ] = None,
    as_json: AsJson = False,
    reach: Reach,
) -> None:
    """Change what is desired of a device, or of many, and wait until they say what became of it."""
    devices, assignments = split_words(words or ())
    if everyone == bool(devices):
        raise ConfigError("name devices or --all, not both" if everyone else "name a device, a pattern or --all")
    edits = read_edits(assignments, unset or (), file)
    if not edits and not replace:
        raise ConfigError("nothing to set; write key=value, --unset KEY, --file FILE or --replace")
    options = {"parallel": parallel, "max_refused": max_refused}
    wanted = Wanted(edits, replace=replace, wait_s=wait, dry_run=dry_run, as_json=as_json, options=options)
    if len(devices) == 1 and not is_pattern(devices[0]) and not dry_run:
        change_one(reach, devices[0], wanted)
    change_many(reach, devices or ["*"], wanted)


@_command
def republish(
    devices: Annotated[
        list[str] | None, typer.Argument(metavar="[DEVICE]...", help="Names, or patterns such as 'cam-*'.")
    ] = None,
    *,
    everyone: Annotated[bool, typer.Option("--all", help="Every device that was ever seen.")] = False,
    wait: Wait = 10.0,
    dry_run: DryRun = False,
    parallel: Parallel = 32,
    as_json: AsJson = False,
    reach: Reach,
) -> None:
    """Give the broker back what it lost: publish what is in force on devices whose document is stale or gone."""
    if everyone == bool(devices):
        raise ConfigError("name devices or --all, not both" if everyone else "name a device, a pattern or --all")
    options = {"parallel": parallel}
    wanted = Wanted(wait_s=wait, dry_run=dry_run, as_json=as_json, astray_only=True, options=options)
    change_many(reach, devices or ["*"], wanted)


@_command
def get(
    device: Device,
    *,
    live: Annotated[bool, typer.Option("--live", help="Ask the device itself, too.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show all that is in force, not only overrides.")] = False,
    wait: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the live answer.")] = 5.0,
    as_json: AsJson = False,
    reach: Reach,
) -> None:
    """Show a device: status, what is desired against what is in force."""

    async def look(operator: FleetOperator) -> tuple[DeviceView, Response | None, str]:
        view = await operator.view(device)
        if not live or not view.seen:
            return view, None, ""
        try:
            return view, await operator.ask(device, "status", wait), ""
        except NoAnswer as error:
            return view, None, error.message

    view, answer, missing = asyncio.run(with_operator(reach, look))
    if as_json:
        print_json(view_as_json(view, answer))
    else:
        Console().print(view_as_table(view, answer, everything=everything))
    if missing:
        no_word(missing)
    if not view.seen:
        no_word(f"{device} was never seen: {UNREADABLE}")


@_command
def list_(
    patterns: Patterns = None,
    *,
    with_delta: Annotated[bool, typer.Option("--delta", help="Only where what is desired is not in force.")] = False,
    as_json: AsJson = False,
    reach: Reach,
) -> None:
    """List devices: status, versions, what became of the last change."""
    words = patterns or ["*"]

    async def look(operator: FleetOperator) -> list[DeviceView]:
        async with operator.survey(to_read(reach.fleet, words)) as survey:
            return [survey.view(name) for name in choose(survey.views, words, unseen=True)]

    try:
        views = asyncio.run(with_operator(reach, look))
    except NothingSeen as error:
        views = []
        message = error.message
    else:
        message = f"no such device was ever seen in the fleet {reach.fleet}, {OR_UNREADABLE}"
    known = [view for view in views if view.kept]
    shown = [view for view in known if not (with_delta and view.converged)]
    if as_json:
        print_json([device_as_json(view) for view in shown])
    elif known:
        Console().print(devices_as_table(shown))
    if len(known) < max(len(views), 1):
        missing = ", ".join(view.address.device for view in views if not view.kept)
        no_word(f"{missing}: {message}" if missing else message)


@_command
def watch(
    device: Annotated[
        str | None, typer.Argument(help="One device or a pattern; all of the fleet if left out.", metavar="[DEVICE]")
    ] = None,
    *,
    everyone: Annotated[bool, typer.Option("--all", help="All devices of the fleet (the default).")] = False,
    duration: Annotated[float | None, typer.Option(min=0, help="Stop after so many seconds.")] = None,
    as_json: AsJson = False,
    reach: Reach,
) -> None:
    """Follow the fleet live: a table, or one JSON line for each message. Ends with Ctrl-C."""
    if device is not None and everyone:
        raise ConfigError("name a device or --all, not both")

    async def follow(operator: FleetOperator) -> None:
        watching = _watch_json(operator, device) if as_json else _watch_table(operator, device)
        try:
            await asyncio.wait_for(watching, duration)
        except asyncio.TimeoutError:
            return

    try:
        asyncio.run(with_operator(reach, follow))
    except KeyboardInterrupt:
        raise typer.Exit from None


@_command
def forget(
    devices: Annotated[list[str], typer.Argument(metavar="DEVICE...", help="Names, or patterns such as 'cam-*'.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also devices that are online.")] = False,
    as_json: AsJson = False,
    reach: Reach,
) -> None:
    """Clear all that the broker keeps about a device: status, reported, and the desired document that waits for it."""

    async def clear(operator: FleetOperator) -> int:
        async with operator.survey(to_read(reach.fleet, devices)) as survey:
            views = [survey.view(name) for name in choose(survey.views, devices, unseen=True)]
            if not yes and any(view.kept for view in views):
                _confirm(views)
                await survey.settled(operator.settle_s)  # it may have come back meanwhile
            done = [await _forget(operator, view, force=force) for view in views]
        if as_json:
            print_json([row for _, row in done])
        else:
            for code, row in done:
                typer.echo(f"{row['device']}: {row['reason']}", err=code == _LEFT_ALONE)
        return max(code for code, _ in done)

    try:
        raise typer.Exit(asyncio.run(with_operator(reach, clear)))
    except NothingSeen as error:
        no_word(error.message)


def _confirm(views: list[DeviceView]) -> None:
    Console().print(devices_as_table(views))
    if not sys.stdin.isatty():
        raise ConfigError("nobody is there to confirm this; add --yes")
    typer.confirm("Forget them? What they have in force stays; the broker keeps nothing about them", abort=True)


async def _forget(operator: FleetOperator, view: DeviceView, *, force: bool) -> tuple[int, dict[str, Any]]:
    """Clear what is kept about a device; returns its exit code and what to say."""
    kept = list(view.kept)

    def row(said: str, *, forgotten: bool) -> dict[str, Any]:
        return {
            "device": view.address.device,
            "forgotten": forgotten,
            "cleared": kept if forgotten else [],
            "reason": said,
        }

    if not kept and not force:
        return _NO_WORD, row(UNREADABLE, forgotten=False)
    if view.online and not force:
        said = "it is online, so it was not forgotten; --force does it all the same"
        return _LEFT_ALONE, row(said, forgotten=False)
    came_back = "; it is online and announces itself again" if view.online else ""
    await operator.forget(view)
    return 0, row(f"forgotten ({', '.join(kept) or 'whatever was there'}){came_back}", forgotten=True)


async def _watch_json(operator: FleetOperator, device: str | None) -> None:
    async for event in _events(operator, device):
        typer.echo(event_as_json(event))


async def _watch_table(operator: FleetOperator, device: str | None) -> None:
    listing = LiveListing(operator.fleet)
    with Live(get_renderable=listing.table, auto_refresh=False) as live:

        async def draw() -> None:
            while True:
                live.refresh()
                await asyncio.sleep(_REDRAW_S)

        drawing = asyncio.create_task(draw(), name="fleet-draw")
        try:
            async for event in _events(operator, device):
                listing.take(event)
        finally:
            await timers.end(drawing)


async def _events(operator: FleetOperator, word: str | None) -> AsyncGenerator[Event, None]:
    everyone = word is None or is_pattern(word)
    async with aclosing(operator.watch(None if everyone else word)) as events:
        async for event in events:
            if word is None or word == event.address.device or fnmatchcase(event.address.device, word):
                yield event
