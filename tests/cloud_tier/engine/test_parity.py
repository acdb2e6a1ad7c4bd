"""The engine computes what transformers computes, however the work is cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cloud_tier.engine import rows
from cloud_tier.engine.linear import largest_weight
from cloud_tier.engine.speculation import NgramIndex, Speculation
from router.base.errors import ConfigError
from router.values.sampling import SamplingParams
from tests.support import engine_models
from tests.support.engine_models import Bench, prompt, small


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Path:
    return engine_models.save("llama", folder)


def _alone(weights: Path, tokens: list[int], max_tokens: int = 12, **options: Any) -> list[int]:
    bench = Bench(small(weights, token_budget=512, prefix_caching=False))
    bench.add(0, tokens, max_tokens, **options)
    return bench.run()[0]


@pytest.mark.parametrize("gathered", [False, True], ids=["runs", "gathered"])
@pytest.mark.parametrize("name", engine_models.ARCHITECTURES)
def test_logits_equal_transformers(name: str, gathered: bool, folder: Path) -> None:
    weights = engine_models.save(name, folder)
    bench = Bench(small(weights), gathered=gathered)
    tokens = prompt(50)
    bench.add(0, tokens, 33)
    answer = bench.run()[0]
    with torch.no_grad():
        expected = engine_models.reference(name)(torch.tensor([tokens + answer])).logits[0, len(tokens) - 1 : -1]
    computed = torch.cat(bench.logits)
    assert len(computed) == 33  # the prompt's last token and 32 decode steps
    assert (computed - expected).abs().max() <= 1e-3
    assert expected.argmax(-1).tolist() == answer


def test_kept_layers_equal_transformers_without_the_others(llama: Path) -> None:
    bench = Bench(small(llama, layers=(0, 2)))
    tokens = prompt(30)
    bench.add(0, tokens, 1)
    bench.run()
    model = engine_models.reference("llama")
    del model.model.layers[1]
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    assert (bench.logits[0][0] - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("budget", [7, 16, 33])
def test_a_prompt_in_chunks_equals_the_whole(llama: Path, budget: int) -> None:
    bench = Bench(small(llama, token_budget=budget))
    bench.add(0, prompt(90))
    assert bench.run()[0] == _alone(llama, prompt(90))
    assert bench.steps >= 90 // budget


@pytest.mark.parametrize("length", [32, 33, 47, 48])
def test_a_prefix_hit_equals_the_plain_run(llama: Path, length: int) -> None:
    bench = Bench(small(llama))
    bench.add(0, prompt(64))
    bench.run()
    bench.add(1, prompt(64)[:length])
    assert bench.run()[1] == _alone(llama, prompt(64)[:length])
    assert bench.core.load().prefix_hit_tokens == (length - 1) // 16 * 16
    assert bench.cached == {0: 0, 1: (length - 1) // 16 * 16}


def test_the_cache_of_one_owner_is_not_found_by_another(llama: Path) -> None:
    bench = Bench(small(llama))
    for handle, owner in enumerate(["a", "b", "", "a"]):
        bench.add(handle, prompt(64), cache_owner=owner)
        bench.run()
    assert bench.cached == {0: 0, 1: 0, 2: 0, 3: 48}


def test_a_preempted_request_tells_what_it_found_at_first(llama: Path) -> None:
    bench = Bench(small(llama, kv_cache_tokens=128, max_context_tokens=128, kv_block_tokens=4))
    for handle in range(4):
        bench.add(handle, prompt(20, handle), 30, arrival_s=float(handle))
    bench.run()
    assert bench.core.load().preemptions > 0
    assert bench.cached == dict.fromkeys(range(4), 0)


def test_a_preempted_sequence_ends_like_one_left_alone(llama: Path) -> None:
    bench = Bench(small(llama, kv_cache_tokens=128, max_context_tokens=128, kv_block_tokens=4))
    for handle in range(4):
        bench.add(handle, prompt(20, handle), 30, arrival_s=float(handle))
    answers = bench.run()
    assert bench.core.load().preemptions > 0
    assert answers == {handle: _alone(llama, prompt(20, handle), 30) for handle in range(4)}


def test_sampling_survives_preemption_and_company(llama: Path) -> None:
    sampled = {"sampling": SamplingParams(temperature=0.9, top_p=0.9, seed=5, repetition_penalty=1.1)}
    alone = _alone(llama, prompt(20), 30, **sampled)
    bench = Bench(small(llama, kv_cache_tokens=96, max_context_tokens=96, kv_block_tokens=4))
    for handle in range(3):
        bench.add(handle, prompt(20, handle + 1), 30)
    bench.add(9, prompt(20), 30, arrival_s=9.0, **sampled)
    assert bench.run()[9] == alone
    assert bench.core.load().preemptions > 0


def test_company_does_not_change_an_answer(llama: Path) -> None:
    lengths = [3, 17, 40, 64, 5, 29, 80, 11]
    bench = Bench(small(llama))
    for handle, length in enumerate(lengths):
        bench.add(handle, prompt(length, handle))
        bench.step()
    answers = bench.run()
    assert answers == {handle: _alone(llama, prompt(length, handle)) for handle, length in enumerate(lengths)}


@pytest.mark.parametrize("budget", [24, 64])
def test_bfloat16_is_close(llama: Path, budget: int) -> None:
    exact, rounded = (Bench(small(llama, dtype=dtype, token_budget=budget)) for dtype in ("float32", "bfloat16"))
    for bench in (exact, rounded):
        bench.add(0, prompt(60), 1)
        bench.run()
    assert torch.nn.functional.cosine_similarity(exact.logits[0], rounded.logits[0]).item() > 0.999


@pytest.mark.parametrize("call_tokens", [1, 300, 10**6], ids=["alone", "as shipped", "together"])
@pytest.mark.parametrize("first_width", [8, 256])
def test_how_rows_are_batched_does_not_change_an_answer(
    llama: Path, monkeypatch: pytest.MonkeyPatch, call_tokens: int, first_width: int
) -> None:
    lengths = [3, 150, 9, 64, 5]
    expected = {handle: _alone(llama, prompt(length, handle), 20) for handle, length in enumerate(lengths)}
    monkeypatch.setattr(rows, "_CALL_TOKENS", call_tokens)
    monkeypatch.setattr(rows, "_FIRST_WIDTH", first_width)
    bench = Bench(small(llama, token_budget=64))
    for handle, length in enumerate(lengths):
        bench.add(handle, prompt(length, handle), 20)
        bench.step()
    assert bench.run() == expected
    bench.add(9, prompt(3), 20)  # the grid is narrow again
    assert bench.run()[9] == expected[0]


@pytest.mark.parametrize("name", engine_models.ARCHITECTURES)
def test_int8_is_close(name: str, folder: Path) -> None:
    weights = engine_models.save(name, folder)
    exact, rounded = (Bench(small(weights, dtype=dtype, token_budget=64)) for dtype in ("float32", "int8"))
    for bench in (exact, rounded):
        bench.add(0, prompt(60), 1)
        bench.run()
    least = 0.995 if largest_weight() == 127 else 0.98  # weights of 7 bits, where the CPU sums no others exactly
    assert torch.nn.functional.cosine_similarity(exact.logits[0], rounded.logits[0]).item() > least


def test_int8_on_a_gpu_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"int8.*CPU.*bfloat16"):
        small(llama, dtype="int8", device="cuda")


def _draft_from(answers: list[list[int]], monkeypatch: pytest.MonkeyPatch, *, wrong_every: int) -> None:
    """Have drafts taken from the sequences that will come, with a wrong token now and then."""

    def draft(_: NgramIndex, tokens: list[int], most: int) -> list[int]:
        whole = next((one for one in answers if one[: len(tokens)] == tokens), [])
        places = range(len(tokens), min(len(tokens) + most, len(whole)))
        return [(whole[place] + (place % wrong_every == 0)) % engine_models.VOCAB for place in places]

    monkeypatch.setattr(NgramIndex, "draft", draft)
    monkeypatch.setattr(Speculation, "worth", lambda *_: True)


@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gathered"])
@pytest.mark.parametrize("wrong_every", [1, 3, 1000])
def test_drafts_do_not_change_an_answer(
    llama: Path, monkeypatch: pytest.MonkeyPatch, wrong_every: int, gathered: bool
) -> None:
    prompts = [prompt(30, 1), prompt(40, 2), prompt(18, 3)]
    sampled = {"sampling": SamplingParams(temperature=0.9, seed=5)}
    expected = {handle: _alone(llama, tokens, 60) for handle, tokens in enumerate(prompts)}
    expected[3] = _alone(llama, prompt(20), 60, **sampled)
    _draft_from([prompts[handle] + expected[handle] for handle in range(3)], monkeypatch, wrong_every=wrong_every)
    bench = Bench(small(llama, token_budget=64, draft_tokens=4), gathered=gathered)
    for handle, tokens in enumerate(prompts):
        bench.add(handle, tokens, 60)
    bench.add(3, prompt(20), 60, **sampled)
    assert bench.run() == expected
    load = bench.core.load()
    assert load.drafted_tokens > 100
    assert (load.accepted_tokens > 0) == (wrong_every > 1)


def test_a_prefix_hit_on_what_drafts_computed_equals_the_plain_run(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = _alone(llama, prompt(27, 1), 60)
    _draft_from([prompt(27, 1) + answer], monkeypatch, wrong_every=3)
    bench = Bench(small(llama, token_budget=64, draft_tokens=4))
    bench.add(0, prompt(27, 1), 60)
    assert bench.run()[0] == answer
    bench.add(1, [*prompt(27, 1), *answer[:50]], 9)
    assert bench.run()[1] == answer[50:59]
    assert bench.core.load().prefix_hit_tokens >= 64


@pytest.mark.parametrize("budget", [9, 24, 400])
def test_log_probabilities_equal_transformers(llama: Path, budget: int) -> None:
    """Of the answer and of every token of the prompt, in company, after a preemption, drafts or none."""
    bench = Bench(small(llama, token_budget=budget, kv_cache_tokens=256, draft_tokens=4))
    told = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=True)
    bench.add(0, prompt(90), 6, sampling=told)
    bench.add(1, prompt(40, seed=1), 30)
    bench.add(2, prompt(90), 5, sampling=SamplingParams(temperature=0.9, seed=3, logprobs=0), priority=1)
    answers = bench.run()
    for handle, tops in ((0, 3), (2, 0)):
        tokens = prompt(90) + answers[handle]
        with torch.no_grad():
            expected = engine_models.reference("llama")(torch.tensor([tokens])).logits[0].log_softmax(-1)
        drawn = bench.prompt_logprobs[handle] + bench.logprobs[handle]
        first = len(tokens) - len(drawn)
        assert [one.token_id for one in drawn] == tokens[first:]
        if handle == 0:
            assert (first, drawn[0].logprob, drawn[0].top) == (0, None, ())
            drawn, first = drawn[1:], 1
        for place, one in enumerate(drawn, first - 1):
            assert one.logprob == pytest.approx(expected[place, one.token_id].item(), abs=2e-3)
            best = expected[place].topk(tops)
            assert [token for token, _ in one.top] == best.indices.tolist()
            assert [logprob for _, logprob in one.top] == pytest.approx(best.values.tolist(), abs=2e-3)
    assert bench.prompt_logprobs[1] == bench.logprobs[1] == bench.prompt_logprobs[2] == []


def test_a_scored_prompt_is_computed_though_it_is_cached(llama: Path) -> None:
    bench = Bench(small(llama))
    bench.add(0, prompt(64))
    bench.run()
    bench.add(1, prompt(64), 1, sampling=SamplingParams(temperature=0, logprobs=0, prompt_logprobs=True))
    bench.run()
    assert bench.cached == {0: 0, 1: 0}
    assert len(bench.prompt_logprobs[1]) == 64
