"""One build's share of `benchmarks.compiled`: simulates in this process, and tells how fast and with which rows."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import msgspec

from router.base.build import build_of
from router.policy.registry import POLICIES
from router.simulation.experiment import Experiment, begin_worker, requests_for
from router.simulation.run import simulate
from router.simulation.values import SimRow
from router.simulation.world import find_world
from router.values.prediction import Prediction

MIXES = ("mixture", "proportional")
LOADS = (0.9, 2.0, 5.0)


def plain(value: object) -> object:
    """Return a value for JSON; compiled or not, a number is the same number, whether it is written 5 or 5.0."""
    if isinstance(value, Prediction):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def told(row: SimRow) -> str:
    return json.dumps({name: plain(getattr(row, name)) for name in row.__struct_fields__})


def main() -> None:
    """Simulate, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--policy", nargs="+", default=["slo-utility"], choices=[*POLICIES])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--tell", action="store_true", help="only which build this is")
    arguments = parser.parse_args()
    found: dict[str, object] = {"router": build_of().name}
    if not arguments.tell:
        found |= measure(arguments.policy, arguments.requests)
    arguments.json.write_text(json.dumps(found) + "\n")


def measure(policies: list[str], requests: int) -> dict[str, object]:
    world = find_world("two_tiers")
    begin_worker()
    digest, count, took_s = hashlib.sha256(), 0, 0.0
    for mix in MIXES:
        experiment = Experiment(world, "azure-conv", mix, tuple(policies), LOADS, 1, requests)
        for task in experiment.tasks():
            asked = requests_for(experiment, task.load, task.seed)
            settings = msgspec.structs.replace(world.router, policy=task.policy)
            began_s = time.process_time()
            result = simulate(world, asked, settings, seed=task.seed)
            took_s += time.process_time() - began_s
            count += len(asked)
            for row in result.rows:
                digest.update(told(row).encode())
    return {"requests_per_s": count / took_s, "sha256": digest.hexdigest()}


if __name__ == "__main__":
    main()
