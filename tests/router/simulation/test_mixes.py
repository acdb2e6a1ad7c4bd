"""Mixes: each asks for what its line in the table says, and tells the length of an answer only where it says so."""

from __future__ import annotations

from collections import Counter

import pytest

from router.base.errors import ConfigError
from router.simulation.mixes import MIXES, requests_of
from router.simulation.traces import TraceRow

ROWS = tuple(TraceRow(at / 2, 100 + at, 1 + at % 50, f"chat-{at % 7}") for at in range(1000))
MEAN = sum(row.output_tokens for row in ROWS) / len(ROWS)


@pytest.mark.parametrize("mix", MIXES)
def test_rows_keep_their_lengths_arrivals_and_sessions(mix: str) -> None:
    requests = requests_of(ROWS, mix, 1)
    assert [(r.arrival_s, r.prompt_tokens, r.answer_tokens, r.objective.session) for r in requests] == [
        (row.arrival_s, row.input_tokens, row.output_tokens, row.session) for row in ROWS
    ]
    assert requests == requests_of(ROWS, mix, 1)


def test_proportional_gives_each_answer_time_for_its_length_and_does_not_tell_it() -> None:
    requests = requests_of(ROWS, "proportional", 1)
    assert [r.objective.deadline_s for r in requests] == pytest.approx([1.5 + 0.04 * r.answer_tokens for r in requests])
    assert {(r.max_tokens, r.weight, r.objective.ttft_s) for r in requests} == {(None, 1.0, None)}


def test_capped_tells_the_length_of_half_of_them() -> None:
    requests = requests_of(ROWS, "proportional-capped", 1)
    told = [r for r in requests if r.max_tokens is not None]
    assert 430 < len(told) < 570
    assert all(r.max_tokens == r.answer_tokens and r.kind == "capped" for r in told)
    assert [r.objective for r in requests] == [r.objective for r in requests_of(ROWS, "proportional", 1)]


def test_one_deadline_is_that_of_the_mean() -> None:
    assert {r.objective.deadline_s for r in requests_of(ROWS, "one-deadline", 1)} == {1.5 + 0.04 * MEAN}


def test_ttft_tpot() -> None:
    objectives = {
        (r.objective.ttft_s, r.objective.tpot_s, r.objective.deadline_s) for r in requests_of(ROWS, "ttft-tpot", 1)
    }
    assert objectives == {(1.0, 0.04, None)}


def test_mixture_is_a_quarter_of_each_with_priorities_that_weigh_by_powers_of_two() -> None:
    requests = requests_of(ROWS, "mixture", 1)
    kinds = Counter(r.kind for r in requests)
    assert set(kinds) == {"proportional", "one-deadline", "ttft-tpot", "none"}
    assert all(190 < count < 310 for count in kinds.values())
    assert {r.objective.priority for r in requests} == {-1, 0, 1, 2}
    assert all(r.weight == 2.0**r.objective.priority for r in requests)
    nothing = next(r.objective for r in requests if r.kind == "none")
    assert (nothing.ttft_s, nothing.tpot_s, nothing.deadline_s) == (None, None, None)
    assert requests != requests_of(ROWS, "mixture", 2)


def test_an_unknown_mix_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match="proportional, proportional-capped"):
        requests_of(ROWS, "proportionate", 1)
