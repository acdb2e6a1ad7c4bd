"""The share of the device time that goes by age is a bound from both sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.signals.fairness import OldestFirst


@given(
    share=st.floats(0.01, 1.0),
    costs_s=st.lists(st.floats(0.01, 30.0), min_size=1, max_size=200),
    willing=st.data(),
)
def test_turns_by_age_take_no_more_than_their_share_and_one_answer(
    share: float, costs_s: list[float], willing: st.DataObject
) -> None:
    turns, by_age_s, given_s = OldestFirst(), 0.0, 0.0
    for cost_s in costs_s:
        oldest = willing.draw(st.booleans())
        by_age_s += cost_s if turns.due(share) and oldest else 0.0
        given_s += cost_s
        turns.took(cost_s, share, oldest=oldest)
        assert by_age_s <= share * given_s + max(costs_s) + 1e-6


@given(share=st.floats(0.01, 1.0), costs_s=st.lists(st.floats(0.01, 30.0), min_size=1, max_size=200))
def test_while_anybody_takes_them_they_take_no_less_than_their_share(share: float, costs_s: list[float]) -> None:
    turns, by_age_s, given_s = OldestFirst(), 0.0, 0.0
    for cost_s in costs_s:
        due = turns.due(share)
        by_age_s += cost_s if due else 0.0
        given_s += cost_s
        turns.took(cost_s, share, oldest=due)
        assert by_age_s >= share * given_s - max(costs_s) - 1e-6


def test_without_a_share_it_is_never_their_turn() -> None:
    turns = OldestFirst()
    turns.took(5.0, 0.5, oldest=True)
    turns.took(1.0, 0.0, oldest=False)
    assert not turns.due(0.0)
    assert turns.due(0.5), "nothing of what was paid before is held against them"


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_who_takes_a_turn_pays_for_it(share: float) -> None:
    turns = OldestFirst()
    turns.took(10.0, share, oldest=True)
    others_s = 0.0
    while not turns.due(share):
        turns.took(0.5, share, oldest=False)
        others_s += 0.5
    assert others_s == pytest.approx(10.0 * (1 - share) / share, abs=0.51)
