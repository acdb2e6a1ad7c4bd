"""The queueing formulas against a simulated queue and against textbook figures."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from cloud_tier.scaling.law import Work, service_at_full_s, slots_for_backlog, slots_for_promises, waits_longer


def _share_that_waits_longer(slots: int, work: Work, seed: int = 1, requests: int = 200_000) -> float:
    """M/M/N, first come, first served: the share of the requests that wait longer than the budget."""
    chance, free_s, now_s, late = random.Random(seed), [0.0] * slots, 0.0, 0
    for _ in range(requests):
        now_s += chance.expovariate(work.arrivals_per_s)
        begins_s = max(now_s, heapq.heappop(free_s))
        late += begins_s - now_s > work.budget_s
        heapq.heappush(free_s, begins_s + chance.expovariate(1.0 / work.service_s))
    return late / requests


@pytest.mark.parametrize(("slots", "arrivals_per_s"), [(8, 1.0), (16, 1.9), (40, 5.2)])
def test_the_formula_is_what_a_queue_does(slots: int, arrivals_per_s: float) -> None:
    work = Work(arrivals_per_s=arrivals_per_s, service_s=7.0, budget_s=1.5)
    assert waits_longer(slots, work) == pytest.approx(_share_that_waits_longer(slots, work), rel=0.15, abs=0.003)


def test_a_textbook_figure() -> None:
    """Erlang C of 10 servers at 8 Erlangs is 0.409 (tables of the formula)."""
    assert waits_longer(10, Work(arrivals_per_s=8.0, service_s=1.0, budget_s=0.05)) == pytest.approx(
        0.409 * math.exp(-2 * 0.05), abs=5e-4
    )


@pytest.mark.parametrize("arrivals_per_s", [0.01, 0.7, 6.0, 300.0])
@pytest.mark.parametrize("share", [0.9, 0.999])
def test_the_number_is_enough_and_one_fewer_is_not(arrivals_per_s: float, share: float) -> None:
    work = Work(arrivals_per_s=arrivals_per_s, service_s=6.0, variability=1.4, budget_s=2.0)
    slots = slots_for_promises(work, share)
    assert waits_longer(slots, work) <= 1 - share
    assert slots == 1 or waits_longer(slots - 1, work) > 1 - share


def test_it_grows_as_square_root_staffing_says() -> None:
    """Halfin and Whitt: a + β·√a, so the reserve grows as the root of the load."""
    reserves = []
    for load in (100.0, 400.0, 1600.0):
        slots = slots_for_promises(Work(arrivals_per_s=load, service_s=1.0, budget_s=0.05), 0.5)
        reserves.append((slots - load) / math.sqrt(load))
    assert max(reserves) - min(reserves) < 0.25
    assert min(reserves) > 0


def test_no_load_needs_nothing() -> None:
    work = Work(arrivals_per_s=0.0, service_s=5.0)
    assert slots_for_promises(work, 0.95) == slots_for_backlog(work) == waits_longer(1, work) == 0
    assert waits_longer(3, Work(arrivals_per_s=1.0, service_s=5.0)) == 1.0


def test_the_backlog_has_begun_in_time() -> None:
    """Of exponential answers, with so many slots the last of the backlog begins about when the formula says."""
    work = Work(arrivals_per_s=0.0, service_s=5.0, budget_s=2.0, drain_s=30.0, running=10, backlog=200)
    slots = math.ceil(slots_for_backlog(work))
    chance, lasts = random.Random(3), []
    for _ in range(200):
        free_s = [chance.expovariate(0.2) if number < work.running else 0.0 for number in range(slots)]
        heapq.heapify(free_s)
        begins_s = 0.0
        for _ in range(int(work.backlog)):
            begins_s = heapq.heappop(free_s)
            heapq.heappush(free_s, begins_s + chance.expovariate(0.2))
        lasts.append(begins_s)
    assert sum(lasts) / len(lasts) == pytest.approx(work.drain_s, rel=0.1)


def test_a_fuller_batch_holds_its_slots_for_longer() -> None:
    assert service_at_full_s(4.0, batch=1.0, slots=9, slope=0.1) == pytest.approx(7.2)
    assert service_at_full_s(4.0, batch=9.0, slots=9, slope=0.1) == pytest.approx(4.0)
    assert service_at_full_s(4.0, batch=20.0, slots=9, slope=0.1) == pytest.approx(4.0)  # never less than measured
