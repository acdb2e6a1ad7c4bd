"""The command: `overspill edge|cloud|fleet|models|explain|replay|simulate …`. Each part is imported when called."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from typing import Any

import typer
import typer.core
import typer.main

from router.base.build import build_of
from router.base.errors import OverspillError
from router.base.extras import EXTRA_OF, install
from router.base.usage_reports import silence_usage_reports

PARTS = {
    "edge": ("edge_agent.cli", "The agent on the device: run it, check its configuration, ask which board it is."),
    "cloud": ("cloud_tier.cli", "The cloud tier: serve models tensor-parallel and continuously batched."),
    "fleet": ("cloud_tier.fleet.cli", "Configure devices over MQTT: set, republish, get, list, watch, forget."),
    "models": (
        "models.cli",
        "The catalogue and the toolchain: pull, list, show, export, quantize, verify, build, prune.",
    ),
    "explain": ("router.decisions.command", "Why a request went where it went, in five lines: by its x-request-id."),
    "replay": ("router.replay.command", "What other policies would have made of the requests of a decision file."),
    "simulate": (
        "router.simulation.cli",
        "Policies side by side: a trace through the live router in a simulated world.",
    ),
}


class _LazyPart(typer.core.TyperGroup):
    """A part that shows its help line without its module, and imports the module to parse arguments."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        module = importlib.import_module(PARTS[str(self.name)][0])
        return typer.main.get_command(module.app).make_context(info_name, args, parent=parent, **extra)


class _Parts(typer.core.TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: _LazyPart(name=name, help=told) for name, (_, told) in PARTS.items()}


app = typer.Typer(
    cls=_Parts,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Answer on the device first; spill over to the cloud when the promise needs it.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"overspill {metadata.version('overspill')} (router {build_of().name})")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Answer on the device first; spill over to the cloud when the promise needs it."""


def main() -> None:
    """Run the command; a known error prints one line and exits with 2, a bug prints its traceback."""
    silence_usage_reports()
    try:
        app()
    except OverspillError as error:
        typer.echo(f"overspill: {error.message}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        extra = EXTRA_OF.get(str(error.name))
        if extra is None:
            raise
        typer.echo(f"overspill: `{error.name}` (extra `{extra}`) is not installed; run: {install(extra)}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
