"""Plots of an experiment as PNG, and one HTML page that holds them all and needs no other file."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import msgspec

mpl.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, ScalarFormatter

from router.base.errors import ConfigError
from router.simulation.experiment import BOUND, CLAIRVOYANT, MOMENTS, NOBODY, Cell, Experiment
from router.simulation.show import share_title

_DPI = 110
_COLOURS = {NOBODY: "#c8c8c8"}

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>overspill simulate</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; text-align: right }
td:first-child, th:first-child { text-align: left } thead { border-bottom: 1px solid #888 }
tr.best { font-weight: 600 } tr.line { color: #777 } img { max-width: 100% } pre { background: #f5f5f5; padding: 1em }
</style>
<h1>overspill simulate</h1>
<p>{{ about }}</p>
{% for image in images %}<h2>{{ image.title }}</h2>
<img alt="{{ image.title }}" src="data:image/png;base64,{{ image.data }}">
{% endfor %}
{% for table in tables %}<h2>Load {{ table.load }}</h2>
<table><thead><tr>{% for title in titles %}<th>{{ title }}</th>{% endfor %}</tr></thead><tbody>
{% for row in table.rows %}<tr class="{{ row.kind }}">{% for cell in row.cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>
{% endfor %}
<h2>World</h2>
<pre>{{ world }}</pre>
</html>
"""

_TITLES = (
    "policy",
    "value",
    "±",
    "goodput a second",
    "kept",
    "whole",
    "quality",
    "TTFT p50 s",
    "p95",
    "finish p50 s",
    "p95",
    "turned away",
    "longest tenth kept",
    "decisions a request",
)


def write_page(folder: Path, experiment: Experiment, cells: Sequence[Cell]) -> list[Path]:
    """Write the plots and the page; return their paths.

    Raises:
        ConfigError: the folder cannot be written.
    """
    written, images = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, title, draw in _plots(experiment, cells):
            data = _png(draw)
            path = folder / f"{name}.png"
            path.write_bytes(data)
            written.append(path)
            images.append({"title": title, "data": base64.b64encode(data).decode("ascii")})
        page = folder / "simulation.html"
        page.write_text(_html(experiment, cells, images), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror}", param="out") from error
    return [*written, page]


_Draw = Callable[[], Figure]


def _plots(experiment: Experiment, cells: Sequence[Cell]) -> list[tuple[str, str, _Draw]]:
    return [
        ("goodput", "Value and goodput over load", lambda: _goodput(experiment, cells)),
        ("latency", "Latency over load", lambda: _latency(experiment, cells)),
        ("quality", "Who served", lambda: _quality(experiment, cells)),
        ("decisions", "Where requests went over time", lambda: _decisions(experiment, cells)),
    ]


def _png(draw: _Draw) -> bytes:
    figure = draw()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, bbox_inches="tight")
    plt.close(figure)
    return buffer.getvalue()


def _lines(experiment: Experiment, cells: Sequence[Cell], *, known: bool) -> Iterable[tuple[str, list[Cell]]]:
    """Yield the cells of each policy over the loads; with the lines that know the future where `known`."""
    for policy in (*experiment.policies, *((CLAIRVOYANT, BOUND) if known else ())):
        found = sorted((cell for cell in cells if cell.policy == policy), key=lambda cell: cell.load)
        if found:
            yield policy, found


def _style(policy: str) -> dict[str, Any]:
    if policy == BOUND:
        return {"color": "black", "linestyle": "--", "linewidth": 1.2}
    if policy == CLAIRVOYANT:
        return {"color": "grey", "linestyle": "-.", "linewidth": 1.2}
    return {"marker": "o", "markersize": 4}


def _load_axis(axes: Axes, experiment: Experiment) -> None:
    axes.set_xscale("log")
    axes.set_xticks(experiment.loads, [f"{load:g}" for load in experiment.loads])
    axes.minorticks_off()
    axes.set_xlabel("load")
    axes.grid(alpha=0.3)


def _goodput(experiment: Experiment, cells: Sequence[Cell]) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for policy, line in _lines(experiment, cells, known=True):
        loads = [cell.load for cell in line]
        spreads = [cell.spread for cell in line]
        left.errorbar(loads, [cell.share for cell in line], spreads, label=policy, capsize=2, **_style(policy))
        if policy != BOUND:
            right.plot(loads, [cell.goodput_rps for cell in line], label=policy, **_style(policy))
    left.set_ylabel(f"value, share {share_title(experiment)}")
    left.set_ylim(0, 1.05)
    right.set_ylabel("goodput, kept promises a second")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        _load_axis(axes, experiment)
    left.legend(fontsize=8)
    return figure


def _latency(experiment: Experiment, cells: Sequence[Cell]) -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2))
    for axes, name, title in zip(panels, ("ttft_s", "finish_s"), ("TTFT", "finish of whole answers"), strict=True):
        for policy, line in _lines(experiment, cells, known=False):
            there = [(cell.load, pair) for cell in line if (pair := getattr(cell, name)) is not None]
            loads = [load for load, _ in there]
            (drawn,) = axes.plot(loads, [pair[0] for _, pair in there], marker="o", markersize=4, label=policy)
            axes.plot(loads, [pair[1] for _, pair in there], linestyle=":", marker=".", color=drawn.get_color())
        axes.set_ylabel(f"{title}, s; p50 solid, p95 dotted")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
        _load_axis(axes, experiment)
    panels[0].legend(fontsize=8)
    return figure


def _places(cells: Sequence[Cell]) -> list[str]:
    """Return where requests went, in one order and so in one colour for all panels."""
    places = sorted({place for cell in cells for place in cell.served} - {NOBODY})
    palette = plt.get_cmap("tab10")
    for at, place in enumerate(places):
        _COLOURS[place] = mpl.colors.to_hex(palette(at % 10))
    return [*places, NOBODY]


def _quality(experiment: Experiment, cells: Sequence[Cell]) -> Figure:
    places, lines = _places(cells), list(_lines(experiment, cells, known=False))
    figure, panels = plt.subplots(1, len(lines), figsize=(max(3.2 * len(lines), 5), 3.8), sharey=True, squeeze=False)
    for axes, (policy, line) in zip(panels[0], lines, strict=True):
        floor = [0.0] * len(line)
        for place in places:
            shares = [cell.served.get(place, 0.0) for cell in line]
            names = [f"{cell.load:g}" for cell in line]
            axes.bar(names, shares, bottom=floor, label=place, color=_COLOURS[place])
            floor = [low + share for low, share in zip(floor, shares, strict=True)]
        axes.set_title(policy, fontsize=9)
        axes.set_xlabel("load")
    panels[0][0].set_ylabel("share of requests")
    panels[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _decisions(experiment: Experiment, cells: Sequence[Cell]) -> Figure:
    """One panel for each policy and load: who served the requests of each moment, over all seeds."""
    places, lines = _places(cells), list(_lines(experiment, cells, known=False))
    loads = sorted(experiment.loads)
    size = (max(3.0 * len(loads), 5), 1.9 * len(lines) + 0.6)
    figure, panels = plt.subplots(len(lines), len(loads), figsize=size, sharey=True, sharex=True, squeeze=False)
    at = [(moment + 0.5) / MOMENTS for moment in range(MOMENTS)]
    for row, (policy, line) in zip(panels, lines, strict=True):
        for axes, cell in zip(row, line, strict=True):
            shares = [[moment.get(place, 0.0) for moment in cell.moments] for place in places]
            axes.stackplot(at, shares, labels=places, colors=[_COLOURS[place] for place in places])
            axes.set_title(f"{policy}, load {cell.load:g}", fontsize=8)
            axes.set_xlim(0, 1)
            axes.set_ylim(0, 1)
    for axes in panels[-1]:
        axes.set_xlabel("time, share of the run", fontsize=8)
    panels[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    return figure


def _html(experiment: Experiment, cells: Sequence[Cell], images: list[dict[str, str]]) -> str:
    seeds = f"{experiment.seeds} seeds × {experiment.requests} requests"
    about = f"trace {experiment.trace}, mix {experiment.mix}, {seeds}; value is told as share {share_title(experiment)}"
    tables = []
    for load in experiment.loads:
        of_load = [cell for cell in cells if cell.load == load]
        best = max((cell.share for cell in of_load if cell.policy not in {BOUND, CLAIRVOYANT}), default=0.0)
        rows = [
            {
                "kind": "line" if cell.policy in {BOUND, CLAIRVOYANT} else "best" if cell.share == best else "",
                "cells": _cells(cell),
            }
            for cell in of_load
        ]
        tables.append({"load": f"{load:g}", "rows": rows})
    world = msgspec.json.format(msgspec.json.encode(experiment.world), indent=2).decode()
    page = jinja2.Environment(autoescape=True).from_string(_PAGE)
    return page.render(about=about, images=images, tables=tables, titles=_TITLES, world=world)


def _cells(cell: Cell) -> list[str]:
    first = [cell.policy, f"{cell.share:.3f}", f"{cell.spread:.3f}"]
    if cell.policy in {BOUND, CLAIRVOYANT}:
        return [*first, *[""] * (len(_TITLES) - len(first))]
    times = [f"{value_s:.2f}" for pair in (cell.ttft_s, cell.finish_s) for value_s in pair or ()]
    if cell.ttft_s is None:
        times = ["", "", *times]
    times += [""] * (4 - len(times))
    return [
        *first,
        f"{cell.goodput_rps:.2f}",
        f"{cell.kept:.1%}",
        f"{cell.whole:.1%}",
        f"{cell.quality:.3f}",
        *times,
        f"{cell.refused:.1%}",
        f"{cell.long_kept:.1%}",
        f"{cell.decisions:.2f}",
    ]
