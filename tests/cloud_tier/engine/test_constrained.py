"""Constrained answers in the engine: every one matches, in any company, with drafts, preempted, and over two ranks."""

from __future__ import annotations

import json
import re
from concurrent.futures import wait
from pathlib import Path

import pytest

from cloud_tier.engine.protocol import EngineRequest
from cloud_tier.engine.speculation import Speculation
from cloud_tier.engine.torch_engine import TorchEngine
from models.text.tokenizer import Tokenizer
from router.base.errors import InvalidRequest
from router.values.chunk import FinishReason
from router.values.constraint import Constraint, ConstraintKind
from router.values.sampling import SamplingParams
from tests.support import engine_models
from tests.support.engine_models import Bench, small

WORDS = Constraint(ConstraintKind.REGEX, r"(the cat |sat on |the mat ){4,30}end", param="structured_outputs.regex")
LIST = Constraint(
    ConstraintKind.JSON_SCHEMA, '{"type":"array","items":{"enum":["cat","mat"]},"minItems":3,"maxItems":9}'
)
LONG = Constraint(ConstraintKind.REGEX, r"(the cat |sat on |the mat ){25,30}end")
BAD = Constraint(ConstraintKind.REGEX, "[a-z", param="structured_outputs.regex")


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_models.save_with_tokenizer(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def tokenizer(speaking: Path) -> Tokenizer:
    return Tokenizer.load(speaking)


def settle(bench: Bench) -> None:
    """Let every constraint be compiled, so that all requests begin with the next step."""
    wait([made for _, made in bench.core.compiling._waiting.values()])


def under(constraint: Constraint | None, **options: float) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, **options}, constraint=constraint)  # type: ignore[arg-type]


def test_every_constrained_answer_matches_and_the_others_are_what_they_were(
    speaking: Path, tokenizer: Tokenizer
) -> None:
    alone, bench = Bench(small(speaking)), Bench(small(speaking))
    prompt = tokenizer.encode("the cat sat on")
    alone.add(0, prompt, 40, eos_ids=frozenset({2}))
    bench.add(0, prompt, 40, eos_ids=frozenset({2}))
    for handle in range(1, 5):
        sampling = under(WORDS if handle % 2 else LIST, temperature=1.0 if handle > 2 else 0.0, seed=handle)
        bench.add(handle, prompt, 190, sampling=sampling, eos_ids=frozenset({2}))
    answers = bench.run()
    assert answers[0] == alone.run()[0]
    assert re.fullmatch(WORDS.source, tokenizer.decode(answers[1]))
    assert 3 <= len(json.loads(tokenizer.decode(answers[2]))) <= 9
    assert re.fullmatch(WORDS.source, tokenizer.decode(answers[3]))
    assert 3 <= len(json.loads(tokenizer.decode(answers[4]))) <= 9


def test_drafts_of_constrained_answers_change_nothing(
    speaking: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speculation, "worth", lambda *_: True)
    plain, drafting = Bench(small(speaking)), Bench(small(speaking, draft_tokens=6))
    for bench in (plain, drafting):
        for handle, constraint in enumerate((WORDS, LIST, LONG)):
            prompt = tokenizer.encode("the cat sat on the mat " * (handle + 1))
            bench.add(handle, prompt, 60, sampling=under(constraint), eos_ids=frozenset({2}))
        settle(bench)
    assert drafting.run() == plain.run()
    assert drafting.core.load().accepted_tokens > 0
    assert drafting.steps < plain.steps


def test_a_preempted_one_goes_on_where_it_stood(speaking: Path, tokenizer: Tokenizer) -> None:
    wide, narrow = Bench(small(speaking)), Bench(small(speaking, kv_cache_tokens=192, max_running=3))
    for bench in (wide, narrow):
        for handle in range(4):
            prompt = tokenizer.encode(f"{handle} the mat " * 8)
            bench.add(handle, prompt, 90, sampling=under(LONG), eos_ids=frozenset({2}))
        settle(bench)
    assert narrow.run() == wide.run()
    assert narrow.core.load().preemptions > 0


def test_it_goes_on_behind_what_was_said_and_ends_without_an_end_token(speaking: Path, tokenizer: Tokenizer) -> None:
    bench = Bench(small(speaking))
    said = "the cat sat on the mat the c"
    bench.add(0, tokenizer.encode("x" + said), 150, sampling=under(WORDS), said=said)
    whole = said + tokenizer.decode(bench.run()[0])
    assert re.fullmatch(WORDS.source, whole), "no token ends an answer of this request, so the constraint did"


def test_a_cap_that_is_too_small_ends_by_length(speaking: Path, tokenizer: Tokenizer) -> None:
    bench = Bench(small(speaking))
    bench.add(0, tokenizer.encode("the"), 5, sampling=under(WORDS))
    reasons = []
    while bench.core.busy or len(bench.core.compiling):
        reasons += [brought.finish_reason for brought in bench.core.step() if brought.finish_reason]
    assert reasons == [FinishReason.LENGTH]


def test_what_cannot_be_enforced_ends_its_request_alone(speaking: Path, tokenizer: Tokenizer) -> None:
    bench = Bench(small(speaking))
    prompt = tokenizer.encode("the cat")
    bench.add(0, prompt, 8, sampling=under(BAD))
    bench.add(1, prompt, 8)
    bench.add(2, prompt, 8, sampling=under(WORDS), said="something else")
    endless = Constraint(ConstraintKind.REGEX, r"(a{0,300}a{0,300}){0,300}")  # goes past its bounds in the middle
    bench.add(3, prompt, 190, eos_ids=frozenset({2}), sampling=under(endless, temperature=1.0, seed=1, min_tokens=180))
    answers = bench.run()
    assert len(answers[1]) == 8
    assert "cannot be enforced" in bench.failures[0]
    assert "does not match" in bench.failures[2]
    assert "cannot be followed any further" in bench.failures[3]
    assert set(bench.failures) == {0, 2, 3}
    assert not bench.core.busy


def test_an_aborted_one_is_forgotten_while_it_compiles(speaking: Path, tokenizer: Tokenizer) -> None:
    bench = Bench(small(speaking))
    bench.add(0, tokenizer.encode("the"), 8, sampling=under(WORDS))
    bench.core.abort(0)
    assert bench.run() == {0: []}
    assert bench.core.load().queued == 0


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2])
async def test_over_processes_it_compiles_beside_the_steps_and_refuses_by_name(
    speaking: Path, tokenizer: Tokenizer, ranks: int
) -> None:
    engine = TorchEngine(small(speaking, tensor_parallel=ranks))
    await engine.start()

    async def ask(constraint: Constraint) -> tuple[str, FinishReason | None]:
        ids: list[int] = []
        reason = None
        request = EngineRequest("r", tuple(tokenizer.encode("the cat")), under(constraint), 190, eos_ids=frozenset({2}))
        async for chunk in engine.generate(request):
            ids += chunk.token_ids
            reason = chunk.finish_reason
        return tokenizer.decode(ids), reason

    try:
        for _ in range(2):  # compiled, then known
            text, reason = await ask(WORDS)
            assert re.fullmatch(WORDS.source, text)
            assert reason is FinishReason.STOP
        with pytest.raises(InvalidRequest, match=r"`structured_outputs.regex`.*unclosed character class") as refused:
            await ask(BAD)
        assert refused.value.param == BAD.param
        assert json.loads((await ask(LIST))[0])
    finally:
        await engine.stop()
