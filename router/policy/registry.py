"""Policies by name; choosing one imports that one only.

| name | what it does |
|---|---|
| `slo-utility` | the default: the most value kept a device-second, late bound |
| `quality-in-objective` | the best quality that keeps the objective; among near equals the device first |
| `local-first` | the device while any of its rungs keeps the objective, even a smaller one; then the upstream |
| `cloud-first` | remote replicas while they keep the objective, the device when they do not |
| `local-only` | never leaves this tier, whatever the request's locality says |
| `random` | any replica of the best rung; this one and those below never step down and never give up |
| `least-load` | the replica with the fewest requests for each slot |
| `peak-ewma` | the replica of least peak-sensitive latency × outstanding requests |
| `lowest-latency` | the soonest predicted first token |
| `min-completion` | the soonest predicted last token |
| `threshold` | the device while it has a free slot, then the upstream |
| `earliest-deadline` | late binding, the earliest deadline first |
| `smallest-rung` | the smallest rung that keeps the objective and the request's quality floor, the device first |
"""

from __future__ import annotations

import importlib

from router.base.errors import ConfigError
from router.policy.protocol import Policy

POLICIES = {
    "slo-utility": "router.policy.slo_utility",
    "quality-in-objective": "router.policy.quality_in_objective",
    "cloud-first": "router.policy.cloud_first",
    "local-first": "router.policy.local_first",
    "local-only": "router.policy.local_only",
    "random": "router.policy.random_choice",
    "least-load": "router.policy.least_load",
    "peak-ewma": "router.policy.peak_ewma",
    "lowest-latency": "router.policy.lowest_latency",
    "min-completion": "router.policy.min_completion",
    "threshold": "router.policy.threshold",
    "earliest-deadline": "router.policy.earliest_deadline",
    "smallest-rung": "router.policy.smallest_rung",
}


def load_policy(name: str) -> Policy:
    """Return the policy called `name`.

    Raises:
        ConfigError: there is none of that name; lists those there are.
    """
    if name not in POLICIES:
        raise ConfigError(
            f"router.policy: {name!r} is not known; known: {', '.join(sorted(POLICIES))}", param="router.policy"
        )
    policy: Policy = importlib.import_module(POLICIES[name]).POLICY
    return policy
