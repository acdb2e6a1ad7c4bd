"""`overspill replay LOG --policy P`: what another policy would have made of the requests of a log."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from router.base.config import load
from router.base.errors import ConfigError
from router.base.json_output import print_json
from router.policy.registry import POLICIES, load_policy
from router.replay.compare import NOTE, Figures, about, logged, replayed, table
from router.replay.log import Log, read_log
from router.replay.world import Replay, build
from router.simulation.run import Result, simulate
from router.values.settings import RouterSettings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class _Tier(msgspec.Struct, frozen=True):
    """What a replay takes of a tier's configuration."""

    router: RouterSettings = RouterSettings()


def _policies(incomplete: str) -> list[str]:
    return [name for name in POLICIES if name.startswith(incomplete)]


@app.command()
def replay(
    path: Annotated[Path, typer.Argument(metavar="LOG", help="A decision file; its older files are read with it.")],
    *,
    policy: Annotated[
        str, typer.Option("--policy", "-p", metavar="P[,Q]", help="Policies to try.", autocompletion=_policies)
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="The tier's TOML file, for its `router` table.", show_default="defaults"),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=100, help="Simulations of each policy.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate the requests of a log, as they came, under other policies, and compare with what was logged.

    The policy that decided is replayed as well: how near that comes to the log says how far the rest can be trusted.
    """
    names = [name.strip() for name in policy.split(",") if name.strip()]
    if not names:
        raise ConfigError("--policy names none; give one or more, separated by commas")
    for name in names:
        load_policy(name)
    log = read_log(path)
    settings = load(config, _Tier).router if config is not None else _settings_of(log)
    built = build(log)
    own = log.policies()[0]
    results = _simulate(built, [name for name in dict.fromkeys([own, *names]) if name in POLICIES], settings, seeds)
    if as_json:
        print_json(_as_json(built, results))
        return
    for line in about(built):
        typer.echo(line)
    if own not in POLICIES:
        typer.echo(f"the policy that decided, {own}, is not known here: nothing tells how near a replay comes")
    if config is None:
        typer.echo("the router's other settings are the defaults; --config takes those of the tier")
    columns = [(f"logged: {own}", logged(log)), *((name, replayed(found)) for name, found in results.items())]
    for line in ("", *table(columns), "", *NOTE):
        typer.echo(line)


def _simulate(built: Replay, names: list[str], settings: RouterSettings, seeds: int) -> dict[str, list[Result]]:
    results: dict[str, list[Result]] = {}
    with Console(stderr=True).status("") as status:
        for name in names:
            under = msgspec.structs.replace(settings, policy=name)
            for seed in range(seeds):
                status.update(f"replaying {len(built.requests):,} requests: {name}, seed {seed + 1} of {seeds}")
                results.setdefault(name, []).append(simulate(built.world, built.requests, under, seed=seed))
    return results


def _settings_of(log: Log) -> RouterSettings:
    """Return the defaults, with what the log tells of the tier's own."""
    found = RouterSettings()
    if log.default_ttft_s is None:
        return found
    return msgspec.structs.replace(found, ttft_slo_ms=log.default_ttft_s * 1e3)


def _as_json(built: Replay, results: dict[str, list[Result]]) -> dict[str, Any]:
    return {
        "logged": {"policies": built.log.policies(), **_plain(logged(built.log))},
        "replayed": {name: _plain(replayed(found)) for name, found in results.items()},
        "speeds": {name: asdict(speed) for name, speed in built.speeds.items()},
        "world": msgspec.to_builtins(built.world),
        "lengths": {"drawn": built.lengths.drawn, "beyond": built.lengths.beyond},
        "note": list(NOTE),
    }


def _plain(figures: Figures) -> dict[str, Any]:
    """Return figures as JSON knows them: it has no word for what there is none of but null."""
    return {name: None if value != value else value for name, value in asdict(figures).items()}  # noqa: PLR0124 - NaN
