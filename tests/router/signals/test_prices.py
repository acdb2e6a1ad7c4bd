"""Prices of contended capacity, against the linear programme whose dual they approach."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from router.signals.prices import _USABLE, CapacityPrices
from router.values.offer import Offer

EDGE, SMALL, CLOUD = "edge/full", "edge/small", "cloud/full"


def best_value(offers: list[list[Offer]], time_s: float) -> float:
    """The most that fits: fractional assignment of requests to devices (HiGHS)."""
    pairs = [(row, offer) for row, of_one in enumerate(offers) for offer in of_one]
    devices = sorted({offer.device for _, offer in pairs})
    constraints = np.zeros((len(offers) + len(devices), len(pairs)))
    for column, (row, offer) in enumerate(pairs):
        constraints[row, column] = 1.0
        constraints[len(offers) + devices.index(offer.device), column] = offer.cost_s
    limits = [1.0] * len(offers) + [time_s] * len(devices)
    found = linprog([-offer.value for _, offer in pairs], A_ub=constraints, b_ub=limits, bounds=(0, 1), method="highs")
    assert found.success
    return float(-found.fun)


def dual_value(prices: CapacityPrices, offers: list[list[Offer]], time_s: float) -> float:
    """The bound that the prices prove: never below the best value."""
    of_requests = sum(max(0.0, *(o.value - prices.price(o.device) * o.cost_s for o in of_one)) for of_one in offers)
    return of_requests + time_s * sum(prices.price(device) for device in {o.device for one in offers for o in one})


def told(offers: list[list[Offer]], span_s: float) -> CapacityPrices:
    prices = CapacityPrices()
    for index, of_one in enumerate(offers):
        prices.arrived(100.0 + span_s * index / (len(offers) - 1), of_one)
    prices._solve(100.0 + span_s)
    return prices


def two_devices(rng: random.Random, count: int) -> list[list[Offer]]:
    return [
        [
            Offer("edge/a", "edge", rng.uniform(0.2, 1.0), rng.lognormvariate(0.0, 0.7)),
            Offer("cloud/a", "cloud", rng.uniform(0.2, 1.0), rng.lognormvariate(-0.5, 0.7)),
        ]
        for _ in range(count)
    ]


@pytest.mark.parametrize("span_s", [2.0, 5.0, 10.0, 18.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_dual_is_within_a_few_percent_of_the_linear_programme(seed: int, span_s: float) -> None:
    offers = two_devices(random.Random(seed), 30)
    prices, time_s = told(offers, span_s), span_s * _USABLE
    best = best_value(offers, time_s)
    assert best * 0.999 <= dual_value(prices, offers, time_s) <= best * 1.04


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(14, 32),
    devices=st.integers(1, 3),
    span_s=st.sampled_from([1.0, 4.0, 12.0]),
)
def test_the_dual_bounds_any_case_closely(seed: int, count: int, devices: int, span_s: float) -> None:
    rng = random.Random(seed)
    offers = [
        [
            Offer(f"d{d}/a", f"d{d}", rng.choice([0.0, 0.5, 1.0]) * rng.random(), rng.lognormvariate(0.0, 1.0))
            for d in range(devices)
        ]
        for _ in range(count)
    ]
    prices, time_s = told(offers, span_s), span_s * _USABLE
    best = best_value(offers, time_s)
    assert best * 0.999 - 1e-9 <= dual_value(prices, offers, time_s) <= best * 1.1 + 0.05


def test_a_single_device_costs_what_the_last_that_fits_pays() -> None:
    """Requests of one second worth 1, 0.98, …: half of them fit, so the price is about half."""
    offers = [[Offer("edge/a", "edge", 1.0 - 0.02 * ((index * 17) % 50), 1.0)] for index in range(32)]
    prices = told(offers, 16.0 / _USABLE)
    values = sorted((of_one[0].value for of_one in offers), reverse=True)
    assert values[17] <= prices.price("edge") <= values[14]


def test_nothing_costs_anything_while_everything_fits() -> None:
    offers = two_devices(random.Random(1), 30)
    prices = told(offers, 200.0)
    assert (prices.price("edge"), prices.price("cloud")) == (0.0, 0.0)


def test_only_the_device_that_is_full_has_a_price() -> None:
    offers = [
        [Offer("edge/a", "edge", 1.0, 4.0)] if index % 2 else [Offer("cloud/a", "cloud", 1.0, 0.1)]
        for index in range(32)
    ]
    prices = told(offers, 18.0)
    assert prices.price("edge") > 0.1
    assert prices.price("cloud") == 0.0


def test_before_enough_came_there_is_no_price() -> None:
    prices = CapacityPrices()
    for index in range(11):
        prices.arrived(float(index), [Offer("edge/a", "edge", 1.0, 100.0)])
    assert prices.price("edge") == 0.0
    assert prices.favours("edge", "anything")


def rungs(rng: random.Random, small_value: float, cost_s: float = 1.0) -> list[Offer]:
    """One device that runs a full rung or a small one at half the cost."""
    cost_s *= rng.lognormvariate(0.0, 0.1)
    return [Offer(EDGE, "edge", 1.0, cost_s), Offer(SMALL, "edge", small_value, cost_s / 2.0)]


def run(  # noqa: PLR0917
    prices: CapacityPrices, rng: random.Random, from_s: float, count: int, gap_s: float, small: float
) -> float:
    for _ in range(count):
        from_s += gap_s
        prices.arrived(from_s, rungs(rng, small))
    return from_s


def test_a_device_steps_down_when_it_is_full_and_up_again_when_it_is_not() -> None:
    prices, rng = CapacityPrices(), random.Random(3)
    at_s = run(prices, rng, 0.0, 60, 2.0, 0.75)
    assert prices.favoured() == {"edge": EDGE}
    at_s = run(prices, rng, at_s, 400, 0.3, 0.75)
    assert prices.favoured() == {"edge": SMALL}, "three times too much: two small ones instead of one"
    assert not prices.favours("edge", EDGE)
    run(prices, rng, at_s, 400, 2.0, 0.75)
    assert prices.favoured() == {"edge": EDGE}


def switches(small: float, count: int = 800, seed: int = 4) -> int:
    prices, rng, changed, at_s, before = CapacityPrices(), random.Random(seed), 0, 0.0, None
    for _ in range(count):
        at_s += rng.expovariate(1 / 0.4)
        prices.arrived(at_s, rungs(rng, small))
        now = prices.favoured().get("edge")
        changed += before is not None and now != before
        before = now
    return changed


def test_rungs_that_are_near_equals_do_not_take_turns() -> None:
    """At two and a half times its load two small ones are worth 0.5 each: neither is better by 5 %."""
    assert switches(0.51) <= 2


def test_switching_needs_a_gain() -> None:
    """The held rung stays until another one is better by 5 %, whatever the noise of less."""
    prices, rng = CapacityPrices(), random.Random(6)
    at_s = run(prices, rng, 0.0, 200, 0.3, 0.75)
    assert prices.favoured() == {"edge": SMALL}
    at_s = run(prices, rng, at_s, 300, 0.3, 0.505)
    assert prices.favoured() == {"edge": SMALL}, "1 % better is no reason to switch"
    run(prices, rng, at_s, 300, 0.3, 0.3)
    assert prices.favoured() == {"edge": EDGE}


def test_it_is_solved_once_a_second_at_most() -> None:
    prices, solved = CapacityPrices(), []
    real = prices._solve
    prices._solve = lambda now_s: solved.append(now_s) or real(now_s)  # type: ignore[method-assign]
    for index in range(1000):
        prices.arrived(index * 0.01, [Offer("edge/a", "edge", 1.0, 1.0)])
    assert len(solved) <= 11


def test_replicas_that_left_are_forgotten() -> None:
    prices = told(two_devices(random.Random(0), 30), 2.0)
    assert prices.price("edge") > 0
    prices.keep_only({"edge/a", "cloud/a", "new/a"})
    assert prices.price("edge") > 0, "nobody left"
    prices.keep_only({"cloud/a"})
    assert (prices.price("edge"), prices.price("cloud")) == (0.0, 0.0)
    for index in range(30):
        prices.arrived(200.0 + index, [Offer("new/a", "new", 1.0, 5.0)])
    assert prices.price("new") > 0


def test_more_replicas_than_columns_are_held() -> None:
    prices = CapacityPrices()
    for index in range(40):
        prices.arrived(index * 0.1, [Offer(f"d{d}/a", f"d{d}", 1.0, 2.0) for d in range(11)])
    prices._solve(4.0)
    assert set(prices.favoured()) == {f"d{d}" for d in range(11)}


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), small=st.floats(0.3, 0.95), gap_s=st.floats(0.2, 2.0))
def test_a_steady_load_settles_on_a_rung(seed: int, small: float, gap_s: float) -> None:
    """The noise of what happens to arrive is no reason to go to and fro."""
    prices, rng, changes_s, at_s = CapacityPrices(), random.Random(seed), [0.0], 0.0
    before: str | None = None
    for _ in range(300):
        at_s += gap_s * rng.uniform(0.8, 1.2)
        prices.arrived(at_s, rungs(rng, small))
        now = prices.favoured().get("edge")
        if before is not None and now != before:
            assert at_s - changes_s[-1] >= 1.0, "it is judged once a second at most"
            changes_s.append(at_s)
        before = now
    assert len(changes_s) - 1 <= 6
