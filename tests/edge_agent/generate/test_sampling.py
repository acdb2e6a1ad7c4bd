"""Draws against the definitions they claim to follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.generate.sampling import Sampler
from edge_agent.generate.token_rules import TokenRules
from router.base.errors import RequestFailed
from router.values.sampling import SamplingParams

RNG = np.random.default_rng(5)
WIDE = (RNG.standard_normal(5000) * 3).astype(np.float32)


def draws(logits: np.ndarray, count: int, prompt: tuple[int, ...] = (), **params: Any) -> list[int]:
    return drawn(Sampler(SamplingParams(**params), prompt, logits.size), logits, count)


def drawn(sampler: Sampler, logits: np.ndarray, count: int) -> list[int]:
    """Every one of `count` draws finds a token."""
    found = [sampler.draw(logits) for _ in range(count)]
    assert None not in found
    return [token for token in found if token is not None]


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> set[int]:
    """The tokens that top-k, then top-p leave over, by sorting everything."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    if top_k:
        order = order[:top_k]
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    weights /= weights.sum()
    inside = int(np.searchsorted(np.cumsum(weights), top_p - 1e-12)) + 1
    return set(order[:inside].tolist())


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert draws(np.array([0, 7, 7, 1], np.float32), 3, temperature=0.0) == [1, 1, 1]


def test_a_seed_repeats_and_seeds_differ() -> None:
    one = draws(WIDE, 50, seed=1, temperature=1.0)
    assert one == draws(WIDE, 50, seed=1, temperature=1.0)
    assert one != draws(WIDE, 50, seed=2, temperature=1.0)
    assert draws(WIDE, 5, seed=-3) == draws(WIDE, 5, seed=-3)


@settings(max_examples=40)
@given(
    st.integers(0, 60),
    st.floats(0.05, 1.0),
    st.floats(0.2, 2.0),
    st.integers(0, 2**32),
)
def test_draws_stay_inside_top_k_and_top_p(top_k: int, top_p: float, temperature: float, seed: int) -> None:
    inside = allowed(WIDE, temperature, top_k, top_p)
    found = set(draws(WIDE, 30, top_k=top_k, top_p=top_p, temperature=temperature, seed=seed))
    assert found <= inside


def test_a_nucleus_wider_than_the_first_guess_is_not_cut() -> None:
    flat = np.zeros(5000, np.float32)
    found = draws(flat, 3000, top_p=0.9, seed=4)
    assert max(found) > 3000
    assert max(found) < 4501


@pytest.mark.slow
def test_frequencies_follow_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    shares = np.bincount(draws(logits, 20_000, seed=9, temperature=1.0), minlength=4) / 20_000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.015)
    cold = np.bincount(draws(logits, 20_000, seed=9, temperature=0.5), minlength=4) / 20_000
    squares = np.array([0.25, 0.09, 0.0225, 0.0025])
    np.testing.assert_allclose(cold, squares / squares.sum(), atol=0.015)


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    logits = np.array([3.0, 2.5, 0.0], np.float32)
    assert draws(logits, 3, prompt=(0, 0, 0), temperature=0.0, presence_penalty=1.0) == [0, 1, 0]
    assert draws(logits, 5, temperature=0.0, frequency_penalty=0.3) == [0, 0, 1, 0, 1]


def test_repetition_counts_the_prompt_and_pushes_both_signs_down() -> None:
    assert draws(np.array([3.0, 2.5], np.float32), 1, prompt=(0,), temperature=0.0, repetition_penalty=1.3) == [1]
    assert draws(np.array([-1.0, -1.1], np.float32), 1, prompt=(0,), temperature=0.0, repetition_penalty=1.3) == [1]


def test_logits_are_not_changed() -> None:
    before = WIDE.copy()
    draws(WIDE, 5, prompt=(1, 2), repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0, seed=1)
    np.testing.assert_array_equal(before, WIDE)


def test_ids_outside_the_vocabulary_in_the_prompt_do_no_harm() -> None:
    assert draws(np.array([1.0, 0.0], np.float32), 1, prompt=(99,), temperature=0.0, repetition_penalty=2.0) == [0]


def test_worthless_logits_are_an_error() -> None:
    for bad in (np.nan, np.inf):
        with pytest.raises(ArithmeticError, match="no usable output"):
            draws(np.array([0.0, bad], np.float32), 1, temperature=0.0)


def test_min_p_keeps_what_is_likely_beside_the_likeliest() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert set(draws(logits, 300, min_p=0.25)) == {0, 1, 2}
    assert set(draws(logits, 300, min_p=0.25, top_k=2)) == {0, 1}
    assert set(draws(logits, 300, min_p=0.25, top_p=0.4)) == {0}


def test_rules_for_single_tokens() -> None:
    logits = np.array([4, 3, 2, 1], np.float32)

    def first(ending: frozenset[int] = frozenset(), **params: Any) -> list[int]:
        asked = SamplingParams(temperature=0.0, **params)
        sampler = Sampler(asked, (), logits.size, TokenRules.of(asked, ending, asked.min_tokens))
        return [sampler.draw(logits) for _ in range(3)]

    assert first(logit_bias=((0, -100.0), (3, 2.5))) == [3, 3, 3]
    assert first(allowed_token_ids=(3, 2)) == [2, 2, 2]
    assert first(frozenset({0}), min_tokens=2) == [1, 1, 0]
    assert first(allowed_token_ids=(2,), logit_bias=((0, 100.0),), repetition_penalty=2.0) == [2, 2, 2]
    assert logits.tolist() == [4, 3, 2, 1]
    assert TokenRules.of(SamplingParams(), {1}, 0) is None


class Allowed:
    """Choices whose mask is known from the start, or once it was found."""

    undecided = False

    def __init__(self, tokens: set[int], vocab: int, *, known: bool) -> None:
        self.found = np.packbits([token in tokens for token in range(vocab)], bitorder="little")
        self.mask = self.found if known else None
        self._tokens = tokens

    def allows(self, token: int) -> bool:
        return token in self._tokens


def led(sampler: Sampler, logits: np.ndarray, tokens: set[int], *, known: bool = False) -> tuple[int, bool]:
    """The next token, and whether its mask had to be found."""
    choices = Allowed(tokens, logits.size, known=known)
    token = sampler.draw(logits, choices)
    if token is not None:
        return token, False
    choices.mask = choices.found
    token = sampler.draw(logits, choices)
    assert token is not None
    return token, True


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0]),
        "top_p": st.sampled_from([1.0, 1.0, 0.8]),
        "top_k": st.sampled_from([0, 0, 5]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
    }
)


@settings(max_examples=60)
@given(PARAMS, st.integers(0, 2**32), st.sets(st.integers(0, 39), min_size=1))
def test_a_token_does_not_depend_on_when_its_mask_is_found(params: dict, seed: int, tokens: set[int]) -> None:
    logits = WIDE[:40]
    late, early = (Sampler(SamplingParams(seed=seed, **params), (3, 4), 40) for _ in range(2))
    for _ in range(6):
        token, _ = led(late, logits, tokens)
        assert token in tokens
        assert led(early, logits, tokens, known=True) == (token, False)


@given(st.sets(st.integers(0, 199), min_size=1))
def test_greedily_the_likeliest_of_the_allowed_comes(tokens: set[int]) -> None:
    logits = np.round(WIDE[:200])  # many are equally likely: the first of them comes
    token, _ = led(Sampler(SamplingParams(temperature=0.0), (), 200), logits, tokens)
    assert token == max(sorted(tokens), key=lambda one: logits[one])


@pytest.mark.parametrize("tokens", [{0, 2, 4}, {5, 6, 7}, set(range(8)), {7}])
@pytest.mark.parametrize("params", [{"temperature": 0.7}, {"temperature": 1.0, "top_k": 3}, {"top_p": 0.7}])
def test_allowed_tokens_come_as_often_as_if_the_others_were_masked(tokens: set[int], params: dict) -> None:
    logits = np.log(np.array([0.4, 0.2, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01], np.float32))
    masked = np.where(np.isin(np.arange(8), list(tokens)), logits, np.float32(-1e9))
    sampler, reference = (Sampler(SamplingParams(seed=seed, **params), (), 8) for seed in (1, 2))
    found = np.bincount([led(sampler, logits, tokens)[0] for _ in range(6000)], minlength=8) / 6000
    expected = np.bincount(drawn(reference, masked, 6000), minlength=8) / 6000
    assert np.abs(found - expected).max() < 0.035


def test_a_model_that_does_what_it_is_asked_needs_no_mask() -> None:
    logits = np.zeros(50, np.float32)
    logits[7] = 30
    for temperature in (0.0, 1.0):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=1), (), 50)
        assert [led(sampler, logits, {7, 8}) for _ in range(5)] == [(7, False)] * 5


def test_rules_that_leave_nothing_of_what_is_allowed_end_the_answer() -> None:
    for temperature in (0.0, 1.0):
        asked = SamplingParams(temperature=temperature, allowed_token_ids=(3, 4))
        sampler = Sampler(asked, (), 50, TokenRules.of(asked, (), 0))
        with pytest.raises(RequestFailed, match="no token may come next"):
            led(sampler, WIDE[:50], {5, 6})
        assert led(sampler, WIDE[:50], {4, 6})[0] == 4


def test_what_was_not_drawn_is_not_penalised() -> None:
    logits = np.array([3.0, 2.0, 0.0], np.float32)
    sampler = Sampler(SamplingParams(temperature=0.0, presence_penalty=1.5), (), 3)
    assert [led(sampler, logits, {1, 2})[0], sampler.draw(logits)] == [1, 0]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}])
def test_an_undecided_choice_hears_what_would_come_without_a_constraint(params: dict[str, float]) -> None:
    logits, heard = np.array([9.0, 1.0, 0.0, 0.0], np.float32), []

    class Undecided(Allowed):
        undecided = True

        def allows(self, token: int) -> bool:
            heard.append(token)
            return super().allows(token)

    choices = Undecided({1}, 4, known=True)
    assert Sampler(SamplingParams(seed=1, **params), (), 4).draw(logits, choices) == 1  # type: ignore[arg-type]
    assert heard[0] == 0


@pytest.mark.parametrize("params", [{"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}])
def test_what_proposes_nothing_weighs_the_tokens_once(
    params: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed: list[np.ndarray] = []
    draw = Sampler._draw_random

    def noted(self: Sampler, logits: np.ndarray, numbers: Any) -> Any:
        weighed.append(logits)
        return draw(self, logits, numbers)

    monkeypatch.setattr(Sampler, "_draw_random", noted)
    sampler = Sampler(SamplingParams(seed=1, **params), (), 4)  # type: ignore[arg-type]
    assert sampler.draw(np.array([9.0, 1.0, 0.0, 0.0], np.float32), Allowed({1}, 4, known=True)) == 1
    assert len(weighed) == 1
