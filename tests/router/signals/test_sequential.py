"""Tests that are looked at after every observation: how often they cry wolf, and how soon they tell."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.signals.sequential import FailureTest, SignTest

ALPHA = 0.05


@given(st.floats(0.01, 0.99), st.floats(0.0, 1.0))
def test_a_bet_on_failures_is_fair_where_sides_are_alike_and_unfair_where_the_first_is_better(share, less) -> None:
    first, other = FailureTest(), FailureTest()
    first.failed(first=True, share=share)
    other.failed(first=False, share=share)
    mean = share * less * first._wealth.now + (1.0 - share * less) * other._wealth.now
    assert mean <= 1.0 + 1e-9
    if less == 1.0:
        assert mean == pytest.approx(1.0)


def test_a_bet_on_signs_is_fair() -> None:
    heads, tails = SignTest(), SignTest()
    heads.shows(heads=True)
    tails.shows(heads=False)
    assert (heads._wealth.now + tails._wealth.now) / 2 == pytest.approx(1.0)


def test_failures_that_are_as_frequent_seldom_raise_an_alarm_however_long_one_looks() -> None:
    alarms = 0
    for seed in range(200):
        chance, test = random.Random(seed), FailureTest()
        for _ in range(300):
            test.failed(first=chance.random() < 0.1, share=0.1)
        alarms += test.evidence >= 1 / ALPHA
    assert alarms <= 200 * ALPHA


def test_a_fair_coin_seldom_raises_an_alarm_however_long_one_looks() -> None:
    alarms = 0
    for seed in range(200):
        chance, test = random.Random(seed), SignTest()
        for _ in range(300):
            test.shows(heads=chance.random() < 0.5)
        alarms += test.evidence >= 1 / ALPHA
    assert alarms <= 200 * ALPHA


@pytest.mark.parametrize(("heads", "after"), [(1.0, 9), (0.9, 40), (0.75, 120)])
def test_a_coin_that_is_not_fair_is_found_soon(heads: float, after: int) -> None:
    late = 0
    for seed in range(200):
        chance, test = random.Random(seed), SignTest()
        for _ in range(after):
            test.shows(heads=chance.random() < heads)
        late += test.evidence < 1 / ALPHA
    assert late <= 10


def test_evidence_is_never_lost_again_and_never_overflows() -> None:
    test = SignTest()
    for _ in range(5_000):
        test.shows(heads=True)
    found = test.evidence
    for _ in range(5_000):
        test.shows(heads=False)
    assert test.evidence == found < float("inf")
