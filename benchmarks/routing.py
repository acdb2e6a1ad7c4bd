"""How much of the possible each policy keeps: `make bench-routing`, or `python -m benchmarks routing [-- --quick]`.

Every policy of the registry, and plain late binding in several forms (`benchmarks.late_binding`), serve the same slices
of published traces in a simulated world: the real dispatcher, learnt speeds, unknown lengths. A figure is the share of
an upper bound that knows the future (`router.simulation.bound`), in whole answers that kept all that was asked, by
quality and weight; its spread is the standard deviation over the seeds. `clairvoyant-greedy` is a schedule that could
have been run by who knows the future.

`slo-utility+fair` is the default with `[router.fairness]` on: its cost in goodput, and what long answers and a small
tenant beside a big one have of it. The tenants' table is of the proportional mix of the first trace: one request in
ten, of the longer half, is the small tenant's.

What is computed is kept in `.overspill/bench-routing` under a digest of the code: a run that was ended goes on where it
was, and other code begins anew. Bounds depend on no policy and stay.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from benchmarks._stamp import machine
from router.policy.registry import POLICIES
from router.simulation.bound import cached_upper_bound
from router.simulation.clairvoyant import clairvoyant_greedy
from router.simulation.experiment import CLAIRVOYANT, Experiment, begin_worker, requests_for
from router.simulation.mixes import MIXES
from router.simulation.run import simulate, truths_of
from router.simulation.traces import SHIPPED, load_trace
from router.simulation.values import SimRequest
from router.simulation.world import load_world, two_tiers
from router.values.settings import Fairness

HERE = Path(__file__).resolve().parent
STORE = HERE.parent / ".overspill"
PEERS = {
    "late-binding-earliest-deadline": "benchmarks.late_binding.earliest_deadline",
    "late-binding-value-density": "benchmarks.late_binding.value_density",
    "late-binding-value-density-known": "benchmarks.late_binding.value_density_known",
    "late-binding-expected-value": "benchmarks.late_binding.expected_value",
}
TOLD = {"late-binding-value-density-known"}
"""Peers that are told each length, as the caller's cap."""
DEFAULT = "slo-utility"
FAIR = f"{DEFAULT}+fair"
FAIRNESS = {FAIR: Fairness(oldest_first=0.1, callers=4.0)}
TENANTS, TENANTS_OF = "tenants", "proportional"
"""A mix of this benchmark alone, and that of which it is made."""

LOADS = (0.5, 0.9, 1.2, 2.0, 5.0)
MIXES_SHOWN = ("proportional", "one-deadline", "ttft-tpot", "mixture")
LONG_PROMPT_TOKENS, EDGE_PROMPT_TOKENS = 4_000, 1_000  # a trace of longer prompts is scaled to that mean
BUCKETS = 100


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload: a slice of a trace, by seed, with what is asked, at a load."""

    trace: str
    mix: str
    load: float
    seed: int


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation of a cell; the clairvoyant's computes the bound too."""

    cell: Cell
    policy: str
    requests: int
    world: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job.

    Attributes:
        value: Σ weight · quality of what was kept.
        bound: of the cell; 0 but for the clairvoyant.
        kept, kept_long, kept_small: shares of whole answers that kept all: of all, of the quarter of the longest, of
            the small tenant's.
        took_s: processor time.
    """

    value: float
    bound: float
    kept: float
    kept_long: float
    kept_small: float
    took_s: float


def main() -> int:
    arguments = _arguments()
    began_s = time.perf_counter()
    cells = [Cell(*of) for of in itertools.product(arguments.trace, arguments.mix, arguments.load, arguments.seeds)]
    jobs = [
        Job(cell, policy, arguments.requests, arguments.world)
        for policy, cell in itertools.product([CLAIRVOYANT, *arguments.policy], cells)
    ]
    of_tenants = itertools.product([name for name in (DEFAULT, FAIR) if name in arguments.policy], arguments.load)
    shared = [
        Job(Cell(arguments.trace[0], TENANTS, load, seed), policy, arguments.requests, arguments.world)
        for policy, load in of_tenants
        for seed in arguments.seeds
    ]
    outcomes = _run([*jobs, *shared], arguments.jobs)
    tenants = _tenants({job: outcomes.pop(job) for job in shared})
    rows, fairness = _rows(outcomes), _fairness(outcomes)
    _print_tables(rows)
    _print_fairness(fairness)
    _print_tenants(tenants)
    behind = _behind(rows)
    for line in behind:
        print(line)
    meta = {
        "measured": datetime.now(timezone.utc).date().isoformat(),
        "machine": machine(),
        "requests": arguments.requests,
        "seeds": list(arguments.seeds),
        "world": arguments.world or "two_tiers",
        "code": _digest(),
        "processor_s": round(sum(outcome.took_s for outcome in outcomes.values()), 1),
        "took_s": round(time.perf_counter() - began_s, 1),
    }
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"meta": meta, "rows": rows, "fairness": fairness, "tenants": tenants}, indent=1) + "\n"
        )
    return 1 if arguments.check and behind else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*POLICIES, *FAIRNESS, *PEERS]
    parser.add_argument("--trace", nargs="+", default=[*SHIPPED], help="names of shipped traces, or files")
    parser.add_argument("--mix", nargs="+", default=[*MIXES_SHOWN], choices=[*MIXES])
    parser.add_argument("--load", nargs="+", type=float, default=[*LOADS])
    parser.add_argument("--policy", nargs="+", default=every, choices=every)
    parser.add_argument("--seeds", nargs="+", type=int, default=[*range(5)])
    parser.add_argument("--requests", type=int, default=400, help="in each simulation")
    parser.add_argument("--world", default="", help="a WORLD.toml; without: the shipped two tiers")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--quick", action="store_true", help="200 requests, 2 seeds, 3 loads, one trace")
    parser.add_argument("--check", action="store_true", help=f"fail where {DEFAULT} is behind by more than the spread")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.seeds, arguments.load = 200, [0, 1], [0.9, 2.0, 5.0]
        arguments.trace = arguments.trace[:1]
    return arguments


# ── one job ──


def experiment(job: Job) -> Experiment:
    """Return what `overspill simulate` would do for this job."""
    world = load_world(Path(job.world)) if job.world else two_tiers()
    mean_tokens = statistics.fmean(row.input_tokens for row in load_trace(job.cell.trace))
    prompt_tokens = EDGE_PROMPT_TOKENS if mean_tokens > LONG_PROMPT_TOKENS else None
    of = (job.policy,), (job.cell.load,), 1, job.requests
    mix = TENANTS_OF if job.cell.mix == TENANTS else job.cell.mix
    return Experiment(world, job.cell.trace, mix, *of, prompt_tokens=prompt_tokens)


def run_job(job: Job) -> Outcome:
    began_s = time.process_time()
    asked = experiment(job)
    world = asked.world
    requests: Sequence[SimRequest] = requests_for(asked, job.cell.load, job.cell.seed)
    by_length = sorted(range(len(requests)), key=lambda j: requests[j].answer_tokens, reverse=True)
    long = by_length[: max(1, len(requests) // 4)]
    small = by_length[: max(1, len(requests) // 2) : 5]
    if job.cell.mix == TENANTS:
        requests = [replace(asked, caller="small" if j in small else "big") for j, asked in enumerate(requests)]
    bound, value = 0.0, 0.0
    if job.policy == CLAIRVOYANT:
        truths = truths_of(world, requests, job.cell.seed)
        bound = cached_upper_bound(STORE / "bounds", world, requests, truths, buckets=BUCKETS).value
        placed = clairvoyant_greedy(world, requests, truths)
        value, kept = sum(p.value for p in placed), {p.request for p in placed}
    else:
        POLICIES.update(PEERS)
        sent = [_told(request) for request in requests] if job.policy in TOLD else requests
        fairness = FAIRNESS.get(job.policy, world.router.fairness)
        settings = msgspec.structs.replace(world.router, policy=job.policy.partition("+")[0], fairness=fairness)
        result = simulate(world, sent, settings, seed=job.cell.seed)
        value, kept = result.value, {row.index for row in result.rows if row.kept}
    shares = [sum(j in kept for j in part) / len(part) for part in (range(len(requests)), long, small)]
    return Outcome(value, bound, shares[0], shares[1], shares[2], took_s=time.process_time() - began_s)


def _told(request: SimRequest) -> SimRequest:
    return replace(request, max_tokens=request.asked_tokens)


# ── all of them ──


def _run(jobs: Sequence[Job], processes: int) -> dict[Job, Outcome]:
    """Return the outcome of every job; each is kept on disk as soon as it is there."""
    inputs = frozenset(name for job in jobs for name in (job.world, job.cell.trace))
    store = STORE / "bench-routing" / f"{_digest(inputs)}.jsonl"
    store.parent.mkdir(parents=True, exist_ok=True)
    done = dict(_stored(store))
    missing = [job for job in jobs if job not in done]
    began_s = time.perf_counter()
    with store.open("a", encoding="utf-8") as lines:
        for count, (job, outcome) in enumerate(_computed(missing, processes), start=1):
            done[job] = outcome
            lines.write(json.dumps([asdict(job), asdict(outcome)]) + "\n")
            lines.flush()
            _tell(count, len(missing), time.perf_counter() - began_s)
    return {job: done[job] for job in jobs}


def _tell(count: int, total: int, passed_s: float) -> None:
    """Show the progress: on a terminal always, in a log at every twentieth part."""
    if not sys.stderr.isatty() and count * 20 // total == (count - 1) * 20 // total:
        return
    line = f"{count} of {total}, {passed_s / count * (total - count):.0f} s left"
    if sys.stderr.isatty():
        line = f"\r{line:<40}"
    print(line, end="" if sys.stderr.isatty() and count < total else "\n", file=sys.stderr, flush=True)


def _stored(store: Path) -> Iterator[tuple[Job, Outcome]]:
    if not store.exists():
        return
    for line in store.read_text(encoding="utf-8").splitlines():
        try:
            job, outcome = json.loads(line)
        except ValueError:  # the last line of a run that was ended
            continue
        yield Job(**{**job, "cell": Cell(**job["cell"])}), Outcome(**outcome)


def _computed(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, Outcome]]:
    if processes <= 1:
        yield from ((job, run_job(job)) for job in jobs)
        return
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    with multiprocessing.get_context("spawn").Pool(processes, initializer=begin_worker) as pool:
        yield from pool.imap_unordered(_run_named, jobs)


def _run_named(job: Job) -> tuple[Job, Outcome]:
    return job, run_job(job)


def _digest(inputs: Iterable[str] = ()) -> str:
    """Return a digest of the code, the shipped data and the files among `inputs`."""
    digest = hashlib.sha256()
    root = HERE.parent
    files = [*root.glob("router/**/*.py"), *root.glob("router/simulation/*/*"), *HERE.glob("late_binding/*.py")]
    for path in sorted({*files, Path(__file__), *map(Path, filter(None, inputs))}):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# ── tables ──

Row = dict[str, Any]


def _rows(outcomes: Mapping[Job, Outcome]) -> list[Row]:
    """Mean and spread over the seeds of each share of the bound."""
    bounds = {job.cell: outcome.bound for job, outcome in outcomes.items() if job.policy == CLAIRVOYANT}
    shares: dict[tuple[str, str, float, str], list[float]] = defaultdict(list)
    for job, outcome in outcomes.items():
        cell = job.cell
        shares[cell.trace, cell.mix, cell.load, job.policy].append(
            outcome.value / bounds[cell] if bounds[cell] else 1.0
        )
    names = ("trace", "mix", "load", "policy")
    return [
        {
            **dict(zip(names, key, strict=True)),
            "share": round(statistics.fmean(of), 4),
            "spread": round(statistics.pstdev(of), 4),
        }
        for key, of in shares.items()
    ]


def _by_policy_and_load(outcomes: Mapping[Job, Outcome]) -> Mapping[tuple[str, float], Sequence[Outcome]]:
    found: dict[tuple[str, float], list[Outcome]] = defaultdict(list)
    for job, outcome in outcomes.items():
        found[job.policy, job.cell.load].append(outcome)
    return found


def _fairness(outcomes: Mapping[Job, Outcome]) -> list[Row]:
    """Share of answers kept, of all and of the longest quarter, over all traces, mixes and seeds."""
    return [
        {
            "policy": policy,
            "load": load,
            "kept": round(statistics.fmean(o.kept for o in of), 4),
            "kept_longest_quarter": round(statistics.fmean(o.kept_long for o in of), 4),
        }
        for (policy, load), of in _by_policy_and_load(outcomes).items()
    ]


def _tenants(outcomes: Mapping[Job, Outcome]) -> list[Row]:
    """Value, and shares of answers kept, of both tenants and of the small one, over the seeds."""
    return [
        {
            "policy": policy,
            "load": load,
            "value": round(statistics.fmean(o.value for o in of), 2),
            "kept": round(statistics.fmean(o.kept for o in of), 4),
            "kept_small": round(statistics.fmean(o.kept_small for o in of), 4),
        }
        for (policy, load), of in _by_policy_and_load(outcomes).items()
    ]


def _print_tenants(rows: Sequence[Row]) -> None:
    if rows:
        print("\ntwo tenants: share of answers kept, of both / of the small one, by load; first trace, proportional")
    for policy in dict.fromkeys(row["policy"] for row in rows):
        of = [
            f"{row['load']:>6}: {row['kept']:.2f} /{row['kept_small']:.2f}" for row in rows if row["policy"] == policy
        ]
        print(f"{policy:<34}" + "".join(of))


def _print_tables(rows: Iterable[Row]) -> None:
    tables: dict[tuple[str, str], dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        tables[row["trace"], row["mix"]][row["policy"]][row["load"]] = row
    for (trace, mix), policies in tables.items():
        loads = sorted({load for of in policies.values() for load in of}, key=float)
        print(f"\n{trace} · {mix}: share of the bound ± spread over the seeds, by load")
        print(f"{'':<34}" + "".join(f"{load:>13}" for load in loads))
        ranked = sorted(policies.items(), key=lambda item: -sum(row["share"] for row in item[1].values()))
        for policy, of in ranked:
            print(f"{policy:<34}" + "".join(f"{of[x]['share']:>7.3f} ±{of[x]['spread']:.3f}" for x in loads))


def _print_fairness(rows: Sequence[Row]) -> None:
    loads = sorted({row["load"] for row in rows})
    policies = dict.fromkeys(row["policy"] for row in rows)
    by_key = {(row["policy"], row["load"]): row for row in rows}
    print("\nshare of answers kept, of all / of the quarter of the longest, by load; all traces and mixes")
    print(f"{'':<34}" + "".join(f"{load:>13}" for load in loads))
    for policy in policies:
        of = [by_key[policy, load] for load in loads]
        print(f"{policy:<34}" + "".join(f"{row['kept']:>7.2f} /{row['kept_longest_quarter']:>4.2f}" for row in of))


def _behind(rows: Sequence[Row]) -> list[str]:
    """Say where the default is behind the first by more than that one's spread over the seeds."""
    cells: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row["policy"] not in {CLAIRVOYANT, *FAIRNESS}:
            cells[row["trace"], row["mix"], row["load"]].append(row)
    lines = []
    for cell, of in cells.items():
        own = next((row for row in of if row["policy"] == DEFAULT), None)
        first = max(of, key=lambda row: row["share"])
        if own is not None and first["share"] - own["share"] > max(first["spread"], own["spread"]):
            where = " · ".join(str(part) for part in cell)
            lines.append(f"{where}: {DEFAULT} {own['share']:.3f}, behind {first['policy']} {first['share']:.3f}")
    total = len(cells)
    if any(row["policy"] == DEFAULT for row in rows):
        print(f"\n{DEFAULT}: first, or within the spread of the first, in {total - len(lines)} of {total} cells")
    return lines


if __name__ == "__main__":
    sys.exit(main())
