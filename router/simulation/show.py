"""What an experiment found: tables for a terminal, and values for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import msgspec
from rich.table import Table

from router.simulation.experiment import BOUND, CLAIRVOYANT, Cell, Experiment


def share_title(experiment: Experiment) -> str:
    """Say what shares are shares of."""
    return "of the bound" if experiment.bound else "of all value"


def as_tables(experiment: Experiment, cells: Sequence[Cell]) -> Iterator[Table]:
    """Return a table for each load, a row for each policy."""
    for load in experiment.loads:
        of_load = [cell for cell in cells if cell.load == load]
        runs = f"{experiment.seeds} × {experiment.requests} requests"
        table = Table(
            title=f"load {load:g}: {experiment.trace}, {experiment.mix}, {runs}",
            title_justify="left",
            title_style="bold",
            box=None,
            padding=(0, 1, 0, 0),
        )
        table.add_column("policy", no_wrap=True)
        for title in (
            "value,\n" + share_title(experiment),
            "kept\na s",
            "TTFT, s\np50 p95",
            "finish, s\np50 p95",
            "qua-\nlity",
            "turned\naway",
            "deci-\nsions",
        ):
            table.add_column(title, justify="right", no_wrap=True)
        best = max((cell.share for cell in of_load if cell.policy not in {BOUND, CLAIRVOYANT}), default=0.0)
        for cell in of_load:
            style = "bold" if cell.share == best else "dim" if cell.policy in {BOUND, CLAIRVOYANT} else None
            table.add_row(*_row(cell), style=style)
        yield table


def _row(cell: Cell) -> list[str]:
    share = f"{cell.share:.3f} ±{cell.spread:.3f}".replace("±0.", "±.")
    if cell.policy == BOUND:
        return [cell.policy, share, *[""] * 6]
    goodput = f"{cell.goodput_rps:.2f}"
    if cell.policy == CLAIRVOYANT:
        return [cell.policy, share, goodput, "", "", f"{cell.quality:.2f}", "", ""]
    return [
        cell.policy,
        share,
        goodput,
        _pair(cell.ttft_s),
        _pair(cell.finish_s),
        f"{cell.quality:.2f}",
        f"{cell.refused:.0%}",
        f"{cell.decisions:.1f}",
    ]


def _pair(values_s: tuple[float, float] | None) -> str:
    return (
        "–"
        if values_s is None
        else " ".join(f"{value_s:.2f}" if value_s < 9.995 else f"{value_s:.1f}" for value_s in values_s)
    )


def as_json(experiment: Experiment, cells: Sequence[Cell]) -> dict[str, object]:
    """Return all figures; a row for each cell, with `trace, mix, load, policy, share, spread` first."""
    rows = []
    for cell in cells:
        values = dataclasses.asdict(cell)
        moments = values.pop("moments")
        about = {
            "trace": experiment.trace,
            "mix": experiment.mix,
            "load": values.pop("load"),
            "policy": values.pop("policy"),
        }
        for name in ("ttft_s", "finish_s"):
            pair = values.pop(name)
            values[f"{name.removesuffix('_s')}_p50_s"], values[f"{name.removesuffix('_s')}_p95_s"] = pair or (
                None,
                None,
            )
        rows.append({**about, **values, "moments": moments})
    return {
        "world": msgspec.to_builtins(experiment.world),
        "share_of": "bound" if experiment.bound else "value",
        "seeds": experiment.seeds,
        "requests": experiment.requests,
        "prompt_tokens": experiment.prompt_tokens,
        "rows": rows,
    }
