"""The bound: no schedule of tiny cases beats it, it is met where the relaxation is tight, policies stay below it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from router.simulation import bound as bound_module
from router.simulation.bound import BoundError, cached_upper_bound, upper_bound
from router.simulation.device import Device, Work
from router.simulation.loop import VirtualLoop, run_virtually
from router.simulation.mixes import MIXES, requests_of
from router.simulation.replica import Truth
from router.simulation.run import simulate, truths_of
from router.simulation.service import capacity_rps, service_options
from router.simulation.traces import at_rate, load_trace, slice_of
from router.simulation.values import SimRequest
from router.simulation.world import DeviceSpec, LinkSpec, RungSpec, World, two_tiers
from router.values.request import Locality, Objective

LARGE = RungSpec(variant="large", quality=1.0, prefill_tokens_per_s=100, step_ms=100, batch_slope=0.25)
SMALL = RungSpec(variant="small", quality=0.75, prefill_tokens_per_s=200, step_ms=40, batch_slope=0.25)


def _world(slots: int = 1, rungs: tuple[RungSpec, ...] = (LARGE,), count: int = 1) -> World:
    return World(devices=tuple(DeviceSpec(name=f"d{i}", slots=slots, rungs=rungs) for i in range(count)))


def _truths(requests: Sequence[SimRequest]) -> list[Truth]:
    return [Truth(request.answer_tokens) for request in requests]


def _schedules(requests: Sequence[SimRequest], world: World) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Every order of every subset, on every rung: (request, device, rung)."""
    places = [(d, r) for d, device in enumerate(world.devices) for r in range(len(device.rungs))]
    for size in range(1, len(requests) + 1):
        for order in itertools.permutations(range(len(requests)), size):
            for where in itertools.product(places, repeat=size):
                yield tuple((j, d, r) for j, (d, r) in zip(order, where, strict=True))


def _kept(request: SimRequest, first_s: float, last_s: float, tokens: int) -> bool:
    asked, waited_s = request.objective, first_s - request.arrival_s
    return (
        (asked.ttft_s is None or waited_s <= asked.ttft_s + 1e-9)
        and (asked.deadline_s is None or last_s - request.arrival_s <= asked.deadline_s + 1e-9)
        and (asked.tpot_s is None or last_s - first_s <= asked.tpot_s * (tokens - 1) + 1e-9)
    )


async def _serve(
    loop: VirtualLoop, device: Device, own: list[tuple[int, int]], requests: Sequence[SimRequest], truths: list[Truth]
) -> dict[int, list[float]]:
    """Start each in order, as soon as it is there and a slot is free; return when its chunks came."""
    heard: dict[int, list[float]] = {j: [] for j, _ in own}
    to_come = list(own)

    def start() -> None:
        while to_come and device.held < device.spec.slots and requests[to_come[0][0]].arrival_s <= loop.time():
            j, r = to_come.pop(0)
            request, rung = requests[j], device.spec.rungs[r]
            prefill_s = request.prompt_tokens / rung.prefill_tokens_per_s * truths[j].prefill_noise

            def deliver(_: int, j: int = j) -> None:
                heard[j].append(loop.time())
                loop.call_soon(start)

            device.enter(Work(r, prefill_s, request.asked_tokens, truths[j].pace_noise, deliver))
        if to_come and device.held < device.spec.slots:
            loop.call_at(requests[to_come[0][0]].arrival_s, start)

    start()
    await asyncio.sleep(1e4)
    return heard


def _run(
    schedule: Sequence[tuple[int, int, int]], requests: Sequence[SimRequest], truths: list[Truth], world: World
) -> float:
    """Value of one schedule on the simulator's own devices."""
    value = 0.0
    for position, spec in enumerate(world.devices):
        own = [(j, r) for j, d, r in schedule if d == position]
        heard = run_virtually(lambda loop, spec=spec, own=own: _serve(loop, Device(spec, loop), own, requests, truths))
        for j, r in own:
            request, times_s = requests[j], heard[j]
            kept = bool(times_s) and _kept(request, times_s[0], times_s[-1], request.asked_tokens)
            value += request.weight * spec.rungs[r].quality * kept
    return value


def _best(requests: Sequence[SimRequest], truths: list[Truth], world: World) -> float:
    return max(_run(schedule, requests, truths, world) for schedule in _schedules(requests, world))


def _one_slot_best(requests: Sequence[SimRequest], truths: list[Truth], world: World) -> float:
    """The same for one device of one slot, in closed form."""
    best = 0.0
    for schedule in _schedules(requests, world):
        free_s, value = 0.0, 0.0
        for j, _, r in schedule:
            request, rung, truth = requests[j], world.devices[0].rungs[r], truths[j]
            first_s = max(free_s, request.arrival_s)
            first_s += request.prompt_tokens / rung.prefill_tokens_per_s * truth.prefill_noise
            free_s = first_s + (request.asked_tokens - 1) * rung.step_s(1) * truth.pace_noise
            value += request.weight * rung.quality * _kept(request, first_s, free_s, request.asked_tokens)
        best = max(best, value)
    return best


def _chance(seed: int, count: int) -> tuple[list[SimRequest], list[Truth]]:
    chance = random.Random(seed)
    objectives = (
        lambda: Objective(deadline_s=chance.uniform(0.4, 4.0)),
        lambda: Objective(ttft_s=chance.uniform(0.3, 2.0), tpot_s=chance.uniform(0.05, 0.3)),
        lambda: Objective(ttft_s=chance.uniform(0.3, 2.0), deadline_s=chance.uniform(1.0, 4.0)),
    )
    requests = sorted(
        (
            SimRequest(
                chance.choice((0.0, chance.uniform(0, 3))),
                chance.randint(5, 80),
                chance.randint(1, 15),
                chance.choice(objectives)(),
                weight=chance.choice((0.5, 1.0, 2.0)),
            )
            for _ in range(count)
        ),
        key=lambda request: request.arrival_s,
    )
    noise = [Truth(r.answer_tokens, chance.lognormvariate(0, 0.3), chance.lognormvariate(0, 0.3)) for r in requests]
    return requests, noise


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_of_five_on_one_slot_beats_the_bound(seed: int) -> None:
    requests, truths = _chance(seed, 5 if seed < 6 else 4)
    world = _world(1, (LARGE,) if seed < 6 else (LARGE, SMALL))
    best = _one_slot_best(requests, truths, world)
    bound = upper_bound(world, requests, truths, buckets=40).value
    assert best - 1e-6 <= bound <= sum(request.weight for request in requests) + 1e-6
    assert upper_bound(world, requests, truths, buckets=7).value >= bound - 1e-6, "coarser buckets only relax"


@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_of_the_simulators_own_batching_devices_beats_the_bound(seed: int) -> None:
    requests, truths = _chance(100 + seed, 3)
    world = _world(2, (LARGE, SMALL)) if seed % 2 else _world(2, (LARGE,), count=2)
    assert _best(requests, truths, world) <= upper_bound(world, requests, truths, buckets=40).value + 1e-6


def test_the_two_brute_forces_agree() -> None:
    requests, truths = _chance(7, 3)
    world = _world(1, (LARGE, SMALL))
    assert _best(requests, truths, world) == pytest.approx(_one_slot_best(requests, truths, world))


@pytest.mark.parametrize(("deadline_s", "kept"), [(0.9, 0), (1.0, 1), (2.0, 2), (3.0, 3), (9.0, 5)])
def test_it_is_met_where_the_relaxation_is_tight(deadline_s: float, kept: int) -> None:
    """Five alike of one second each, one slot: as many fit as the deadline has seconds."""
    requests = [SimRequest(0.0, 50, 6, Objective(deadline_s=deadline_s)) for _ in range(5)]
    world = _world()
    assert _one_slot_best(requests, _truths(requests), world) == kept
    assert upper_bound(world, requests, _truths(requests), buckets=30).value == pytest.approx(kept, abs=1e-4)


def test_it_is_met_by_a_full_batch() -> None:
    """Four that decode together share a step: 4 · 0.1 s of prefill, and 10 tokens of a round of 175 ms."""
    world = _world(4)
    requests = [SimRequest(0.0, 10, 11, Objective(deadline_s=2.15)) for _ in range(8)]
    truths = _truths(requests)
    assert _run([(j, 0, 0) for j in range(4)], requests, truths, world) == 4
    assert upper_bound(world, requests, truths, buckets=30).value == pytest.approx(4.0, abs=1e-4)


def test_each_of_what_makes_an_option_impossible() -> None:
    link = LinkSpec(rtt_ms=1000, uplink_mbps=0.001)
    world = World(
        devices=(
            DeviceSpec(name="edge", slots=1, rungs=(LARGE, SMALL)),
            DeviceSpec(name="cloud", slots=1, rungs=(LARGE,), remote=True, link=link),
        )
    )

    def options(objective: Objective, prompt: int = 10, answer: int = 11) -> set[tuple[int, int]]:
        requests = [SimRequest(0.0, prompt, answer, objective)]
        found = service_options(world, requests, _truths(requests), late=True)
        return set(zip(found.device.tolist(), found.rung.tolist(), strict=True))

    everywhere = {(0, 0), (0, 1), (1, 0)}
    assert options(Objective()) == everywhere
    assert options(Objective(locality=Locality.LOCAL_ONLY)) == {(0, 0), (0, 1)}
    assert options(Objective(locality=Locality.CLOUD_ONLY)) == {(1, 0)}
    assert options(Objective(min_quality=0.8)) == {(0, 0), (1, 0)}
    assert options(Objective(ttft_s=0.2)) == {(0, 0), (0, 1)}, "a round trip of a second"
    assert options(Objective(ttft_s=0.07)) == {(0, 1)}
    assert options(Objective(tpot_s=0.05)) == {(0, 1)}
    assert options(Objective(deadline_s=1.0)) == {(0, 1)}
    assert options(Objective(deadline_s=1.2)) == {(0, 0), (0, 1)}
    assert options(Objective(deadline_s=2.44)) == everywhere, "1 s there and back, 0.32 s of bytes, 1.1 s of service"
    assert options(Objective(deadline_s=2.40)) == {(0, 0), (0, 1)}
    assert options(Objective(), prompt=4090) == set(), "no window is that long"


def test_a_late_value_lasts_until_it_is_nought() -> None:
    requests = [SimRequest(0.0, 50, 6, Objective(deadline_s=0.6, late_s=0.5)) for _ in range(2)]
    assert upper_bound(_world(), requests, _truths(requests), buckets=30).value == pytest.approx(1.1, abs=1e-3)
    requests = [SimRequest(0.0, 50, 6, Objective(deadline_s=0.6, late_s=0.3)) for _ in range(2)]
    assert upper_bound(_world(), requests, _truths(requests)).value == 0.0


def test_an_uplink_of_a_trace_takes_what_it_takes_from_the_arrival_on(tmp_path: Path) -> None:
    """Nothing passes in the first second of each two, then 8 kilobits a second; 40 tokens are 1,280 bits."""
    (tmp_path / "net.csv").write_text("t_s,kbps\n0,0\n1,8\n")
    link = LinkSpec(rtt_ms=100, trace=str(tmp_path / "net.csv"), trace_column="kbps")
    world = World(devices=(DeviceSpec(name="cloud", slots=1, rungs=(LARGE,), remote=True, link=link),))
    requests = [SimRequest(at_s, 40, 1) for at_s in (0.0, 1.5)]
    options = service_options(world, requests, _truths(requests), late=True)
    assert options.begin_s.tolist() == pytest.approx([1.0 + 0.16 + 0.05, 1.5 + 0.16 + 0.05])


def test_what_promised_nothing_waits_no_longer_than_it_may() -> None:
    """One second of work each, all at once, one slot: who began within the wait is done, and the one inside."""
    requests = [SimRequest(0.0, 50, 6) for _ in range(40)]
    truths = _truths(requests)
    assert upper_bound(_world(), requests, truths, max_wait_s=1e4).value == pytest.approx(40.0)
    some = upper_bound(_world(), requests, truths, max_wait_s=10.0, buckets=200).value
    assert 11.0 <= some <= 11.5


def test_nothing_can_be_kept_is_a_bound_of_nought() -> None:
    requests = [SimRequest(0.0, 50, 6, Objective(deadline_s=0.1))]
    assert upper_bound(_world(), requests, _truths(requests)).value == 0.0


def test_it_is_cached_by_what_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, truths = _chance(3, 5)
    first = cached_upper_bound(tmp_path, _world(), requests, truths)
    calls = []
    monkeypatch.setattr(bound_module, "_solve", lambda program: calls.append(program) or 1.0)
    assert cached_upper_bound(tmp_path, _world(), requests, truths) == first
    assert not calls
    assert cached_upper_bound(tmp_path, _world(), requests[:4], truths[:4]).value == 1.0
    assert cached_upper_bound(tmp_path, _world(2), requests, truths).value == 1.0
    for path in tmp_path.iterdir():
        path.write_text("{")
    assert cached_upper_bound(tmp_path, _world(), requests, truths).value == 1.0, "a file cut short is no bound"


def test_a_solver_that_gives_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class GivesUp:
        status, message = 4, "numerical difficulties"

    monkeypatch.setattr(bound_module, "linprog", lambda *_, **__: GivesUp)
    requests, truths = _chance(3, 5)
    with pytest.raises(BoundError, match="numerical difficulties"):
        upper_bound(_world(), requests, truths)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("load", [0.5, 3.0])
def test_a_policy_stays_below_it(mix: str, load: float) -> None:
    world = two_tiers()
    rows = slice_of(load_trace("azure-conv"), 80, 5)
    means = np.mean([(row.input_tokens, row.output_tokens) for row in rows], axis=0)
    requests = requests_of(at_rate(rows, load * capacity_rps(world, *means)), mix, 5)
    bound = upper_bound(world, requests, truths_of(world, requests, 5), buckets=60)
    result = simulate(world, requests, seed=5)
    assert 0 < result.value <= bound.value + 1e-6
    assert bound.value <= bound.most + 1e-6
