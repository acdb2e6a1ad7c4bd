"""Policies side by side: a world and a trace at several loads, each with several seeds, in as many processes as wanted.

A load of 1 keeps all devices busy on their best rungs in full batches (`router.simulation.service.capacity_rps`).
"""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from router.base.errors import ConfigError
from router.base.garbage import spare_what_was_imported
from router.policy.registry import load_policy
from router.simulation.mixes import MIXES, requests_of
from router.simulation.run import Result, simulate, truths_of
from router.simulation.service import capacity_rps
from router.simulation.traces import TraceRow, at_rate, load_trace, scale_inputs, slice_of
from router.simulation.values import SimRequest, SimRow
from router.simulation.world import World

BOUND = "bound"
CLAIRVOYANT = "clairvoyant-greedy"
NOBODY = "nobody"
"""Where a request went that no rung finished."""
MOMENTS = 40
"""Bins of time in which an experiment counts where requests went."""
_YOUNG = 50_000  # new objects, after which a worker looks for garbage among them: nobody waits for it meanwhile


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to simulate.

    Attributes:
        trace: name of a shipped trace, or a path.
        prompt_tokens: mean that prompts are scaled to; None leaves them as they are, cut to the largest window.
        requests: of each run: a slice of the trace that the seed chooses.
        bound: also solve the upper bound and the clairvoyant schedule.
        cache: where solved bounds are kept, None for nowhere.
    """

    world: World
    trace: str
    mix: str
    policies: tuple[str, ...]
    loads: tuple[float, ...]
    seeds: int
    requests: int
    prompt_tokens: float | None = None
    bound: bool = False
    cache: Path | None = None

    def check(self) -> None:
        """Refuse what no run could do, before the first.

        Raises:
            ConfigError: an unknown policy, mix or trace, or too few rows.
        """
        for policy in self.policies:
            load_policy(policy)
        if self.mix not in MIXES:
            raise ConfigError(f"mix: {self.mix!r} is not known; known: {', '.join(MIXES)}", param="mix")
        slice_of(load_trace(self.trace), self.requests, 0)

    def tasks(self) -> list[Task]:
        names = (*self.policies, *((BOUND, CLAIRVOYANT) if self.bound else ()))
        return [Task(name, load, seed) for load in self.loads for name in names for seed in range(self.seeds)]


class Task(NamedTuple):
    """One run: a policy, or one of the lines that know the future."""

    policy: str
    load: float
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """What came out of one task.

    Attributes:
        value: Σ value of the requests; most: Σ of their weights.
        lasted_s: from the first arrival to the last, in seconds.
        kept: requests that got all they were promised; whole: those that got whole answers.
        ttft_s, finish_s: of those that got a first text, and a whole answer.
        served: requests by `tier/variant` of a whole answer, or `NOBODY`.
        moments: the same counts, in `MOMENTS` bins of time by arrival.
        long_kept: share kept of the tenth of requests with the longest answers.
    """

    task: Task
    requests: int
    value: float
    most: float
    lasted_s: float
    kept: int = 0
    whole: int = 0
    quality: float = 0.0
    decisions: float = 0.0
    ttft_s: tuple[float, ...] = ()
    finish_s: tuple[float, ...] = ()
    outcomes: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    moments: tuple[Counter[str], ...] = ()
    long_kept: float = 0.0


def runs_of(experiment: Experiment, jobs: int) -> Iterator[Run]:
    """Yield each run as it ends.

    Args:
        jobs: processes that work at once; 1 works in this one.
    """
    tasks = experiment.tasks()
    if jobs == 1:
        yield from (run_task(experiment, task) for task in tasks)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=spawn, initializer=begin_worker) as pool:
        waiting = [pool.submit(run_task, experiment, task) for task in tasks]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def begin_worker() -> None:
    """Make ready a process that simulates: what it has imported is no garbage, and what it makes hardly ever is."""
    spare_what_was_imported()
    gc.set_threshold(_YOUNG)


def run_task(experiment: Experiment, task: Task) -> Run:
    """Do one task."""
    requests = requests_for(experiment, task.load, task.seed)
    world = experiment.world
    lasted_s = max(requests[-1].arrival_s, 1e-9)
    most = sum(request.weight for request in requests)
    if task.policy == BOUND:
        return Run(task, len(requests), _bound(experiment, requests, task.seed), most, lasted_s)
    if task.policy == CLAIRVOYANT:
        return _clairvoyant(experiment, requests, task, most)
    settings = msgspec.structs.replace(world.router, policy=task.policy)
    return _run(task, simulate(world, requests, settings, seed=task.seed), most, lasted_s)


def requests_for(experiment: Experiment, load: float, seed: int) -> tuple[SimRequest, ...]:
    """Return the requests of one run: the same for every policy."""
    world = experiment.world
    window = max(rung.context_tokens for device in world.devices for rung in device.rungs)
    rows = slice_of(_trace(experiment.trace), experiment.requests, seed)
    rows = scale_inputs(rows, experiment.prompt_tokens, window)
    prompt = float(np.mean([row.input_tokens for row in rows]))
    answer = float(np.mean([row.output_tokens for row in rows]))
    return requests_of(at_rate(rows, load * capacity_rps(world, prompt, answer)), experiment.mix, seed)


@lru_cache(4)
def _trace(name: str) -> tuple[TraceRow, ...]:
    return load_trace(name)


def _bound(experiment: Experiment, requests: Sequence[SimRequest], seed: int) -> float:
    from router.simulation.bound import cached_upper_bound, upper_bound  # noqa: PLC0415 (SciPy is an extra)

    truths = truths_of(experiment.world, requests, seed)
    if experiment.cache is None:
        return upper_bound(experiment.world, requests, truths).value
    return cached_upper_bound(experiment.cache, experiment.world, requests, truths).value


def _clairvoyant(experiment: Experiment, requests: Sequence[SimRequest], task: Task, most: float) -> Run:
    from router.simulation.clairvoyant import clairvoyant_greedy  # noqa: PLC0415 (belongs to the bound's extra)

    world = experiment.world
    placed = clairvoyant_greedy(world, requests, truths_of(world, requests, task.seed))
    devices = world.devices
    served = Counter(
        f"{'cloud' if devices[p.device].remote else 'edge'}/{devices[p.device].rungs[p.rung].variant}" for p in placed
    )
    served[NOBODY] = len(requests) - len(placed)
    return Run(
        task,
        len(requests),
        sum(p.value for p in placed),
        most,
        max(requests[-1].arrival_s, 1e-9),
        kept=len(placed),
        whole=len(placed),
        quality=float(np.mean([devices[p.device].rungs[p.rung].quality for p in placed])) if placed else 0.0,
        served=served,
    )


def _run(task: Task, result: Result, most: float, lasted_s: float) -> Run:
    rows = result.rows
    moments = [Counter[str]() for _ in range(MOMENTS)]
    for row in rows:
        moments[min(int(row.arrival_s / lasted_s * MOMENTS), MOMENTS - 1)][_where(row)] += 1
    longest = sorted(rows, key=lambda row: row.answer_tokens)[-max(len(rows) // 10, 1) :]
    whole = [row for row in rows if row.whole]
    return Run(
        task,
        len(rows),
        result.value,
        most,
        lasted_s,
        kept=sum(row.kept for row in rows),
        whole=len(whole),
        quality=float(np.mean([row.quality for row in whole])) if whole else 0.0,
        decisions=result.decisions_a_request,
        ttft_s=tuple(row.ttft_s for row in rows if row.ttft_s is not None),
        finish_s=tuple(row.finish_s for row in whole),
        outcomes=Counter(row.outcome for row in rows),
        served=Counter(_where(row) for row in rows),
        moments=tuple(moments),
        long_kept=sum(row.kept for row in longest) / len(longest),
    )


def _where(row: SimRow) -> str:
    return f"{row.tier}/{row.variant}" if row.whole else NOBODY


@dataclass(frozen=True, slots=True)
class Cell:
    """All seeds of one policy at one load.

    Attributes:
        share: mean over the seeds of value / bound, or of value / Σ weight where no bound was solved.
        spread: standard deviation of that over the seeds.
        goodput_rps: completions a second that kept all they were promised.
        ttft_s, finish_s: p50 and p95; None where nobody got so far.
        refused: share of requests that were turned away: shed, evicted, or no capacity in time.
    """

    policy: str
    load: float
    share: float
    spread: float
    goodput_rps: float
    kept: float
    whole: float
    quality: float
    ttft_s: tuple[float, float] | None
    finish_s: tuple[float, float] | None
    refused: float
    decisions: float
    long_kept: float
    served: dict[str, float]
    outcomes: dict[str, float]
    moments: tuple[dict[str, float], ...]


def cells_of(experiment: Experiment, runs: Sequence[Run]) -> list[Cell]:
    """Gather the runs by load and policy; the bound itself is what the others are shares of."""
    bounds = {(run.task.load, run.task.seed): run.value for run in runs if run.task.policy == BOUND}
    grouped: dict[tuple[float, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.task.seed):
        grouped.setdefault((run.task.load, run.task.policy), []).append(run)
    names = (*experiment.policies, CLAIRVOYANT, BOUND)
    wanted = [(load, name) for load in experiment.loads for name in names]
    return [_cell(name, load, grouped[load, name], bounds) for load, name in wanted if (load, name) in grouped]


def _cell(policy: str, load: float, runs: Sequence[Run], bounds: dict[tuple[float, int], float]) -> Cell:
    shares = [run.value / max(bounds.get((load, run.task.seed), run.most), 1e-12) for run in runs]
    total = sum(run.requests for run in runs)
    served = sum((r.served for r in runs), Counter[str]())
    outcomes = sum((r.outcomes for r in runs), Counter[str]())
    moments = [sum((r.moments[at] for r in runs if r.moments), Counter[str]()) for at in range(MOMENTS)]
    gone = ("shed", "unavailable", "evicted")
    return Cell(
        policy=policy,
        load=load,
        share=float(np.mean(shares)),
        spread=float(np.std(shares)),
        goodput_rps=sum(run.kept for run in runs) / sum(run.lasted_s for run in runs),
        kept=sum(run.kept for run in runs) / total,
        whole=sum(run.whole for run in runs) / total,
        quality=sum(run.quality * run.whole for run in runs) / max(sum(run.whole for run in runs), 1),
        ttft_s=_p50_p95([s for run in runs for s in run.ttft_s]),
        finish_s=_p50_p95([s for run in runs for s in run.finish_s]),
        refused=sum(outcomes[name] for name in gone) / total,
        decisions=sum(run.decisions * run.requests for run in runs) / total,
        long_kept=float(np.mean([run.long_kept for run in runs])),
        served={name: count / total for name, count in sorted(served.items())},
        outcomes={name: count / total for name, count in sorted(outcomes.items())},
        moments=tuple({name: count / max(m.total(), 1) for name, count in sorted(m.items())} for m in moments),
    )


def _p50_p95(values_s: Sequence[float]) -> tuple[float, float] | None:
    if not values_s:
        return None
    p50, p95 = np.percentile(values_s, (50, 95))
    return float(p50), float(p95)
