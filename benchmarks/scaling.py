"""Broken promises and replica-seconds of autoscalers: `/v1/scale` beside the defaults of KEDA and Ray Serve.

    python -m benchmarks scaling -- [--seeds N] [--hours H] [--jobs N]

On virtual time: the real dispatcher before devices of the simulator that come and go, the Azure conversation trace in
bursts, cold starts of about a minute. Each arm meets the same requests and noise. A promise is a first token in 3 s,
of an answer that came whole. Second table: a model with no replica, whose requests wait for the first one.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks._autoscalers import REPLICA, TTFT_S, Autoscaler, Keda, Law, RayServe
from benchmarks._scaling import Burst, Seen, Service, draw_bursts, in_bursts
from cloud_tier.scaling.settings import ScalingSettings
from router.base import logs
from router.simulation.loop import run_virtually
from router.simulation.traces import load_trace, scale_inputs, slice_of
from router.simulation.values import SimRequest

MOST = 10
COLD_START_S = 60.0
BASE_RPS = 0.6
BURSTS_RPS = (2.0, 6.0)
BURST_EVERY_S = 480.0
ROWS = 8_000

KEDA, RAY, LAW, SPARE = "KEDA: waiting > 5", "Ray Serve: 2 ongoing", "/v1/scale", "/v1/scale, n + 2, hold 1200 s"
ARMS: dict[str, Callable[[], Autoscaler]] = {
    KEDA: lambda: Keda(1, MOST),
    LAW: lambda: Law(ScalingSettings(max_replicas=MOST, cold_start_s=COLD_START_S)),
    RAY: lambda: RayServe(1, MOST),
    SPARE: lambda: Law(ScalingSettings(max_replicas=MOST, cold_start_s=COLD_START_S, spare_replicas=2, hold_s=1200.0)),
}
BEATS = ((LAW, KEDA), (SPARE, RAY))
"""Who is to break fewer promises than whom, at no more replica-seconds."""

EPISODES = 5
EPISODE_S = 900.0
GUESSED_S = 60.0
NEAR = 0.25
REAL_STARTS_S = (20.0, 60.0, 150.0)


def requests_of(seed: int, lasts_s: float, bursts: Sequence[Burst], base_rps: float) -> tuple[SimRequest, ...]:
    """Return what every arm of a seed meets."""
    rows = scale_inputs(load_trace("azure-conv"), None, REPLICA.rungs[0].context_tokens)
    return in_bursts(slice_of(rows, ROWS, seed), bursts, base_rps, lasts_s)


def run(arm: str, seed: int, lasts_s: float) -> dict[str, object]:
    """Let one arm live through one seed."""
    requests = requests_of(seed, lasts_s, draw_bursts(seed, lasts_s, BURST_EVERY_S, BURSTS_RPS), BASE_RPS)
    seen = _live(requests, ARMS[arm](), seed, COLD_START_S, begin_with=1)
    ttfts = sorted(row.ttft_s for row in seen.rows if row.ttft_s is not None)
    return {
        "arm": arm,
        "seed": seed,
        "requests": len(requests),
        "answered": len(ttfts),
        "broken": sum(not row.kept for row in seen.rows),
        "replica_s": round(seen.replica_s, 1),
        "mean_replicas": round(seen.replica_s / lasts_s, 2),
        "most_replicas": max(count for _, count in seen.path),
        "ttft_p50_s": round(statistics.median(ttfts), 3),
        "ttft_p99_s": round(ttfts[int(0.99 * (len(ttfts) - 1))], 3),
    }


def from_zero(start_s: float, seed: int) -> list[dict[str, object]]:
    """Let a model go to no replica and come back, again and again; one row for each time."""
    minutes = [(EPISODE_S * (number + 0.5), 60.0, 0.4) for number in range(EPISODES)]
    requests = [
        request
        for request in requests_of(seed, EPISODE_S * EPISODES, minutes, 1e-6)
        if any(begin <= request.arrival_s < begin + span for begin, span, _ in minutes)
    ]
    settings = ScalingSettings(
        unit="replica", min_replicas=0, max_replicas=MOST, cold_start_s=GUESSED_S, hold_s=120.0, idle_s=300.0
    )
    seen = _live(requests, Law(settings, sync_s=5.0), seed, start_s, begin_with=0)
    told: list[dict[str, object]] = []
    for number, (begin_s, span_s, _) in enumerate(minutes, 1):
        rows = sorted(
            (row for row in seen.rows if begin_s <= row.arrival_s < begin_s + span_s), key=lambda row: row.arrival_s
        )
        first = rows[0]
        told.append(
            {
                "cold_start_s": start_s,
                "seed": seed,
                "episode": number,
                "requests": len(rows),
                "lost": sum(row.ttft_s is None or not row.whole for row in rows),
                "predicted_s": first.predicted_s,
                "first_answer_s": first.ttft_s,
                "error": None
                if first.ttft_s is None or not first.predicted_s
                else round(first.ttft_s / first.predicted_s - 1.0, 3),
            }
        )
    return told


@logs.at_least(logging.CRITICAL)
def _live(
    requests: Sequence[SimRequest], autoscaler: Autoscaler, seed: int, cold_start_s: float, *, begin_with: int
) -> Seen:
    return run_virtually(
        lambda loop: Service(
            requests, autoscaler, loop, cold_start_s=cold_start_s, seed=seed, begin_with=begin_with
        ).run()
    )


def _table(rows: Iterable[dict[str, object]], seeds: int) -> list[dict[str, object]]:
    """Print one line an arm, over all seeds; returns the lines."""
    print(f"\n{'':32}{'requests':>9}{'broken':>8}{'share':>8}{'replica-s':>11}{'mean':>7}{'TTFT p99 s':>12}")
    found = list(rows)
    lines = []
    for arm in ARMS:
        own = [row for row in found if row["arm"] == arm]
        requests, broken = _sum(own, "requests"), _sum(own, "broken")
        line = {
            "arm": arm,
            "requests": int(requests),
            "broken": int(broken),
            "broken_share": round(broken / requests, 4),
            "replica_s": round(_sum(own, "replica_s")),
            "mean_replicas": round(_sum(own, "mean_replicas") / seeds, 2),
            "ttft_p99_s": round(_sum(own, "ttft_p99_s") / seeds, 2),
        }
        lines.append(line)
        print(
            f"{arm:32}{line['requests']:9}{line['broken']:8}{line['broken_share']:8.1%}{line['replica_s']:11}"
            f"{line['mean_replicas']:7}{line['ttft_p99_s']:12}"
        )
    return lines


def _sum(rows: Iterable[dict[str, object]], key: str) -> float:
    return sum(float(str(row[key])) for row in rows)


def _zero_table(rows: Sequence[dict[str, object]]) -> None:
    print(f"\n{'from no replica':32}{'requests':>9}{'lost':>8}{'predicted s':>13}{'first answer s':>16}{'error':>8}")
    for row in rows:
        name = f"start {row['cold_start_s']:g} s, time {row['episode']}"
        print(
            f"{name:32}{row['requests']:>9}{row['lost']:>8}{row['predicted_s']:>13.1f}{row['first_answer_s']:>16.1f}"
            f"{row['error']:>8.0%}"
        )
    print(f"the first time, a start of {GUESSED_S:g} s is guessed; then it was measured")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    lasts_s, seeds = 3600.0 * asked.hours, range(1, asked.seeds + 1)
    cells = [(arm, seed, lasts_s) for seed in seeds for arm in ARMS]
    print(
        f"{asked.hours:g} h, {asked.seeds} seed(s): {BASE_RPS:g} requests a second, and bursts of "
        f"{BURSTS_RPS[0]:g} to {BURSTS_RPS[1]:g} more; 1 to {MOST} replicas of {REPLICA.slots} slots that take "
        f"{COLD_START_S:g} s to start; promised: the first token within {TTFT_S:g} s"
    )
    with ProcessPoolExecutor(asked.jobs) as pool:
        rows = []
        for row in pool.map(run, *zip(*cells, strict=True)):
            rows.append(row)
            print(
                f"  seed {row['seed']} {row['arm']}: {row['broken']} of {row['requests']} broken, "
                f"{row['replica_s']:.0f} replica-seconds",
                flush=True,
            )
        zero = [row for start_s in REAL_STARTS_S for row in pool.submit(from_zero, start_s, 1).result()]
    lines = _table(rows, asked.seeds)
    _zero_table(zero)
    if asked.json:
        result = {"lines": lines, "rows": rows, "from_zero": zero}
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    return report_of(lines, zero)


def report_of(lines: Sequence[dict[str, object]], zero: Sequence[dict[str, object]]) -> int:
    """Say what was not reached; returns the exit status."""
    by_arm = {str(line["arm"]): line for line in lines}
    faults = []
    for ours, theirs in BEATS:
        one, other = by_arm[ours], by_arm[theirs]
        if _sum([one], "broken") >= _sum([other], "broken") or _sum([one], "replica_s") > _sum([other], "replica_s"):
            faults.append(f"{ours} does not beat {theirs}")
    for row in zero:
        if row["lost"]:
            faults.append(f"lost requests: {row}")
        if row["episode"] != 1 and abs(_sum([row], "error")) > NEAR:
            faults.append(f"first answer off by more than {NEAR:.0%}: {row}")
    for fault in faults:
        print(f"not reached: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
