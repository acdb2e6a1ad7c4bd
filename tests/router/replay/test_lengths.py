"""Lengths of answers that were never finished: known ones stay, the rest follow the product-limit estimate."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.replay.lengths import Survival, lengths_of
from router.replay.log import LoggedRequest
from router.values.request import Objective

SEEN = LoggedRequest(
    accepted_s=0.0,
    model="m",
    policy="p",
    objective=Objective(),
    prompt_tokens=10,
    prompt_bytes=40,
    max_tokens=None,
    ignore_eos=False,
    caller="",
    outcome="completed",
    tokens=10,
    ended=True,
    cut=False,
    kept=True,
    ttft_s=0.1,
    finish_s=1.0,
    tier="edge",
    variant="v",
    quality=1.0,
    attempts=(),
)


def test_the_estimate_of_a_textbook() -> None:
    """Ends at 1, 3, 5; censored at 2, 4: S is 4/5 after 1, 4/5 · 2/3 after 3, 0 after 5."""
    curve = Survival([(1, True), (2, False), (3, True), (4, False), (5, True)])
    assert [curve.share_beyond(n) for n in range(6)] == pytest.approx([1.0, 0.8, 0.8, 8 / 15, 8 / 15, 0.0])
    assert curve.longest == 5
    assert curve.draw(0, 0.0) == 1
    assert curve.draw(2, 0.0) == 3
    assert curve.draw(3, 0.999) == 5
    assert curve.draw(5, 0.5) is None
    assert Survival([]).draw(0, 0.5) is None


@given(st.lists(st.integers(1, 500), min_size=1, max_size=50), st.integers(0, 500))
def test_without_censoring_it_is_the_share_of_longer_answers(lengths: list[int], tokens: int) -> None:
    curve = Survival([(length, True) for length in lengths])
    assert curve.share_beyond(tokens) == pytest.approx(sum(length > tokens for length in lengths) / len(lengths))


@given(
    st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=40),
    st.integers(0, 250),
    st.floats(0, 1, exclude_max=True),
)
def test_a_drawn_length_ends_after_what_was_seen(seen: list[tuple[int, bool]], tokens: int, uniform: float) -> None:
    found = Survival(seen).draw(tokens, uniform)
    assert found is None or (found > tokens and (found, True) in seen)


def test_what_is_known_is_not_drawn() -> None:
    requests = [
        replace(SEEN, tokens=7),
        replace(SEEN, tokens=64, ended=False, max_tokens=64),  # as long as its caller let it
        replace(SEEN, tokens=3, ended=False, max_tokens=50, ignore_eos=True),
    ]
    found = lengths_of(requests)
    assert found.tokens == (7, 64, 50)
    assert (found.drawn, found.beyond) == (0, 0)


def test_cut_answers_come_back_as_long_as_they_would_have_been() -> None:
    """Answers of 1 to 200 tokens, all cut at 100: their mean is found again from those that were not."""
    whole = [replace(SEEN, tokens=n) for n in range(1, 201) for _ in range(5)]
    cut = [replace(SEEN, tokens=100, ended=False, cut=True) for _ in range(500)]
    found = lengths_of([*whole, *cut])
    assert found.drawn == 500
    assert all(tokens > 100 for tokens in found.tokens[1000:])
    assert fmean(found.tokens[1000:]) == pytest.approx(150.5, abs=6)
    assert lengths_of([*whole, *cut]).tokens == found.tokens, "the same log gives the same lengths"


def test_nothing_longer_was_ever_seen_to_end() -> None:
    found = lengths_of([replace(SEEN, tokens=5), replace(SEEN, tokens=9, ended=False, cut=True)])
    assert found.tokens == (5, 10)
    assert (found.drawn, found.beyond) == (1, 1)


def test_like_deadlines_have_like_lengths() -> None:
    short = [replace(SEEN, tokens=10, objective=Objective(deadline_s=2.0)) for _ in range(40)]
    long = [replace(SEEN, tokens=400, objective=Objective(deadline_s=18.0)) for _ in range(40)]
    refused = [
        replace(SEEN, tokens=0, ended=False, outcome="shed", objective=Objective(deadline_s=s)) for s in (2.0, 18.0)
    ]
    assert lengths_of([*short, *long, *refused]).tokens[-2:] == (10, 400)
