"""The clairvoyant schedule can really be run, lies below the bound, and finds what is plain to see."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence

import numpy as np
import pytest

from router.simulation.bound import upper_bound
from router.simulation.clairvoyant import Placed, clairvoyant_greedy
from router.simulation.device import Device, Work
from router.simulation.loop import VirtualLoop, run_virtually
from router.simulation.mixes import requests_of
from router.simulation.replica import Truth
from router.simulation.run import truths_of
from router.simulation.service import ServiceOptions, capacity_rps, service_options
from router.simulation.traces import at_rate, load_trace, slice_of
from router.simulation.values import SimRequest
from router.simulation.world import DeviceSpec, RungSpec, World, two_tiers
from router.values.request import Objective

LARGE = RungSpec(variant="large", quality=1.0, prefill_tokens_per_s=100, step_ms=100, batch_slope=0.25)
SMALL = RungSpec(variant="small", quality=0.75, prefill_tokens_per_s=200, step_ms=40, batch_slope=0.25)


async def _serve(
    loop: VirtualLoop, spec: DeviceSpec, own: list[int], options: ServiceOptions
) -> dict[int, list[float]]:
    """Start each when the schedule would, on the simulator's device; return when its chunks came."""
    device = Device(spec, loop)
    waiting: list[tuple[float, int]] = []
    heard: dict[int, list[float]] = {o: [] for o in own}
    prefilling: set[int] = set()

    def start() -> None:
        while waiting and not prefilling and device.held < spec.slots:
            _, o = heapq.heappop(waiting)
            rung = int(options.rung[o])
            tau = float(options.alone_s[o]) / spec.rungs[rung].step_s(1)
            prefilling.add(o)

            def deliver(_: int, o: int = o) -> None:
                prefilling.discard(o)
                heard[o].append(loop.time())
                loop.call_soon(start)

            # Two tokens of that pace end when all would.
            device.enter(Work(rung, float(options.prefill_s[o]), 2 if tau else 1, tau or 1.0, deliver))

    def arrive(o: int) -> None:
        must_start_s = min(options.prefill_end_s[o] - options.prefill_s[o], options.begin_s[o] + 30.0)
        heapq.heappush(waiting, (float(must_start_s), o))
        start()

    for o in own:
        loop.call_at(float(options.begin_s[o]), arrive, o)
    await asyncio.sleep(1e5)
    return heard


def _late(placed: Sequence[Placed], world: World, options: ServiceOptions) -> list[str]:
    place = {key: i for i, key in enumerate(zip(options.request, options.device, options.rung, strict=True))}
    late = []
    for position, spec in enumerate(world.devices):
        own = [place[p.request, p.device, p.rung] for p in placed if p.device == position]
        heard = run_virtually(lambda loop, spec=spec, own=own: _serve(loop, spec, own, options))
        for o in own:
            first_s, last_s = heard[o][0], heard[o][-1]
            limits = (options.prefill_end_s[o], options.end_s[o], options.spread_s[o])
            if any(s > most_s + 1e-5 for s, most_s in zip((first_s, last_s, last_s - first_s), limits, strict=True)):
                late.append(f"{o} on {spec.name}: {first_s}, {last_s}; {limits}")
    return late


@pytest.mark.parametrize("mix", ["proportional", "ttft-tpot", "mixture"])
@pytest.mark.parametrize("load", [0.7, 1.2, 4.0])
def test_the_schedule_runs_on_the_simulators_devices_and_lies_below_the_bound(mix: str, load: float) -> None:
    world = two_tiers()
    rows = slice_of(load_trace("azure-conv"), 120, 3)
    means = np.mean([(row.input_tokens, row.output_tokens) for row in rows], axis=0)
    requests = requests_of(at_rate(rows, load * capacity_rps(world, *means)), mix, 3)
    truths = truths_of(world, requests, 3)
    placed = clairvoyant_greedy(world, requests, truths)
    assert len({p.request for p in placed}) == len(placed)
    bound = upper_bound(world, requests, truths, buckets=50).value
    assert 0.7 * bound < sum(p.value for p in placed) <= bound
    assert not _late(placed, world, service_options(world, requests, truths, late=False))


def _schedule(requests: list[SimRequest], *rungs: RungSpec, slots: int = 1) -> list[tuple[int, int]]:
    world = World(devices=(DeviceSpec(name="edge", slots=slots, rungs=rungs),))
    placed = clairvoyant_greedy(world, requests, [Truth(r.answer_tokens) for r in requests])
    return [(p.request, p.rung) for p in placed]


def test_as_many_as_fit() -> None:
    alike = [SimRequest(0.0, 50, 6, Objective(deadline_s=2.0)) for _ in range(5)]
    assert len(_schedule(alike, LARGE)) == 2


def test_what_is_worth_more_for_its_time_goes_first() -> None:
    long, short = (SimRequest(0.0, 50, n, Objective(deadline_s=2.0)) for n in (16, 6))
    heavy = SimRequest(0.0, 50, 16, Objective(deadline_s=2.0), weight=8.0)
    assert _schedule([long, short], LARGE) == [(1, 0)]
    assert _schedule([heavy, short], LARGE) == [(0, 0)]


def test_the_better_rung_where_there_is_time_for_it() -> None:
    alone = SimRequest(0.0, 50, 6, Objective(deadline_s=2.0))
    assert _schedule([alone], LARGE, SMALL) == [(0, 0)]
    assert _schedule([alone] * 4, LARGE, SMALL) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert _schedule([alone] * 3, LARGE, SMALL) == [(0, 0), (1, 1), (2, 1)]


def test_it_sees_what_is_still_to_come() -> None:
    """A long one would be served at once by anybody who does not know that two short ones follow."""
    long = SimRequest(0.0, 10, 30, Objective(deadline_s=3.1))
    soon = [SimRequest(0.5, 10, 2, Objective(deadline_s=0.5)), SimRequest(1.0, 10, 2, Objective(deadline_s=0.5))]
    assert _schedule([long, *soon], LARGE) == [(1, 0), (2, 0)]


def test_nobody_waits_longer_than_the_router_lets_them() -> None:
    endless = [SimRequest(0.0, 50, 6) for _ in range(40)]
    assert len(_schedule(endless, LARGE)) == 31


def test_it_keeps_deadlines_also_where_late_is_worth_something() -> None:
    late = SimRequest(0.0, 50, 6, Objective(deadline_s=0.9, late_s=9.0))
    assert _schedule([late], LARGE) == []
