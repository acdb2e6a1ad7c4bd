"""A smaller model drafts: answers stay what they were, whatever it drafts; it pays, or it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_tier.engine.messages import Compute
from cloud_tier.engine.model import Computed
from cloud_tier.engine.protocol import EngineConfig
from cloud_tier.engine.speculation import Speculation
from router.base.errors import ConfigError
from router.values.sampling import SamplingParams
from tests.cloud_tier.engine.test_scheduler import Echo
from tests.support import engine_models
from tests.support.engine_models import Bench, prompt, small

PROMPTS = [prompt(30, 1), prompt(90, 2), prompt(18, 3)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_models.save("llama", tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_models.save("qwen2", tmp_path_factory.mktemp("weights"))


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "worth", lambda *_: True)


def answers(bench: Bench, max_tokens: int = 40) -> dict[int, list[int]]:
    """Three greedy ones, and a sampled one that is over soon."""
    for handle, tokens in enumerate(PROMPTS):
        bench.add(handle, tokens, max_tokens)
    bench.add(9, prompt(20), max_tokens // 4, sampling=SamplingParams(temperature=0.9, seed=5))
    return bench.run()


def test_a_model_that_drafts_for_itself_is_nearly_always_right(llama: Path, worth: None) -> None:
    plain, drafting = Bench(small(llama)), Bench(small(llama, draft_weights=str(llama), draft_tokens=4))
    assert answers(drafting) == answers(plain)
    load = drafting.core.load()
    assert load.accepted_tokens == load.drafted_tokens > 60
    assert drafting.steps < plain.steps


def test_of_fewer_layers_some_drafts_are_right(llama: Path, worth: None) -> None:
    drafting = Bench(small(llama, draft_weights=str(llama), draft_layers=(0, 2), draft_tokens=3))
    assert answers(drafting) == answers(Bench(small(llama)))
    load = drafting.core.load()
    assert 0 < load.accepted_tokens < load.drafted_tokens


def test_another_model_of_the_same_vocabulary_changes_no_answer(llama: Path, qwen: Path, worth: None) -> None:
    drafting = Bench(small(llama, draft_weights=str(qwen), draft_tokens=5))
    assert answers(drafting) == answers(Bench(small(llama)))
    load = drafting.core.load()
    assert load.accepted_tokens < load.drafted_tokens / 4


def test_of_a_long_text_only_what_is_new_is_computed_again(llama: Path, worth: None) -> None:
    bench = Bench(small(llama, draft_weights=str(llama), draft_layers=(0, 1), draft_tokens=4, token_budget=64))
    bench.add(0, prompt(150), 40)
    bench.run()
    passes = [segment for step in bench.drafting for segment in step.segments]
    assert [len(one.tokens) for one in passes[:3]] == [64, 64, 150 + 3 - 128]  # and what was said meanwhile
    assert all(len(one.tokens) <= 5 for one in passes[3:])


def test_preempted_and_found_in_the_cache_it_drafts_from_the_beginning(llama: Path, worth: None) -> None:
    options = {"kv_cache_tokens": 192, "token_budget": 48, "max_running": 3}
    drafting = Bench(small(llama, draft_weights=str(llama), draft_tokens=3, **options))
    assert answers(drafting, 60) == answers(Bench(small(llama)), 60)
    assert drafting.core.load().preemptions > 0
    drafting.add(20, [*PROMPTS[1], 5], 20)
    again = drafting.run()[20]
    plain = Bench(small(llama))
    plain.add(20, [*PROMPTS[1], 5], 20)
    assert again == plain.run()[20]
    assert drafting.core.load().prefix_hit_tokens > 0


def test_a_draft_that_fails_is_done_without(llama: Path, worth: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(small(llama, draft_weights=str(llama), draft_tokens=4))
    forward, calls = bench._compute_draft, iter(range(1000))

    def twice(step: Compute) -> Computed:
        if next(calls) in {2, 9}:
            raise RuntimeError("out of luck")
        return forward(step)

    monkeypatch.setattr(bench.core._drafts, "_compute", twice)
    assert answers(bench) == answers(Bench(small(llama)))
    assert bench.core.load().accepted_tokens > 0
    assert bench.failures == {}


def test_drafts_that_always_fail_end(llama: Path, worth: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, calls = Bench(small(llama, draft_weights=str(llama), draft_tokens=4)), []

    def never(step: Compute) -> Computed:
        calls.append(step)
        raise RuntimeError("broken")

    monkeypatch.setattr(bench.core._drafts, "_compute", never)
    assert answers(bench) == answers(Bench(small(llama)))
    assert len(calls) == 3


def test_a_draft_as_slow_as_the_model_ends_by_itself() -> None:
    echo = Echo(kv_cache_tokens=2048, max_running=2, draft_tokens=4)
    echo.seconds_a_step = 1.0
    fast = Echo(kv_cache_tokens=2048, max_running=2, draft_tokens=4)
    fast.seconds_a_step = 1.0
    for one, costs_s in ((echo, 1.0), (fast, 0.05)):
        one.draft_with(costs_s)
        one.add(1, 4, 1500)
        one.run()
    assert 0 < echo.core.load().drafted_tokens < 150
    assert fast.core.load().accepted_tokens > 1000
    assert echo.answers == fast.answers


def test_it_drafts_beside_an_engine_of_one_rank_only() -> None:
    with pytest.raises(ConfigError, match=r"of one rank, not of 2.*tensor_parallel = 1"):
        EngineConfig(weights="any", draft_weights="other", draft_tokens=4, tensor_parallel=2)
