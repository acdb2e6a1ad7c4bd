"""What is learnt of a load, from loads whose figures are known."""

from __future__ import annotations

import random

import pytest

from cloud_tier.scaling.demand import Demand


def _poisson(rate: float, lasts_s: float, seed: int = 1, begins_s: float = 0.0) -> list[float]:
    chance, at_s, times = random.Random(seed), begins_s, []
    while (at_s := at_s + chance.expovariate(rate)) < begins_s + lasts_s:
        times.append(at_s)
    return times


def _feed(demand: Demand, times: list[float], until_s: float, running: int = 4) -> None:
    times = list(times)
    begins_s = int(times[0]) if times else 0
    for second in range(begins_s, int(until_s)):
        while times and times[0] < second + 1:
            demand.came(times.pop(0), None, None)
        demand.look(second + 1.0, running, running)


def test_the_rate_is_found() -> None:
    demand = Demand(0.0, 5.0)
    _feed(demand, _poisson(4.0, 300.0), 300.0)
    assert demand.arrivals_per_s == pytest.approx(4.0, rel=0.2)
    assert demand.forecast_per_s(60.0) == pytest.approx(4.0, rel=0.4)
    assert demand.burstiness == pytest.approx(1.0, abs=0.6)


def test_arrivals_in_heaps_are_bursty() -> None:
    demand = Demand(0.0, 5.0)
    _feed(demand, sorted(at_s for at_s in _poisson(0.5, 300.0) for _ in range(8)), 300.0)
    assert demand.burstiness > 3.0


def test_a_rise_is_continued_and_a_step_is_not_doubled() -> None:
    demand = Demand(0.0, 5.0)
    _feed(demand, [*_poisson(1.0, 100.0), *_poisson(6.0, 12.0, begins_s=100.0)], 112.0)
    assert demand.forecast_per_s(60.0) > demand.arrivals_per_s
    assert demand.forecast_per_s(60.0) < 1.6 * 6.0


def test_no_rise_is_seen_in_chance() -> None:
    """Of Poisson arrivals, at most a few in a hundred looks see a rise."""
    rises = 0
    for seed in range(40):
        demand = Demand(0.0, 5.0)
        _feed(demand, _poisson(3.0, 200.0, seed), 200.0)
        rises += demand.forecast_per_s(60.0) > demand.arrivals_per_s
    assert rises <= 3


def test_seconds_in_a_slot_follow_from_littles_law() -> None:
    """8 answers a second of 3 s each: 24 are running."""
    demand = Demand(0.0, 10.0)
    for second in range(1, 900):
        for _ in range(8):
            demand.ended(3.0, 0.5)
        demand.look(float(second), 24, 6.0)
    assert demand.service_s == pytest.approx(3.0, rel=0.02)
    assert demand.batch == pytest.approx(6.0, rel=0.02)
    assert demand.variability == pytest.approx(0.5, abs=0.05)  # answers of one length: only arrivals vary


def test_answers_that_run_on_count() -> None:
    """Nothing has ended yet, and it takes longer and longer."""
    demand = Demand(0.0, 2.0)
    for second in range(1, 61):
        demand.look(float(second), 8, 8.0)
    assert demand.service_s > 30.0


def test_an_idle_day_changes_nothing_that_was_learnt() -> None:
    demand = Demand(0.0, 2.0)
    for second in range(1, 200):
        demand.ended(3.0, 0.5)
        demand.look(float(second), 3, 3.0)
    before_s = demand.service_s
    for second in range(200, 90_000, 50):
        demand.look(float(second), 0, 0.0)
    assert demand.service_s == before_s
    assert demand.arrivals_per_s == 0.0


def test_promises_set_the_budget() -> None:
    demand = Demand(0.0, 4.0)
    assert demand.budget_s(3.0) == 3.0
    for second in range(1, 100):
        demand.ended(4.0, 0.5)  # first tokens come half a second after a slot is there
        demand.look(float(second), 4, 1.0)
    for number in range(100):
        demand.came(float(number), 1.0 if number % 2 else None, None)
    assert demand.budget_s(3.0) == pytest.approx(0.5, abs=0.01)
    for number in range(512):
        demand.came(float(number), None, 10.0)
    assert demand.budget_s(3.0) == pytest.approx(6.0, abs=0.1)
    demand.came(600.0, None, 0.5)
    assert demand.budget_s(3.0) >= 0.0
