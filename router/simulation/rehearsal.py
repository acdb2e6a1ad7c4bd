"""What a profiled build counts (`setup.py`): all policies, above all the default, from light load to far too much."""

from __future__ import annotations

import msgspec

from router.policy.registry import POLICIES
from router.simulation.experiment import Experiment, begin_worker, requests_for
from router.simulation.mixes import MIXES
from router.simulation.run import simulate
from router.simulation.world import find_world
from router.values.settings import RouterSettings

LOADS = (0.5, 1.2, 5.0)


def rehearse(requests: int = 200, requests_of_others: int = 40) -> int:
    """Simulate in this process, with requests of the default policy and of each other one a load and mix.

    Returns:
        How many requests were simulated.
    """
    world = find_world("two_tiers")
    default, count = RouterSettings().policy, 0
    for policy in POLICIES:
        asked_for = requests if policy == default else requests_of_others
        for mix in MIXES:
            experiment = Experiment(world, "azure-conv", mix, (policy,), LOADS, 1, asked_for)
            for task in experiment.tasks():
                asked = requests_for(experiment, task.load, task.seed)
                simulate(world, asked, msgspec.structs.replace(world.router, policy=task.policy), seed=task.seed)
                count += len(asked)
    return count


if __name__ == "__main__":
    begin_worker()
    rehearse()
