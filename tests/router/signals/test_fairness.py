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


_CALLERS = [f"caller {index}" for index in range(8)]


@given(
    st.lists(
        st.tuples(st.sampled_from(["took", "asked", "left"]), st.sampled_from(_CALLERS), st.integers(0, 50)),
        max_size=60,
    )
)
def test_those_share_who_wait_or_took_a_hundredth_of_all_lately(steps: list[tuple[str, str, int]]) -> None:
    shares, now_s = CallerShares(), 0.0
    taken: list[tuple[str, float, float]] = []
    waiting: list[str] = []
    for step, caller, size in steps:
        now_s += size
        if step == "took":
            shares.took(caller, now_s, size)
            taken.append((caller, now_s, size))
        elif step == "asked":
            shares.asked(caller)
            waiting.append(caller)
        elif caller in waiting:
            shares.left(caller)
            waiting.remove(caller)
        own_s = dict.fromkeys(_CALLERS, 0.0)
        for name, at_s, took_s in taken:
            own_s[name] += took_s * 0.5 ** ((now_s - at_s) / 30.0)
        whole_s = sum(own_s.values())
        on_the_edge = any(abs(took_s - 0.01 * whole_s) < 1e-9 for took_s in own_s.values())
        for name in [] if on_the_edge else _CALLERS:
            sharing = sum(other in waiting or took_s > 0.01 * whole_s for other, took_s in own_s.items())
            expected = max(1.0, own_s[name] / whole_s * sharing) if own_s[name] > 0.0 else 1.0
            assert shares.excess(name, now_s) == pytest.approx(expected, rel=1e-6)


def test_a_decision_looks_at_few_of_many_callers() -> None:
    shares = CallerShares()
    for index in range(3_000):
        shares.took(f"caller {index}", 0.001 * index, 1.0)
        assert len(shares._counting) <= 201
    assert shares.excess("caller 7", 3.0) == 1.0
    assert not shares._counting, "none of them took a hundredth"
