"""What the door costs: requests and streams a second before one stub engine, ours beside what others put there.

    python -m benchmarks gateway -- [--servers NAME …] [--rounds N] [--seconds S] [--against-rev REV]

Each server runs by turns on one processor, all callers and the engine share another one. `direct` is the engine without
any server before it: what others add is told against it. An engine that paces its tokens shows what each costs, one
that has them all at once shows how many the server can carry. LiteLLM and sglang-router are installed once; nginx is
Debian's `nginx-light`; the compiled router is built once (some minutes; `--servers` leaves it out).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks._stamp import commit, machine
from benchmarks.gateway import servers
from benchmarks.gateway.load import STREAM_TOKENS, Load
from benchmarks.gateway.servers import Command, Server
from examples.demo.processes import free_port

CONCURRENCY = (1, 16, 64)
MODES = ("json", "stream")
PACED_S = 0.02
BEFORE = "0c5cddb"
"""The revision before streams left httpx: what the figures of this table are held against."""
WARM_UP_S = 0.5
OURS = {"overspill": "", "overspill-compiled": "compiled_"}
"""The agent as it is installed and with its router compiled, and what the figures of each begin with."""

MAKERS: dict[str, Callable[[Path, int], Command]] = {
    "echo": servers.echo,
    "nginx": servers.nginx,
    "overspill": lambda folder, port: servers.overspill(folder, "overspill", port),
    "overspill-compiled": servers.overspill_compiled,
    "overspill-cloud": servers.overspill_cloud,
    "litellm": servers.litellm,
    "sglang-router": servers.sglang_router,
}


@dataclass
class Sample:
    """What one interval of load showed."""

    requests: int
    seconds: float
    cpu_s: float
    first_s: list[float] = field(default_factory=list)


async def measure(server: Server, callers: int, seconds: float, mode: str) -> Sample:
    """Load one server for a while."""
    load = Load(server.port, callers, mode != "json", server.key)
    cpu_s, began_s = server.cpu_s(), time.perf_counter()
    await load.run(seconds)
    return Sample(load.answered, time.perf_counter() - began_s, server.cpu_s() - cpu_s, load.first_s)


Samples = dict[tuple[str, str, int], list[Sample]]


def take_turns(found: Sequence[Server], paced: Sequence[Server], rounds: int, seconds: float) -> Samples:
    """Measure every server under every load, by turns.

    Args:
        paced: the servers before an engine that paces its tokens.
    """
    samples: Samples = {}
    for server in (*found, *paced):
        for mode in MODES:
            uvloop.run(measure(server, 8, WARM_UP_S, mode))
    for _ in range(rounds):
        for callers in CONCURRENCY:
            for mode in MODES:
                for server in found:
                    sample = uvloop.run(measure(server, callers, seconds, mode))
                    samples.setdefault((server.name, mode, callers), []).append(sample)
        for server in paced:
            sample = uvloop.run(measure(server, CONCURRENCY[-1], 2 * seconds, "paced"))
            samples.setdefault((server.name, "paced", CONCURRENCY[-1]), []).append(sample)
    return samples


def rows_of(samples: Samples) -> list[dict[str, Any]]:
    """Return a row for each server, kind of answer and number of callers; `direct` is what the others are held to."""
    rows = []
    for (name, mode, callers), taken in samples.items():
        first = sorted(s for sample in taken for s in sample.first_s)
        straight = sorted(s for sample in samples.get(("direct", mode, callers), []) for s in sample.first_s)
        rate = statistics.median(sample.requests / sample.seconds for sample in taken)
        tokens = 1 if mode == "json" else STREAM_TOKENS
        row: dict[str, Any] = {
            "server": name,
            "mode": mode,
            "concurrency": callers,
            "requests_per_s": round(rate, 1),
            "tokens_per_s": round(rate * tokens),
            "added_p50_s": _added(first, straight, 0.5),
            "added_p99_s": _added(first, straight, 0.99),
            "cpu_s_a_request": round(statistics.median(s.cpu_s / s.requests for s in taken), 6),
        }
        rows.append(row)
    return rows


def _added(first: list[float], straight: list[float], share: float) -> float | None:
    if not straight:
        return None
    return round(_quantile(first, share) - _quantile(straight, share), 6)


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarise(rows: list[dict[str, Any]], against: str | None) -> dict[str, float]:
    """Say what is asked of the door: beside the version before, beside the others, and by itself."""
    names = {row["server"] for row in rows}
    told: dict[str, float] = {}
    for ours, prefix in OURS.items():
        if ours in names:
            told |= {prefix + figure: value for figure, value in _figures(rows, ours, against).items()}
    return told


def _figures(rows: list[dict[str, Any]], ours: str, against: str | None) -> dict[str, float]:
    by_key = {(row["server"], row["mode"], row["concurrency"]): row for row in rows}
    most = CONCURRENCY[-1]

    def rate(server: str, mode: str, callers: int = most) -> float:
        found: float = by_key[server, mode, callers]["requests_per_s"]
        return found

    names = {row["server"] for row in rows}
    told: dict[str, float] = {}
    for mode in MODES:
        if against is not None and against in names:
            told[f"{mode}_times_{against}_at_{most}"] = round(rate(ours, mode) / rate(against, mode), 2)
        rates = [rate(ours, mode, callers) for callers in CONCURRENCY]
        told[f"{mode}_least_rise"] = round(min(after / before for before, after in pairwise(rates)), 2)
        for other in ("litellm", "sglang-router"):
            if other in names:
                least = min(rate(ours, mode, n) / rate(other, mode, n) for n in CONCURRENCY)
                told[f"{mode}_least_times_{other}"] = round(least, 2)
    if ("direct", "json", 1) in by_key:
        told["json_added_p50_ms_at_1"] = round(by_key[ours, "json", 1]["added_p50_s"] * 1e3, 2)
        told["stream_added_p50_ms_at_1"] = round(by_key[ours, "stream", 1]["added_p50_s"] * 1e3, 2)
    plain = by_key[ours, "json", most]["cpu_s_a_request"]
    for mode in ("stream", "paced"):
        if (ours, mode, most) in by_key:
            more_s = by_key[ours, mode, most]["cpu_s_a_request"] - plain
            told[f"{mode}_cpu_us_a_token_at_{most}"] = round(more_s * 1e6 / (STREAM_TOKENS - 1), 1)
    return told


def show(rows: list[dict[str, Any]], told: dict[str, float]) -> None:
    table = Table(title="The door's cost")
    for column in ("server", "mode", "concurrency", "requests/s", "tokens/s", "added p50 ms", "p99 ms", "CPU ms"):
        table.add_column(column, justify="left" if column in {"server", "mode"} else "right")
    for row in sorted(rows, key=lambda r: (r["mode"], r["concurrency"], -r["requests_per_s"])):
        added = [row["added_p50_s"], row["added_p99_s"]]
        table.add_row(
            row["server"],
            row["mode"],
            str(row["concurrency"]),
            f"{row['requests_per_s']:,.0f}",
            f"{row['tokens_per_s']:,}",
            *("" if value is None else f"{value * 1e3:.2f}" for value in added),
            f"{row['cpu_s_a_request'] * 1e3:.3f}",
        )
    Console(width=110).print(table)
    for name, value in told.items():
        print(f"{name}: {value}")


def main() -> None:
    """Print the table, and write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=sorted(MAKERS), default=list(MAKERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of load in each round, for each row")
    parser.add_argument("--against-rev", default=BEFORE, help="a revision to stand beside; empty for none")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two processors are needed: one for the server, one for the callers and the engine")
    os.sched_setaffinity(0, cores[1:2])
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = []
        for token_ms in (0.0, PACED_S * 1e3):
            port = free_port()
            argv = [sys.executable, "-m", "benchmarks.gateway.stub", str(port), "--token-ms", str(token_ms)]
            engines.append(stack.enter_context(servers.running(Command("direct", argv, port), cores[1:2])))
        found, paced = [engines[0]], [engines[1]]
        for name in arguments.servers:
            command = MAKERS[name](folder, engines[0].port)
            found.append(stack.enter_context(servers.running(command, cores[:1])))
        paced_folder = folder / "paced"
        paced_folder.mkdir()
        for name in OURS:
            if name in arguments.servers:
                command = MAKERS[name](paced_folder, engines[1].port)
                paced.append(stack.enter_context(servers.running(command, cores[:1])))
        against = arguments.against_rev or None
        if against is not None:
            tree = stack.enter_context(servers.checkout_of(against))
            command = servers.overspill(folder, against, engines[0].port, tree)
            found.append(stack.enter_context(servers.running(command, cores[:1])))
        rows = rows_of(take_turns(found, paced, arguments.rounds, arguments.seconds))
    told = summarise(rows, against)
    show(rows, told)
    if arguments.json is not None:
        stamp = {"measured": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine(), "commit": commit()}
        arguments.json.write_text(json.dumps({**stamp, "summary": told, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
