"""The simulator against the live system: the same minutes of a trace through real tiers and through their world.

    python -m benchmarks sim_vs_live -- [--rate R] [--seconds S]

First the live tiers are measured (`benchmarks/live/calibration.py`): fixed part and speed of a prefill, decode step at
each batch, what prompts and answers, and the two tiers, take from each other; all through the edge agent. That is the
world. Then the slice of the Azure conversation trace is sent to the edge agent, hybrid, default policy; and simulated
in that world, with the mean of several seeds. A part of the trace that comes before it is served in both and not
counted: both routers have learnt from it. Wanted: p50 and p95 of first token and finish within 10 %, outcome shares
within 3 points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.hybrid import OUTCOMES, TRACE, WARM_UP_REQUESTS
from benchmarks.live.calibration import measure_world
from benchmarks.live.client import Seen, replay
from benchmarks.live.running import run
from benchmarks.live.tiers import Tiers
from benchmarks.live.workload import OPEN_CAP_TOKENS, Ask, Promises, Scale, asks_of, rows_of
from benchmarks.live_calibration import HEADER, judge, rows_at
from benchmarks.live_calibration import show as show_predictions
from benchmarks.under_load import OtherWork, percentile
from router.simulation.run import simulate
from router.simulation.values import SimRequest, SimRow
from router.values.settings import RouterSettings

EDGE_SLOTS, CLOUD_SLOTS = 4, 8
"""`kv_slots` and `max_running` of `examples.demo.stack`."""
SEEDS = 20
"""Simulations are cheap: the 95th percentile of 300 first tokens alone differs by 5 % from seed to seed."""
SLICE = 7
LEARN_S = 45.0
WITHIN = 0.10
WITHIN_POINTS = 0.03


def sim_request(ask: Ask) -> SimRequest:
    """Return what the simulator is given for a request: the same, and the truth about its length."""
    return SimRequest(
        arrival_s=ask.arrival_s,
        prompt_tokens=ask.prompt_tokens,
        answer_tokens=ask.answer_tokens,
        objective=ask.objective,
        max_tokens=OPEN_CAP_TOKENS if ask.open_length else ask.answer_tokens,
        ignore_eos=not ask.open_length,
        kind=ask.kind,
        prompt_bytes=len(json.dumps(ask.body)),
    )


def outcome_of(row: SimRow) -> str:
    """Name what became of a simulated request in the words of `benchmarks.live.client.Seen.outcome`."""
    if row.outcome in {"shed", "unavailable"}:
        return "refused"
    if row.outcome not in {"completed", "degraded"}:
        return "failed"
    return ("kept" if row.kept else "late") if row.whole else "cut"


def live_figures(seen: Sequence[Seen]) -> dict[str, Any]:
    """Return percentiles and shares of the live run; finish is of whole answers."""
    return _figures(
        [one.first_s for one in seen if one.first_s is not None],
        [one.last_s for one in seen if one.whole and one.last_s is not None],
        Counter(one.outcome for one in seen),
        Counter(one.variant for one in seen if one.first_s is not None),
    )


def sim_figures(rows: Sequence[SimRow]) -> dict[str, Any]:
    """Return the same of a simulation."""
    return _figures(
        [row.ttft_s for row in rows if row.ttft_s is not None],
        [row.finish_s for row in rows if row.whole],
        Counter(outcome_of(row) for row in rows),
        Counter(row.variant for row in rows if row.ttft_s is not None),
    )


def _figures(
    ttfts_s: Sequence[float], finishes_s: Sequence[float], outcomes: Counter[str], served: Counter[str]
) -> dict[str, Any]:
    total = max(sum(outcomes.values()), 1)
    return {
        **{f"ttft_ms_p{p}": percentile([1e3 * t for t in ttfts_s], p) for p in (50, 95)},
        **{f"finish_ms_p{p}": percentile([1e3 * t for t in finishes_s], p) for p in (50, 95)},
        **{f"share_{name}": round(outcomes[name] / total, 4) for name in OUTCOMES},
        "served_by": {name: round(count / total, 4) for name, count in sorted(served.items())},
    }


def mean_of(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each figure over the seeds."""
    variants = sorted({name for one in figures for name in one["served_by"]})
    flat = [key for key in figures[0] if key != "served_by"]
    served = {name: _mean(one["served_by"].get(name, 0.0) for one in figures) for name in variants}
    return {**{key: _mean(one[key] for one in figures) for key in flat}, "served_by": served}


def _mean(figures: Iterable[float | None]) -> float | None:
    values = [value for value in figures if value is not None]
    return round(statistics.fmean(values), 4) if values else None


def compare(live: Mapping[str, Any], sim: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each figure: both, the difference, and whether it is within what is wanted."""
    rows = []
    for key, value in live.items():
        if key == "served_by":
            continue
        other = sim[key]
        share = key.startswith("share_")
        if value is None or other is None:
            difference, within = None, value is other
        else:
            difference = other - value if share else other / value - 1.0
            within = abs(difference) <= (WITHIN_POINTS if share else WITHIN) + 1e-9
        rows.append(
            {
                "figure": key,
                "live": value,
                "sim": other,
                "difference": None if difference is None else round(difference, 4),
                "unit": "points" if share else "relative",
                "within": within,
            }
        )
    return rows


async def measure(rate_rps: float, seconds: float) -> dict[str, Any]:
    """Measure the tiers, replay the slice, simulate it, and compare."""
    scale, promises = Scale(rate_rps=rate_rps), Promises()
    first = round(rate_rps * LEARN_S)
    asks = asks_of(rows_of(TRACE, max(2, round(rate_rps * seconds)) + first, SLICE, scale), SLICE, "live", promises)
    with tempfile.TemporaryDirectory(prefix="overspill-sim-") as folder:
        async with Tiers(Path(folder)) as tiers:
            warm = rows_of(TRACE, WARM_UP_REQUESTS, 100, scale)
            await replay(tiers.hybrid, asks_of(warm, 100, "warm", promises))
            await tiers.settle()
            print("measuring the tiers …", flush=True)
            world, fits = await measure_world(tiers, EDGE_SLOTS, CLOUD_SLOTS)
            print(f"replaying {len(asks)} requests, {LEARN_S + seconds:.0f} s …", flush=True)
            other_work = OtherWork([tiers.stack.edge.pid, tiers.stack.cloud.pid])
            seen = await replay(tiers.hybrid, asks)
            other_share = other_work.share()
            told = rows_at(rate_rps, await judge(tiers, seen[first:]))
    requests = [sim_request(ask) for ask in asks]
    simulated = [simulate(world, requests, RouterSettings(), seed=seed).rows for seed in range(SEEDS)]
    live, sim = live_figures(seen[first:]), mean_of([sim_figures(rows[first:]) for rows in simulated])
    return {
        "model": "smollm2-135m",
        "trace": TRACE,
        "policy": RouterSettings().policy,
        "rate_rps": rate_rps,
        "seconds": seconds,
        "requests": len(asks) - first,
        "requests_before": first,
        "seeds": SEEDS,
        "promises": asdict(promises),
        "other_work_share": other_share,
        "world": msgspec.to_builtins(world),
        "measured": [asdict(fit) for fit in fits],
        "predictions": told,
        "live": live,
        "sim": sim,
        "rows": compare(live, sim),
        "live_requests": [one.row() for one in seen],
    }


def show(result: Mapping[str, Any]) -> None:
    """Print both sides and the differences."""
    print(f"{'figure':<16}{'live':>10}{'sim':>10}{'difference':>12}")
    for row in result["rows"]:
        live, sim = ("-" if row[side] is None else f"{row[side]:.4g}" for side in ("live", "sim"))
        points = row["unit"] == "points"
        gap = "-" if row["difference"] is None else f"{100 * row['difference']:+.1f}{' pt' if points else ' %'}"
        print(f"{row['figure']:<16}{live:>10}{sim:>10}{gap:>12}  {'' if row['within'] else 'beyond'}")
    for side in ("live", "sim"):
        print(f"served by, {side}: " + ", ".join(f"{name} {s:.0%}" for name, s in result[side]["served_by"].items()))

    print(HEADER)
    show_predictions(result["predictions"])


def main() -> None:
    """Print the comparison; write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rate", type=float, default=1.2)
    parser.add_argument("--seconds", type=float, default=300.0)
    arguments = parser.parse_args()
    result = run(measure(arguments.rate, arguments.seconds), 900.0 + 2 * arguments.seconds)
    show(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
