"""A fleet of devices loses its cloud and finds it again, all with work waiting: with credits of admission and without.

    python -m benchmarks reconnect -- [--devices N] [--seeds N] [--after S]

On virtual time: the real dispatcher of the cloud, and on each device the real account of credits and schedule of polls
(`benchmarks/_fleet.py`). Three arms over the same requests: credits; none, with the default bound of the cloud's queue;
none, with a queue that holds the whole fleet. Those without are observed for a minute at most after the return: the
stampede fills it, and every device polls once in each of its seconds, which is what takes the time. `ratio` is the p99
of the wait in the cloud's queue after the link is back, over that of the same arm in its own steady state, and over
that of the steady state with credits.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from benchmarks._fleet import Scenario, Seen, live_through
from router.base import logs
from router.simulation.loop import run_virtually

WORLD = Scenario(
    credits=True,
    devices=10_000,
    slots=64,
    utilisation=0.85,
    service_s=1.0,
    service_sigma=0.6,
    rtt_s=0.06,
    warm_up_s=20.0,
    steady_s=60.0,
    cut_s=60.0,
    after_s=120.0,
    max_queue=64,
    seed=1,
)
STAMPEDE_S = 60.0
ARMS = {
    "credits": {"credits": True},
    "no credits": {"credits": False},
    "no credits, deep queue": {"credits": False, "max_queue": 1_000_000},
}


@logs.at_least(logging.CRITICAL)
def run(scenario: Scenario) -> dict[str, object]:
    """Let one arm live through it; returns its figures."""
    began_s = time.process_time()
    seen = run_virtually(lambda loop: live_through(scenario, loop))
    steady = (scenario.warm_up_s, scenario.warm_up_s + scenario.steady_s)
    after = (scenario.back_s, scenario.end_s)
    return {
        "seed": scenario.seed,
        "after_s": scenario.after_s,
        "steady": _act(seen, steady),
        "minute_after": _act(seen, (scenario.back_s, scenario.back_s + 60.0)),
        "after": _act(seen, after),
        "backlog_at_return": _held(seen, scenario.back_s),
        "backlog_at_end": _held(seen, scenario.end_s - 1),
        "backlog_gone_s": _gone_s(seen, scenario),
        "fairness": _fairness(seen, scenario),
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def _act(seen: Seen, act: tuple[float, float]) -> dict[str, float]:
    began_s, ended_s = act
    lasted_s = ended_s - began_s
    waits = np.array([wait_s for at_s, wait_s in seen.waits if began_s <= at_s < ended_s] or [0.0])
    depths = np.array([depth for at_s, depth in seen.depths if began_s <= at_s < ended_s] or [0])
    return {
        "wait_mean_s": round(float(waits.mean()), 4),
        "wait_p99_s": round(float(np.quantile(waits, 0.99)), 4),
        "wait_max_s": round(float(waits.max()), 4),
        "queue_p99": float(np.quantile(depths, 0.99)),
        "queue_max": int(depths.max()),
        "served_per_s": round(sum(began_s <= at_s < ended_s for at_s, _, _ in seen.done) / lasted_s, 2),
        "refused_per_s": round(sum(began_s <= at_s < ended_s for at_s in seen.refused) / lasted_s, 2),
        "polls_per_s": round(sum(began_s <= at_s < ended_s for at_s in seen.polls) / lasted_s, 1),
        "polls_most_in_a_second": _most_in_a_second(seen.polls, act),
    }


def _most_in_a_second(times_s: Sequence[float], act: tuple[float, float]) -> int:
    inside = [int(at_s) for at_s in times_s if act[0] <= at_s < act[1]]
    return int(np.bincount(np.array(inside) - int(act[0])).max()) if inside else 0


def _held(seen: Seen, at_s: float) -> int:
    """Requests that wait on devices."""
    return next((held for when_s, held in seen.held if when_s >= at_s), seen.held[-1][1])


def _gone_s(seen: Seen, scenario: Scenario) -> float | None:
    """Return how long it took until no more requests wait on devices than ever did in steady state."""
    usual = max(held for at_s, held in seen.held if scenario.warm_up_s <= at_s < scenario.warm_up_s + scenario.steady_s)
    gone = (at_s for at_s, held in seen.held if at_s > scenario.back_s + 1 and held <= usual)
    found_s = next(gone, None)
    return None if found_s is None else round(found_s - scenario.back_s, 1)


def _fairness(seen: Seen, scenario: Scenario) -> dict[str, float]:
    """Say how evenly the devices were served after the return: Jain's index, and when each got its first answer."""
    after = [(at_s, device) for at_s, device, _ in seen.done if at_s >= scenario.back_s]
    served = np.bincount([device for _, device in after], minlength=scenario.devices)
    most = max(1.0, len(after) / scenario.devices)
    counted = np.minimum(served, np.ceil(most))
    first: dict[int, float] = {}
    for at_s, device in after:
        first.setdefault(device, at_s - scenario.back_s)
    return {
        "served_share": round(float((served > 0).mean()), 4),
        "twice_while_others_wait": round(float((served > counted).sum() / max(len(first), 1)), 4),
        "jain": round(float(served.sum() ** 2 / (len(served) * (served**2).sum())), 4) if served.any() else 0.0,
        "first_answer_p50_s": round(statistics.median(first.values()), 1) if first else float("nan"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--devices", type=int, default=WORLD.devices)
    parser.add_argument("--slots", type=int, default=WORLD.slots)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--after", type=float, default=WORLD.after_s, help="seconds observed once the link is back")
    asked = parser.parse_args()
    world = replace(WORLD, devices=asked.devices, slots=asked.slots, after_s=asked.after)
    print(f"{world.devices} devices, {world.slots} slots, {world.cut_s:g} s without a link, {asked.seeds} seed(s)")
    print(f"{'':24}{'wait p99 s':>21}{'ratio':>14}{'queue p99':>12}{'served/s':>16}{'refused/s':>11}{'polls/s':>9}")
    results: dict[str, list[dict[str, object]]] = {}
    steady_s = 0.0
    with ProcessPoolExecutor() as pool:  # time is virtual: what runs beside it changes nothing
        running = {
            name: [pool.submit(run, _arm(world, name, 1 + seed)) for seed in range(asked.seeds)] for name in ARMS
        }
        for name, futures in running.items():
            results[name] = runs = [future.result() for future in futures]
            steady_s = steady_s or _mean(runs, "steady", "wait_p99_s")
            _print(name, runs, steady_s)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"world": asdict(world), "arms": results}, indent=1) + "\n")
    return 0


def _arm(world: Scenario, name: str, seed: int) -> Scenario:
    scenario = replace(world, seed=seed, **ARMS[name])  # type: ignore[arg-type]
    return scenario if scenario.credits else replace(scenario, after_s=min(scenario.after_s, STAMPEDE_S))


def _mean(runs: Sequence[dict[str, object]], act: str, figure: str) -> float:
    return statistics.fmean(one[act][figure] for one in runs)  # type: ignore[index]


def _print(name: str, runs: Sequence[dict[str, object]], steady_with_credits_s: float) -> None:
    def both(figure: str) -> tuple[float, float]:
        return _mean(runs, "steady", figure), _mean(runs, "after", figure)

    before_s, after_s = both("wait_p99_s")
    own, other = after_s / max(before_s, 1e-3), after_s / max(steady_with_credits_s, 1e-3)
    queue, served = both("queue_p99"), both("served_per_s")
    print(
        f"{name:24}{before_s:9.3f} → {after_s:8.3f}{own:7.1f}{other:7.1f}{queue[0]:5.0f} → {queue[1]:4.0f}"
        f"{served[0]:7.1f} → {served[1]:5.1f}{both('refused_per_s')[1]:11.1f}{both('polls_per_s')[1]:9.0f}",
        flush=True,
    )
    for one in runs:
        gone = one["backlog_gone_s"]
        left = f"gone after {gone:g} s" if gone is not None else f"{one['backlog_at_end']} left"
        fair: dict[str, float] = one["fairness"]  # type: ignore[assignment]
        print(
            f"  seed {one['seed']}: backlog {one['backlog_at_return']}, {left}; served {fair['served_share']:.0%} of "
            f"the devices, Jain {fair['jain']:.2f}; {one['cpu_s']} s of CPU"
        )


if __name__ == "__main__":
    sys.exit(main())
