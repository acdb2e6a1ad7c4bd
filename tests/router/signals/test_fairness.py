"""Shares of device time by caller."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.signals.fairness import CallerShares


def test_nobody_is_above_its_share_alone() -> None:
    shares = CallerShares()
    assert shares.excess("a", 0.0) == 1.0
    shares.took("a", 0.0, 100.0)
    assert shares.excess("a", 0.0) == 1.0


def test_who_took_more_is_above_its_share_and_the_others_are_not() -> None:
    shares = CallerShares()
    shares.took("busy", 0.0, 9.0)
    shares.took("small", 0.0, 1.0)
    assert shares.excess("busy", 0.0) == pytest.approx(1.8)
    assert shares.excess("small", 0.0) == 1.0
    assert shares.excess("new", 0.0) == 1.0


def test_who_waits_shares_before_it_got_anything() -> None:
    shares = CallerShares()
    shares.took("busy", 0.0, 9.0)
    shares.asked("small")
    shares.asked("small")
    assert shares.excess("busy", 0.0) == pytest.approx(2.0)
    assert shares.excess("small", 0.0) == 1.0
    shares.left("small")
    assert shares.excess("busy", 0.0) == pytest.approx(2.0)
    shares.left("small")
    assert shares.excess("busy", 0.0) == 1.0, "nobody else asks any more"


def test_it_is_forgotten_by_halves_every_30_s() -> None:
    shares = CallerShares()
    shares.took("busy", 0.0, 8.0)
    shares.took("other", 30.0, 4.0)
    assert shares.excess("busy", 30.0) == pytest.approx(1.0)
    shares.took("other", 60.0, 6.0)
    assert shares.excess("other", 60.0) == pytest.approx(2 * 8.0 / 10.0)


def test_callers_who_take_next_to_nothing_share_nothing() -> None:
    shares = CallerShares()
    shares.took("a", 0.0, 60.0)
    shares.took("b", 0.0, 40.0)
    for index in range(50):
        shares.took(f"tiny{index}", 0.0, 0.001)
    assert shares.excess("a", 0.0) == pytest.approx(1.2, rel=0.01)


def test_the_callers_kept_are_bounded() -> None:
    shares = CallerShares()
    for index in range(5000):
        shares.took(f"c{index}", float(index) * 0.001, 1.0)
    assert len(shares._taken_s) <= 4096
    assert shares.excess("c0", 5.0) == 1.0, "forgotten is as new"


@given(
    took=st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0.0, 30.0), st.floats(0.0, 100.0)), min_size=1, max_size=30
    )
)
def test_excess_is_at_least_one_and_never_more_than_the_callers(took: list[tuple[str, float, float]]) -> None:
    shares, now_s = CallerShares(), 0.0
    for caller, gap_s, device_s in took:
        now_s += gap_s
        shares.took(caller, now_s, device_s)
        for name in "abc":
            assert 1.0 <= shares.excess(name, now_s) <= 3.0 + 1e-6
