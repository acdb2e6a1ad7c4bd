"""A cloud that is slower than the device, as two tiers of a core each are: it must not cost answers to have it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from benchmarks.live.workload import Promises, Scale, asks_of, rows_of
from benchmarks.sim_vs_live import sim_request
from router.simulation.run import simulate
from router.simulation.values import SimRequest
from router.simulation.world import DeviceSpec, LinkSpec, NoiseSpec, RungSpec, World
from router.values.request import Locality
from router.values.settings import RouterSettings

RATE_RPS = 2.0


def rung(variant: str, quality: float, prefill_tokens_per_s: float, step_ms: float, slope: float) -> RungSpec:
    return RungSpec(
        variant=variant,
        quality=quality,
        prefill_tokens_per_s=prefill_tokens_per_s,
        prefill_fixed_ms=10.0,
        step_ms=step_ms,
        batch_slope=slope,
    )


EDGE = DeviceSpec(
    name="edge",
    slots=4,
    rungs=(rung("int8", 0.99, 550, 20.7, 0.12), rung("pruned-int8", 0.69, 550, 19.5, 0.12)),
    prefill_share=0.78,
    decode_share=0.17,
)
CLOUD = DeviceSpec(
    name="cloud",
    slots=8,
    rungs=(rung("fp32", 1.0, 380, 74.0, 0.34), rung("pruned-fp32", 0.69, 420, 60.0, 0.34)),
    remote=True,
    link=LinkSpec(rtt_ms=1.0, uplink_mbps=1000.0),
    prefill_share=0.43,
    decode_share=0.43,
)
WORLD = World(devices=(EDGE, CLOUD), noise=NoiseSpec(sigma=0.1, prior_error_sigma=0.0))


def asked(seed: int) -> list[SimRequest]:
    rows = rows_of("azure-conv", round(RATE_RPS * 90), seed, Scale(rate_rps=RATE_RPS))
    return [sim_request(ask) for ask in asks_of(rows, seed, "slow", Promises())]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_slow_cloud_is_better_than_none(seed: int) -> None:
    requests = asked(seed)
    here = [
        replace(one, objective=msgspec.structs.replace(one.objective, locality=Locality.LOCAL_ONLY)) for one in requests
    ]
    both = simulate(WORLD, requests, RouterSettings(), seed=seed)
    alone = simulate(WORLD, here, RouterSettings(), seed=seed)
    assert both.kept_share >= alone.kept_share
