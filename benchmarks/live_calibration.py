"""How well predictions are kept by real tiers: upper figures by tier and load, and mean relative errors beside them.

    python -m benchmarks live_calibration -- [--rates R …] [--step-s S]

Slices of the Azure conversation trace (`benchmarks/live/workload.py`) go to the edge agent of two real tiers at several
mean rates, one after the other; the bursts of the trace are in each. What is judged is what the edge's decision record
says was predicted when the request was bound, against what its caller saw: HTTP on both ends included. An answer that
its deadline cut is judged by the time that it would have taken, at its own pace. `benchmarks.calibration` does the same
in the simulator.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.calibration import HIGH, LOW, Cell
from benchmarks.hybrid import TRACE
from benchmarks.live.client import Seen, replay
from benchmarks.live.running import run
from benchmarks.live.tiers import Tiers
from benchmarks.live.workload import Promises, Scale, asks_of, rows_of
from benchmarks.under_load import OtherWork
from router.values.prediction import Prediction
from router.values.settings import RouterSettings

RATES_PER_S = (0.6, 1.2, 2.4)
FIGURES = ("ttft", "tpot", "finish")
LEARN_S = 30.0
SLICE = 31


@dataclass(frozen=True)
class Judged:
    """One answer with what was told when it was bound."""

    seen: Seen
    tier: str
    bound_s: float
    told: Prediction

    def row(self) -> dict[str, Any]:
        told = {f"told_{name}_s": round(getattr(self.told, f"{name}_s"), 4) for name in _TOLD}
        return {**self.seen.row(), "tier": self.tier, "bound_s": round(self.bound_s, 4), **told}


_TOLD = ("wait", "ttft", "ttft_high", "tpot", "tpot_high", "finish", "finish_high")


def judged_of(seen: Seen, record: Mapping[str, Any]) -> Judged | None:
    """Return what a decision record told of an answer; None where there is none, or it was sent twice or hedged."""
    chosen = [row for row in record.get("candidates", ()) if row.get("chosen")]
    sent = [event for event in record.get("events", ()) if event["event"] == "sent"]
    if len(chosen) != 1 or len(sent) != 1 or seen.first_s is None or seen.last_s is None or seen.tokens < 1:
        return None
    row = chosen[0]
    if row.get("ttft_ms") is None or row["replica"] != sent[0]["replica"]:
        return None
    figures = {f"{name}_s": row.get(f"{name}_ms", 0.0) / 1e3 for name in _TOLD}
    return Judged(seen, str(row["tier"]), sent[0]["at_ms"] / 1e3, Prediction(free=bool(row.get("free")), **figures))


def cells_of(judged: Sequence[Judged]) -> dict[str, Cell]:
    """Return the figures of each tier."""
    cells: dict[str, Cell] = defaultdict(Cell)
    for one in judged:
        seen = one.seen
        first_s, last_s = seen.first_s or 0.0, seen.last_s or 0.0
        pace_s = (last_s - first_s) / (seen.tokens - 1) if seen.tokens > 1 else None
        finish_s = last_s - one.bound_s if seen.whole else None
        cells[one.tier].judge(one.told, first_s - one.bound_s, pace_s, finish_s, seen.ask.answer_tokens)
    return dict(cells)


def margin(share: float, count: int) -> float:
    """Return the half width of the 95 % interval of a share among so many (Wald)."""
    return 1.96 * math.sqrt(max(share * (1.0 - share), 0.01) / max(count, 1))


async def records_of(tiers: Tiers, seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """Return the edge's decision record of each; an empty one where it is kept no longer."""
    found = []
    async with aiohttp.ClientSession() as session:
        for one in seen:
            async with session.get(f"{tiers.stack.edge_url}/v1/decisions/{one.request_id}") as reply:
                found.append(await reply.json() if reply.status == 200 else {})
    return found


async def judge(tiers: Tiers, seen: Sequence[Seen]) -> list[Judged]:
    """Return what was told of each answer."""
    records = await records_of(tiers, seen)
    return [one for one in map(judged_of, seen, records) if one is not None]


def rows_at(rate_rps: float, judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return a row for each tier at one load."""
    return [{"rate_rps": rate_rps, "tier": tier, **cell.row()} for tier, cell in sorted(cells_of(judged).items())]


async def measure(rates: Sequence[float], step_s: float) -> dict[str, Any]:
    """Serve a slice at each rate, and judge what was told."""
    promises = Promises()
    rows: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="overspill-hybrid-") as folder:
        async with Tiers(Path(folder)) as tiers:
            learning = rows_of(TRACE, round(LEARN_S * rates[0]) + 2, SLICE - 1, Scale(rate_rps=rates[0]))
            await replay(tiers.hybrid, asks_of(learning, SLICE - 1, "learn", promises))
            await tiers.settle()
            other_work = OtherWork([tiers.stack.edge.pid, tiers.stack.cloud.pid])
            print(HEADER)
            for number, rate_rps in enumerate(rates):
                trace = rows_of(TRACE, max(2, round(rate_rps * step_s)), SLICE + number, Scale(rate_rps=rate_rps))
                seen = await replay(tiers.hybrid, asks_of(trace, SLICE + number, f"rate {rate_rps}", promises))
                await tiers.settle()
                judged = await judge(tiers, seen)
                answers += [{"rate_rps": rate_rps, **one.row()} for one in judged]
                rows += rows_at(rate_rps, judged)
                show([row for row in rows if row["rate_rps"] == rate_rps])
            other_share = other_work.share()
    return {
        "model": "smollm2-135m",
        "trace": TRACE,
        "policy": RouterSettings().policy,
        "step_s": step_s,
        "promises": asdict(promises),
        "other_work_share": other_share,
        "asked": [LOW, HIGH],
        "rows": rows,
        "answers": answers,
    }


HEADER = (
    f"{'rate/s':>7}{'tier':>7}{'n':>6}"
    + "".join(f"{name + ' kept':>18}" for name in FIGURES)
    + "".join(f"{name + ' MAPE':>13}" for name in FIGURES)
)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows; ± is the 95 % interval of so many answers."""
    for row in rows:
        kept = "".join(
            f"{row[f'{name}_kept']:>11.3f} ±{margin(row[f'{name}_kept'], row['answers']):.3f}" for name in FIGURES
        )
        errors = "".join(f"{row[f'{name}_mape']:>13.2f}" for name in FIGURES)
        print(f"{row['rate_rps']:>7g}{row['tier']:>7}{row['answers']:>6}{kept}{errors}", flush=True)


def main() -> None:
    """Print the table; write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES_PER_S))
    parser.add_argument("--step-s", type=float, default=120.0)
    arguments = parser.parse_args()
    limit_s = 300.0 + len(arguments.rates) * (arguments.step_s + 60.0)
    result = run(measure(arguments.rates, arguments.step_s), limit_s)
    figures = [row[f"{name}_kept"] for row in result["rows"] for name in FIGURES]
    print(f"{sum(LOW <= figure <= HIGH for figure in figures)} of {len(figures)} within {LOW} to {HIGH}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
