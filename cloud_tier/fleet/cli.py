"""`overspill fleet set|get|watch`: configure devices over MQTT.

Exit codes of `set`: 0 applied, 1 refused, 2 wrong use or no broker, 3 no word in time, 4 another operator was faster.
"""

from __future__ import annotations

import asyncio
import getpass
import inspect
import json
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from cloud_tier.fleet.broker import BrokerAddress, parse_broker
from cloud_tier.fleet.edits import read_edits
from cloud_tier.fleet.operator import DeviceView, FleetOperator, Outcome, Proposal
from cloud_tier.fleet.show import Board, event_as_json, view_as_json, view_as_table
from router.errors import ConfigError
from router.wire.fleet import Response

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Configure devices over MQTT: set, get, watch.",
)

T = TypeVar("T")

_EXIT = {"applied": 0, "refused": 1, "timeout": 3, "conflict": 4, "superseded": 4}

Device = Annotated[str, typer.Argument(help="Name of the device.", metavar="DEVICE")]
Broker = Annotated[str, typer.Option(envvar="OVERSPILL_FLEET_BROKER", help="host:port or mqtts://host:port.")]
Fleet = Annotated[str, typer.Option(envvar="OVERSPILL_FLEET_NAME", help="Name of the fleet.")]
Tls = Annotated[bool, typer.Option("--tls", envvar="OVERSPILL_FLEET_TLS", help="Use TLS (port 8883 by default).")]
CaFile = Annotated[
    Path | None, typer.Option("--ca", envvar="OVERSPILL_FLEET_CA", help="PEM of the broker's authority.")
]
CertFile = Annotated[Path | None, typer.Option("--cert", envvar="OVERSPILL_FLEET_CERT", help="PEM, own certificate.")]
KeyFile = Annotated[Path | None, typer.Option("--key", envvar="OVERSPILL_FLEET_KEY", help="PEM, own private key.")]
Username = Annotated[str | None, typer.Option(envvar="OVERSPILL_FLEET_USERNAME", help="Login at the broker.")]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        envvar="OVERSPILL_FLEET_PASSWORD_FILE", help="First line is the password (or OVERSPILL_FLEET_PASSWORD)."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Reach:
    """Whom a command speaks to."""

    broker: BrokerAddress
    fleet: str


def _reach(
    *,
    broker: Broker = "127.0.0.1:1883",
    fleet: Fleet = "default",
    tls: Tls = False,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    username: Username = None,
    password_file: PasswordFile = None,
) -> Reach:
    """The options that every command takes."""
    host, port, secure = parse_broker(broker, tls=tls or any((ca_file, cert_file, key_file)))
    password = os.environ.get("OVERSPILL_FLEET_PASSWORD") or None
    if password_file is not None:
        try:
            password = password_file.read_text(encoding="utf-8").splitlines()[0]
        except (OSError, UnicodeDecodeError, IndexError) as error:
            raise ConfigError(f"cannot read a password from {password_file}: {error}", param="password_file") from error
    if password is not None and username is None:
        raise ConfigError("a password needs a --username", param="username")
    return Reach(BrokerAddress(host, port, secure, ca_file, cert_file, key_file, username, password), fleet)


def _command(act: Callable[..., None]) -> Callable[..., None]:
    """Make `act` a command that takes the options of `_reach` after its own; what they amount to is its `reach`."""
    own = inspect.signature(act, eval_str=True)
    common = inspect.signature(_reach, eval_str=True).parameters

    def run(**given: Any) -> None:
        reach = _reach(**{name: given.pop(name) for name in common})
        act(**given, reach=reach)

    listed = [parameter for name, parameter in own.parameters.items() if name != "reach"] + list(common.values())
    run.__signature__ = own.replace(parameters=listed)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in listed}
    app.command(name=act.__name__.rstrip("_"), help=act.__doc__)(run)
    return act


@_command
def set_(
    device: Device,
    assignments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="TOML values: router.max_queue=32; null removes an override."),
    ] = None,
    *,
    file: Annotated[Path | None, typer.Option(help="TOML or JSON with tables router, models.")] = None,
    unset: Annotated[list[str] | None, typer.Option(help="Remove an override; may be repeated.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Begin from no overrides instead of merging.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the device's word; 0: do not wait.")] = 10.0,
    as_json: AsJson = False,
    reach: Reach,
) -> None:
    """Change what is desired of a device, and wait until it says what became of it."""
    edits = read_edits(assignments or (), unset or (), file)
    if not edits and not replace:
        raise ConfigError("nothing to set; write key=value, --unset KEY, --file FILE or --replace")

    async def change(operator: FleetOperator) -> tuple[Proposal, Outcome | None]:
        proposal = await operator.propose(device, edits, replace=replace, issued_by=_whoami())
        return proposal, await operator.outcome(device, proposal.desired, wait) if wait > 0 else None

    proposal, outcome = asyncio.run(_with_operator(reach, change))
    if as_json:
        typer.echo(json.dumps(_change_as_json(device, proposal, outcome), ensure_ascii=False))
    else:
        typer.echo(_change_as_text(device, proposal, outcome))
    raise typer.Exit(_EXIT[outcome.kind] if outcome is not None else 0)


@_command
def get(
    device: Device,
    *,
    live: Annotated[bool, typer.Option("--live", help="Ask the device itself, too.")] = False,
    wait: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the live answer.")] = 5.0,
    as_json: AsJson = False,
    reach: Reach,
) -> None:
    """Show desired, reported and status of a device side by side."""

    async def look(operator: FleetOperator) -> tuple[DeviceView, Response | None]:
        view = await operator.view(device)
        return view, await operator.ask(device, "status", wait) if live else None

    view, answer = asyncio.run(_with_operator(reach, look))
    if as_json:
        typer.echo(json.dumps(view_as_json(view, answer), ensure_ascii=False, indent=2))
    else:
        Console().print(view_as_table(view, answer))


@_command
def watch(
    device: Annotated[
        str | None, typer.Argument(help="One device; all of the fleet if left out.", metavar="[DEVICE]")
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
        asyncio.run(_with_operator(reach, follow))
    except KeyboardInterrupt:
        raise typer.Exit from None


async def _watch_json(operator: FleetOperator, device: str | None) -> None:
    async for event in operator.watch(device):
        typer.echo(event_as_json(event))


async def _watch_table(operator: FleetOperator, device: str | None) -> None:
    board = Board()
    with Live(board.table(), auto_refresh=True, refresh_per_second=4) as live:
        async for event in operator.watch(device):
            board.take(event)
            live.update(board.table())


async def _with_operator(reach: Reach, work: Callable[[FleetOperator], Awaitable[T]]) -> T:
    async with FleetOperator(reach.broker, reach.fleet) as operator:
        return await work(operator)


def _whoami() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return socket.gethostname()


def _change_as_text(device: str, proposal: Proposal, outcome: Outcome | None) -> str:
    version = proposal.desired.version
    lead = f"{device}: version {version}" + ("" if proposal.published else " (desired already, nothing published)")
    if outcome is None:
        return f"{lead} published"
    if outcome.kind == "applied":
        return f"{lead} applied"
    if outcome.kind == "timeout":
        return f"{lead}{' published' if proposal.published else ''}; {outcome.reason}"
    hint = "; run the command again" if outcome.kind in {"conflict", "superseded"} else ""
    return f"{lead} {outcome.kind}: {outcome.reason}{hint}"


def _change_as_json(device: str, proposal: Proposal, outcome: Outcome | None) -> dict[str, Any]:
    return {
        "device": device,
        "version": proposal.desired.version,
        "published": proposal.published,
        "desired": msgspec.to_builtins(proposal.desired),
        "outcome": outcome.kind if outcome is not None else None,
        "reason": outcome.reason if outcome is not None else None,
        "key": outcome.key if outcome is not None else None,
        "reported": msgspec.to_builtins(outcome.reported) if outcome is not None else None,
    }
