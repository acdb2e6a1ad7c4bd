"""The sampler against transformers' own filters, and its promise that a row depends on nothing but itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import generation

from cloud_tier.engine import sampler
from cloud_tier.engine.sampler import SamplerState, sample
from router.values.sampling import SamplingParams

CPU = torch.device("cpu")
VOCAB = 700


def _logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def _state(prompt: tuple[int, ...] = (1, 2, 3), vocab: int = VOCAB, **params: Any) -> SamplerState:
    return SamplerState.create(SamplingParams(**params), prompt, vocab, CPU)


def _draws(logits: torch.Tensor, number: int, **params: Any) -> Counter[int]:
    states = [_state(vocab=logits.shape[-1], seed=seed, **params) for seed in range(number)]
    return Counter(sample(logits.repeat(number, 1), states))


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = _logits(4)
    assert sample(logits.clone(), [_state(temperature=0.0)] * 4) == logits.argmax(-1).tolist()


def test_a_vanishing_temperature_is_greedy_and_finite() -> None:
    assert sample(_logits(), [_state(temperature=1e-45, seed=1)]) == _logits().argmax(-1).tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(5, 1.0), (0, 0.6), (20, 0.5), (600, 1.0), (600, 0.9), (0, 0.9999), (1, 0.1)]
)
def test_only_tokens_that_transformers_keeps_are_drawn(top_k: int, top_p: float) -> None:
    logits = _logits()
    kept = logits
    if top_k:
        kept = generation.TopKLogitsWarper(top_k)(torch.zeros(1, 1), kept)
    if top_p < 1:
        kept = generation.TopPLogitsWarper(top_p)(torch.zeros(1, 1), kept)
    allowed = set(kept[0].isfinite().nonzero().flatten().tolist())
    drawn = set(_draws(logits, 400, temperature=1.0, top_k=top_k, top_p=top_p))
    assert drawn <= allowed
    assert len(allowed) > 12 or drawn == allowed


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 8}, {"top_k": 8, "top_p": 0.8}, {"temperature": 0.5}])
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = _logits(vocab=12) / 3
    params = {"temperature": 1.0, **params}
    kept = logits / params["temperature"]
    kept = generation.TopKLogitsWarper(params["top_k"])(torch.zeros(1, 1), kept) if "top_k" in params else kept
    kept = generation.TopPLogitsWarper(params["top_p"])(torch.zeros(1, 1), kept) if "top_p" in params else kept
    expected = kept.softmax(-1)[0]
    counts = _draws(logits, 4000, **params)
    observed = torch.tensor([counts[token] for token in range(12)]) / 4000
    assert (observed - expected).abs().max() < 0.03


def test_wide_nuclei_fall_back_to_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    params: list[dict[str, Any]] = [{"top_p": 0.99}, {"top_k": 600}, {"top_k": 300, "top_p": 0.95}, {"top_p": 0.2}]
    states = [_state(temperature=1.0, seed=seed, **p) for seed in range(30) for p in params]
    narrow = sample(_logits(120), states)
    monkeypatch.setattr(sampler, "_NUCLEUS_CANDIDATES", VOCAB)
    states = [_state(temperature=1.0, seed=seed, **p) for seed in range(30) for p in params]
    assert sample(_logits(120), states) == narrow


def test_company_does_not_change_a_draw() -> None:
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "top_p": 0.9, "seed": 2, "presence_penalty": 0.5},
        {"temperature": 1.2, "top_k": 40, "seed": 3, "repetition_penalty": 1.3},
    ]
    together = [_state(**p) for p in params]
    alone = [_state(**p) for p in params]
    for step in range(5):
        logits = _logits(4, seed=step)
        answers = sample(logits.clone(), together)
        assert answers == [sample(logits[row : row + 1].clone(), [alone[row]])[0] for row in range(4)]


def test_the_same_seed_repeats_and_another_does_not() -> None:
    first, again, other = (
        [sample(_logits(seed=step), [state])[0] for step in range(20)]
        for state in (_state(seed=-4), _state(seed=-4), _state(seed=5))
    )
    assert first == again != other


def test_repetition_penalty_equals_transformers() -> None:
    logits = _logits()
    expected = generation.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 3]]), logits.clone())
    computed = logits.clone()
    sampler._penalise(computed, [_state(repetition_penalty=1.7)])
    assert torch.equal(computed, expected)


def test_presence_and_frequency_count_the_answer_alone() -> None:
    state = _state(prompt=(7, 7), presence_penalty=0.5, frequency_penalty=0.25)
    for token in (4, 4, 5):
        state.note(token)
    logits = torch.zeros(1, VOCAB)
    sampler._penalise(logits, [state])
    assert logits[0, 4] == -(0.5 + 2 * 0.25)
    assert logits[0, 5] == -(0.5 + 0.25)
    assert logits[0, 7] == 0


@pytest.mark.parametrize("min_p", [0.02, 0.3])
def test_min_p_keeps_what_transformers_keeps(min_p: float) -> None:
    logits = _logits()
    kept = generation.MinPLogitsWarper(min_p)(torch.zeros(1, 1), logits.clone())
    allowed = set(kept[0].isfinite().nonzero().flatten().tolist())
    for others in ({}, {"top_k": 500}, {"top_p": 0.9999}):
        assert set(_draws(logits, 400, temperature=1.0, min_p=min_p, **others)) <= allowed


def test_rules_for_single_tokens_touch_their_own_row_alone() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])

    def state(ending: frozenset[int] = frozenset(), **params: Any) -> SamplerState:
        return SamplerState.create(SamplingParams(temperature=0.0, **params), (), 4, CPU, ending)

    states = [
        state(),
        state(logit_bias=((0, -100.0), (3, 2.5))),
        state(allowed_token_ids=(3, 2)),
        state(frozenset({0}), min_tokens=2),
        state(allowed_token_ids=(2,), logit_bias=((0, 100.0),), repetition_penalty=2.0),
    ]
    drawn = [sample(logits.repeat(len(states), 1), states) for _ in range(3)]
    assert list(zip(*drawn, strict=True)) == [(0, 0, 0), (3, 3, 3), (2, 2, 2), (1, 1, 0), (2, 2, 2)]
    assert [one.follows_logits for one in states] == [True, False, False, False, False]
