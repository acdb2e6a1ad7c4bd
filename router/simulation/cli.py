"""`overspill simulate`: policies side by side in a simulated world, with the dispatcher that serves live."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import progress as bars
from rich.console import Console

from router.base.errors import ConfigError
from router.base.host import usable_cores
from router.policy.registry import POLICIES
from router.simulation.experiment import Cell, Experiment, begin_worker, cells_of, runs_of
from router.simulation.mixes import MIXES
from router.simulation.show import as_json, as_tables
from router.simulation.traces import SHIPPED
from router.simulation.world import find_world

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_MAX_SEEDS = 1000

WorldArgument = Annotated[str, typer.Argument(metavar="WORLD", help="A WORLD.toml, or `two_tiers`, which is shipped.")]
TraceOption = Annotated[
    str, typer.Option("--trace", help=f"A file of requests, or one that is shipped: {', '.join(SHIPPED)}.")
]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", help="Policies, comma-separated; `all` for all.", show_default="the world's")
]
LoadOption = Annotated[str, typer.Option("--load", help="Loads, comma-separated; 1 keeps all devices just busy.")]
SeedsOption = Annotated[int, typer.Option("--seeds", min=1, max=_MAX_SEEDS, help="Runs of each cell.")]
RequestsOption = Annotated[int, typer.Option("--requests", "-n", min=2, help="Requests of each run.")]
MixOption = Annotated[str, typer.Option("--mix", help=f"What callers ask for: {', '.join(MIXES)}.")]
PromptOption = Annotated[
    float | None, typer.Option("--prompt-tokens", min=1, help="Scale prompts to this mean.", show_default="as they are")
]
BoundOption = Annotated[
    bool, typer.Option("--bound", help="Solve the upper bound, and tell shares of it (extra `simulate`).")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="A folder for plots and one HTML page (extra `simulate`).")
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="A file for all figures; `-` prints them instead.")]
JobsOption = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes.", show_default="all cores")]


@app.command()
def simulate(  # noqa: PLR0917 (typer turns parameters into options)
    world: WorldArgument,
    trace: TraceOption = "azure-conv",
    policy: PolicyOption = None,
    load: LoadOption = "0.5,0.9,1.2,2,5",
    seeds: SeedsOption = 5,
    requests: RequestsOption = 1000,
    mix: MixOption = "proportional",
    prompt_tokens: PromptOption = None,
    *,
    bound: BoundOption = False,
    out: OutOption = None,
    json_file: JsonOption = None,
    jobs: JobsOption = None,
) -> None:
    """Run a trace of requests through the live dispatcher, in a simulated world, under each policy."""
    found = find_world(world)
    experiment = Experiment(
        world=found,
        trace=trace,
        mix=mix,
        policies=_policies(policy, found.router.policy),
        loads=_loads(load),
        seeds=seeds,
        requests=requests,
        prompt_tokens=prompt_tokens,
        bound=bound,
        cache=None if out is None else out / "bounds",
    )
    experiment.check()
    for library, needed in (("scipy", bound), ("matplotlib", out is not None)):
        if needed:
            importlib.import_module(library)  # missing: said before the first run rather than after the last
    to_stdout = json_file is not None and str(json_file) == "-"
    console = Console(stderr=to_stdout)
    cells = _run(experiment, jobs or usable_cores())
    if to_stdout:
        sys.stdout.write(json.dumps(as_json(experiment, cells), indent=2) + "\n")
        return
    for table in as_tables(experiment, cells):
        console.print(table)
    failed = sum(cell.outcomes.get("failed", 0.0) > 0 for cell in cells)
    if failed:
        console.print(f"[red]{failed} cells hold requests that failed inside the router or on a broken replica[/]")
    if json_file is not None:
        _write(json_file, json.dumps(as_json(experiment, cells), indent=2) + "\n")
    if out is not None:
        from router.simulation.page import write_page  # noqa: PLC0415 (matplotlib is an extra)

        for path in write_page(out, experiment, cells):
            console.print(f"wrote {path}", soft_wrap=True, highlight=False)


def _run(experiment: Experiment, jobs: int) -> list[Cell]:
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
    )
    runs = []
    begin_worker()  # with one job it is this process
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("simulating", total=len(experiment.tasks()))
        for run in runs_of(experiment, jobs):
            runs.append(run)
            shown.update(task, advance=1, description=f"{run.task.policy} at {run.task.load:g}")
    return cells_of(experiment, runs)


def _policies(text: str | None, of_world: str) -> tuple[str, ...]:
    if text == "all":
        return tuple(POLICIES)
    return _parts(text, "policy") if text is not None else (of_world,)


def _loads(text: str) -> tuple[float, ...]:
    loads = []
    for part in _parts(text, "load"):
        try:
            value = float(part)
        except ValueError:
            value = 0.0
        if not 0 < value <= 1000:
            raise ConfigError(f"--load: {part!r} is no load; give numbers above 0, such as 0.9,1.2", param="load")
        loads.append(value)
    return tuple(loads)


def _parts(text: str, option: str) -> tuple[str, ...]:
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise ConfigError(f"--{option} is empty", param=option)
    return parts


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", param="json") from error
