"""Overload begins and ends at different thresholds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.signals.ladder import Ladder
from router.values.settings import RouterSettings

SETTINGS = RouterSettings(max_queue=40, overload_enter=0.5, overload_leave=0.1, overload_answer_tokens=64)


def test_hysteresis():
    ladder = Ladder()
    states = []
    for waiting in (0, 19, 20, 19, 5, 4, 5, 19, 20):
        ladder.update(waiting, SETTINGS)
        states.append(ladder.overloaded)
    assert states == [False, False, True, True, True, False, False, False, True]


def test_it_says_when_it_changes():
    ladder = Ladder()
    assert ladder.update(30, SETTINGS)
    assert not ladder.update(30, SETTINGS)
    assert ladder.update(0, SETTINGS)


@pytest.mark.parametrize(("asked", "cap"), [(None, 64), (400, 64), (64, None), (8, None)])
def test_answers_are_capped_under_overload_only(asked, cap):
    ladder = Ladder()
    assert ladder.answer_cap(asked, SETTINGS) is None
    ladder.update(40, SETTINGS)
    assert ladder.answer_cap(asked, SETTINGS) == cap


@given(st.lists(st.integers(0, 40), max_size=80))
def test_it_never_flickers_between_the_thresholds(waits):
    ladder = Ladder()
    for waiting in waits:
        before = ladder.overloaded
        ladder.update(waiting, SETTINGS)
        if 4 < waiting < 20:
            assert ladder.overloaded is before
