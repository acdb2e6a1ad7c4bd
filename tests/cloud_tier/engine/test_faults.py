"""What goes wrong inside one request stays inside it: numbers that are none, exceptions in a step, bad messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cloud_tier.engine import drawing
from cloud_tier.engine.attention import KvCache
from cloud_tier.engine.core import EngineBroken
from cloud_tier.engine.messages import Compute
from cloud_tier.engine.rows import RowAttention
from cloud_tier.engine.sampler import SamplerState, sample
from router.values.sampling import SamplingParams
from tests.support import engine_models
from tests.support.engine_models import Bench, prompt, small

NAN = float("nan")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_models.save("llama", tmp_path_factory.mktemp("weights"))


def _alone(weights: Path, tokens: list[int], max_tokens: int = 12, **options: Any) -> list[int]:
    bench = Bench(small(weights, prefix_caching=False))
    bench.add(0, tokens, max_tokens, **options)
    return bench.run()[0]


def _poison(bench: Bench, number: float = NAN) -> None:
    """Spoil what the cache holds of the first block that a prefix may hit."""
    block = next(iter(bench.core.pool._by_digest.values()))
    size = bench.core.pool.block_tokens
    bench.model.attention.cache.values[1, :, block * size : (block + 1) * size] = number


@pytest.mark.parametrize("gathered", [False, True], ids=["runs", "gathered"])
@pytest.mark.parametrize("number", [NAN, float("inf")])
def test_a_poisoned_kv_block_fails_the_request_that_reads_it_and_no_later_one(
    llama: Path, gathered: bool, number: float
) -> None:
    bench = Bench(small(llama), gathered=gathered)
    bench.add(0, prompt(64))
    bench.run()
    _poison(bench, number)
    bench.add(1, prompt(64))  # shares the poisoned prefix
    bench.add(2, prompt(30, 5))  # its company does not
    bench.run()
    bench.add(3, prompt(64))
    answers = bench.run()
    assert bench.core.load().prefix_hit_tokens == 48, "only request 1 found the prefix: what followed it is gone too"
    assert answers[3] == answers[0] == _alone(llama, prompt(64))
    assert answers[2] == _alone(llama, prompt(30, 5))
    assert (answers[1], set(bench.failures)) == ([], {1})
    assert "not a number" in bench.failures[1]
    assert bench.core.load().failed == 1


def test_a_poisoned_block_is_found_out_in_a_prompt_chunk_that_draws_nothing(llama: Path) -> None:
    bench = Bench(small(llama))
    bench.add(0, prompt(17))
    bench.run()
    _poison(bench)
    bench.add(1, [*prompt(16), *prompt(90, 3)])
    bench.step()
    assert set(bench.failures) == {1}
    assert not bench.core.busy


def _spoil_own(bench: Bench, handle: int) -> None:
    """Spoil the last key of a running sequence, in its row and in its pages."""
    sequence, attention = bench.core._sequences[handle], bench.model.attention
    assert isinstance(attention, RowAttention)
    assert sequence.blocks is not None
    block, place = divmod(sequence.num_computed - 1, 16)
    attention.cache.keys[0, :, sequence.blocks.ids[block] * 16 + place] = NAN
    attention._grid[0, attention._rows[handle].index, :3, sequence.num_computed - 1] = NAN


def test_poison_in_mid_answer_ends_that_answer_and_its_blocks_are_zeroed(llama: Path) -> None:
    bench = Bench(small(llama))
    bench.add(0, prompt(20), 30)
    bench.add(1, prompt(20, 1), 30)
    for _ in range(4):
        bench.step()
    _spoil_own(bench, 0)
    answers = bench.run()
    assert (set(bench.failures), len(answers[0])) == ({0}, 4)
    assert answers[1] == _alone(llama, prompt(20, 1), 30)
    bench.add(2, prompt(20), 30)
    assert bench.run()[2] == _alone(llama, prompt(20), 30)
    assert not bench.model.attention.cache.keys.isnan().any()


def test_a_shared_block_is_not_zeroed_under_who_still_reads_it(llama: Path) -> None:
    bench = Bench(small(llama))
    bench.add(0, prompt(40), 40)
    bench.step()
    bench.step()
    bench.add(1, [*prompt(40)[:32], *prompt(8, 9)], 40)
    bench.step()
    assert bench.core.load().prefix_hit_tokens == 32
    _spoil_own(bench, 1)
    answers = bench.run()
    assert set(bench.failures) == {1}
    assert answers[0] == _alone(llama, prompt(40), 40)


def test_overflow_to_infinite_logits_is_seen_too(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(small(llama))
    bench.add(0, prompt(20))
    bench.add(1, prompt(20, 1))
    real = bench.model._logits

    def overflowing(x: torch.Tensor, segments: Any) -> Any:
        logits = real(x, segments)
        if logits is not None and len(segments) == 2:
            logits[0, 7] = torch.inf
        return logits

    monkeypatch.setattr(bench.model, "_logits", overflowing)
    bench.run()
    assert set(bench.failures) == {0}


def test_a_request_whose_computation_raises_fails_alone(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(small(llama, token_budget=64))
    sampled = {"sampling": SamplingParams(temperature=0.8, seed=11)}
    for seed in range(3):
        bench.add(seed, prompt(20, seed), 8, **sampled)
    bench.step()
    real = bench.model.forward
    culprit = bench.core._sequences[1]

    def forward(segments: Any, **rest: Any) -> Any:
        if any(segment.tokens == culprit.tokens[culprit.num_computed :] for segment in segments):
            raise IndexError("index out of range in self")
        return real(segments, **rest)

    monkeypatch.setattr(bench.model, "forward", forward)
    bench.step()
    monkeypatch.undo()
    answers = bench.run()
    assert set(bench.failures) == {1}
    assert "IndexError: index out of range" in bench.failures[1]
    assert [answers[n] for n in (0, 2)] == [_alone(llama, prompt(20, n), 8, **sampled) for n in (0, 2)]


def test_a_request_whose_sampling_raises_fails_alone_and_shifts_no_other_seed(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(small(llama))
    sampled = {"sampling": SamplingParams(temperature=0.8, top_p=0.9, seed=11, repetition_penalty=1.3)}
    for seed in range(3):
        bench.add(seed, prompt(20, seed), 8, **sampled)
    bench.step()
    culprit = bench.core._sequences[2].sampler

    def faulty(logits: torch.Tensor, states: Any) -> Any:
        if culprit not in states:
            return sample(logits, states)
        for state in states:
            state.uniform()
        raise RuntimeError("probability tensor contains either inf or nan")

    monkeypatch.setattr(drawing, "sample", faulty)
    answers = bench.run()
    assert set(bench.failures) == {2}
    assert [answers[n] for n in (0, 1)] == [_alone(llama, prompt(20, n), 8, **sampled) for n in (0, 1)]


def test_a_step_too_large_for_memory_is_computed_in_parts(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(small(llama))
    real = bench.model.forward

    def forward(segments: Any, **rest: Any) -> Any:
        if len(segments) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(segments, **rest)

    monkeypatch.setattr(bench.model, "forward", forward)
    for seed in range(3):
        bench.add(seed, prompt(20, seed))
    answers = bench.run()
    assert not bench.failures
    assert answers == {seed: _alone(llama, prompt(20, seed)) for seed in range(3)}


def test_an_engine_that_can_compute_nothing_any_more_says_so(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(small(llama))
    bench.add(0, prompt(20))
    bench.step()

    def forward(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(bench.model, "forward", forward)
    with pytest.raises(EngineBroken, match="device-side assert"):
        bench.step()


def test_what_the_computation_itself_calls_broken_is_not_tried_again(llama: Path) -> None:
    bench = Bench(small(llama))
    steps: list[Compute] = []

    def compute(step: Compute) -> Any:
        steps.append(step)
        raise EngineBroken("rank 1 is out of step")

    bench.core._compute = compute
    bench.add(0, prompt(20))
    with pytest.raises(EngineBroken, match="out of step"):
        bench.step()
    assert len(steps) == 1


def test_a_request_that_cannot_be_taken_in_is_told_at_the_next_step(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(small(llama))
    bench.add(0, prompt(20))

    def create(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(SamplerState, "create", create)
    bench.add(1, prompt(20))
    monkeypatch.undo()
    assert bench.run()[0] == _alone(llama, prompt(20))
    assert set(bench.failures) == {1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_cache_holds_no_garbage(dtype: torch.dtype) -> None:
    """Memory that was used before may hold NaN, and a masked slot is read times 0."""
    garbage = [torch.full((2, 3, 4096, 8), NAN) for _ in range(4)]
    del garbage
    cache = KvCache((2, 3, 4096, 8), dtype, torch.device("cpu"))
    assert (cache.keys.dtype, tuple(cache.values.shape)) == (dtype, (2, 3, 4096, 8))
    assert not cache.keys.any()
    assert not cache.values.any()
