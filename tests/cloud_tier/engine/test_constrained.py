"""Constrained answers in the engine: every one matches, in any company, with drafts, preempted, and over two ranks."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cloud_tier.answers import Told
from cloud_tier.engine import drawing
from cloud_tier.engine.constrained import Guided
from cloud_tier.engine.drawing import Drawn
from cloud_tier.engine.protocol import EngineRequest
from cloud_tier.engine.sampler import SamplerState, sample
from cloud_tier.engine.speculation import Speculation
from cloud_tier.engine.streams import Stream
from cloud_tier.engine.torch_engine import TorchEngine
from models.text import grammar
from models.text.grammar import Grammars, Matcher
from models.text.guide import Guide, Lookahead
from models.text.stream import TextStream
from models.text.tokenizer import Tokenizer
from router.base.errors import InvalidRequest
from router.values.chunk import FinishReason
from router.values.constraint import Constraint, ConstraintKind
from router.values.sampling import SamplingParams
from tests.support import engine_models
from tests.support.engine_models import Bench, small
from tests.support.masks import count_masks

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


def under(constraint: Constraint | None, **options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0} | options), constraint=constraint)


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


@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_greedy_answers_are_what_they_are_with_a_mask_for_every_token(
    speaking: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, draft_tokens: int
) -> None:
    def said() -> dict[int, list[int]]:
        bench = Bench(small(speaking, draft_tokens=draft_tokens))
        for handle, constraint in enumerate((WORDS, LIST, LONG, WORDS)):
            prompt = tokenizer.encode("the cat sat on the mat " * (handle + 1))
            bench.add(handle, prompt, 60, sampling=under(constraint), eos_ids=frozenset({2}))
        settle(bench)
        return bench.run()

    asking = said()
    monkeypatch.setattr(SamplerState, "proposes", False)
    monkeypatch.setattr(Guide, "allows", lambda *_: False)
    assert asking == said()


def test_a_willing_model_needs_a_mask_at_the_beginning_and_where_it_is_refused(
    speaking: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = count_masks(monkeypatch)
    bench = Bench(small(speaking))
    sevens = Constraint(ConstraintKind.REGEX, "[0-9A-F]{12,30}!")
    (seven,) = tokenizer.encode("7")
    for handle in range(2):  # which is what both would always say
        sampling = under(sevens, temperature=float(handle), seed=1, logit_bias=((seven, 100.0),))
        bench.add(handle, tokenizer.encode("the cat"), 60, sampling=sampling)
    settle(bench)
    answers = bench.run()
    assert [tokenizer.decode(answers[handle]) for handle in range(2)] == ["7" * 30 + "!"] * 2
    assert len(masks) == 4


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}])
def test_allowed_tokens_come_as_often_as_if_the_others_were_masked(
    tokenizer: Tokenizer, params: dict[str, float]
) -> None:
    """Letters, of which three are allowed: a, c and e."""
    letters = [tokenizer.encode(letter)[0] for letter in "abcdef"]
    logits = torch.full((tokenizer.vocab_size,), -30.0)
    logits[letters] = torch.tensor([0.35, 0.25, 0.2, 0.1, 0.06, 0.04]).log()
    allowed = Constraint(ConstraintKind.CHOICE, '["a", "c", "e"]')
    grammars, asked = Grammars(lambda: tokenizer), {"temperature": 1.0, **params}

    def states(first: int) -> list[SamplerState]:
        seeds = range(first, first + 1500)
        made = (SamplingParams(seed=seed, **asked) for seed in seeds)  # type: ignore[arg-type]
        return [SamplerState.create(each, (), len(logits), torch.device("cpu")) for each in made]

    sequences: Any = [
        SimpleNamespace(
            handle=handle,
            sampler=state,
            guide=Guide(grammars.matcher(allowed), len(logits), proposes=state.proposes),
        )
        for handle, state in enumerate(states(0))
    ]
    guided = Guided(torch.device("cpu"))
    guided.begin(sequences)
    guided.wait(sequences, 60)
    chosen = drawing._choose(logits.repeat(len(sequences), 1), sequences, Drawn(), guided, 60)
    masked = logits.clone()
    masked[[letters[place] for place in (1, 3, 5)]] = -torch.inf
    expected = Counter(sample(masked.repeat(1500, 1), states(5000)))
    found = Counter(chosen.values())
    assert set(found) <= {letters[place] for place in (0, 2, 4)}
    assert sum(found.values()) == 1500
    for token in found | expected:
        assert abs(found[token] - expected[token]) < 110, "six standard deviations of their difference"


def test_rules_that_leave_nothing_of_what_is_allowed_end_the_answer_alone(speaking: Path, tokenizer: Tokenizer) -> None:
    bench = Bench(small(speaking))
    other = (tokenizer.encode("z")[0],)
    for handle, options in enumerate(({}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "top_k": 4})):
        sampling = under(WORDS, allowed_token_ids=other, **options)  # type: ignore[arg-type]
        bench.add(handle, tokenizer.encode("the cat"), 20, sampling=sampling)
    bench.add(3, tokenizer.encode("the cat"), 20)
    assert len(bench.run()[3]) == 20
    assert set(bench.failures) == {0, 1, 2}
    assert all("no token may come next" in failure for failure in bench.failures.values())


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


async def test_what_its_constraint_ends_counts_no_token_that_was_not_drawn(
    speaking: Path, tokenizer: Tokenizer
) -> None:
    bench = Bench(small(speaking))
    bench.add(0, tokenizer.encode("the"), 190, sampling=under(WORDS))
    told = Told(TextStream(tokenizer), tokenizer, 1, logprobs=False)
    stream = Stream(EngineRequest("r", (1,), under(WORDS), 190))
    drawn, chunks = 0, []
    while bench.core.busy or len(bench.core.compiling):
        for brought in bench.core.step():
            drawn += len(brought.token_ids)
            stream.push(brought)
            chunks.append(told.chunk(await stream.next()))
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert sum(chunk.tokens for chunk in chunks) == drawn


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


class Held:
    """The answers of one constraint are known to take long, and their masks do not come until `gate` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, constraint: Constraint) -> None:
        self.gate = threading.Event()
        self._held: list[Matcher] = []
        matcher_of, mask = Grammars.matcher, Matcher.mask

        def noted(grammars: Grammars, asked: Constraint, said: str = "") -> Matcher:
            matcher = matcher_of(grammars, asked, said)
            if asked == constraint:
                self._held.append(matcher)
            return matcher

        def held(matcher: Matcher, vocab_size: int) -> npt.NDArray[np.uint8]:
            if matcher in self._held:
                self.gate.wait(30)
            return mask(matcher, vocab_size)

        slow = property(lambda guide: guide._matcher in self._held, lambda *_: None)
        wait = Lookahead.wait  # the steps are counted: on a slow machine too, masks of the others are there in time
        monkeypatch.setattr(Lookahead, "wait", staticmethod(lambda guides, _: wait(guides, 30)))
        monkeypatch.setattr(Grammars, "matcher", noted)
        monkeypatch.setattr(Matcher, "mask", held)
        monkeypatch.setattr(Guide, "slow", slow, raising=False)


@pytest.mark.parametrize("hostile", [1, 3])
def test_masks_that_do_not_come_hold_no_other_up_for_a_step(
    speaking: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, hostile: int
) -> None:
    prompt = tokenizer.encode("the cat")
    calm, bench = Bench(small(speaking)), Bench(small(speaking))
    for each in (calm, bench):
        each.add(0, prompt, 20)
        each.add(1, prompt, 60, sampling=under(LIST), eos_ids=frozenset({2}))
        settle(each)
    expected = calm.run()
    held = Held(monkeypatch, WORDS)
    try:
        for handle in range(2, 2 + hostile):
            bench.add(handle, prompt, 190, sampling=under(WORDS, temperature=1.0, seed=handle))
        settle(bench)
        while set(bench.core._sequences) & {0, 1}:
            bench.step()
            assert bench.steps <= calm.steps + 2 * hostile  # their prompts, no masks
        assert bench.answers[0] == expected[0]
        assert bench.answers[1] == expected[1]
        bench.core.abort(2)
    finally:
        held.gate.set()
    answers = bench.run()
    assert all(re.fullmatch(WORDS.source, tokenizer.decode(answers[handle])) for handle in range(3, 2 + hostile))
    assert not bench.failures


def test_a_late_one_that_is_preempted_is_computed_again(
    speaking: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokenizer.encode("the cat sat on the mat")
    alone = Bench(small(speaking))
    alone.add(9, prompt, 190, sampling=under(LONG))
    settle(alone)
    expected = alone.run()[9]
    held = Held(monkeypatch, LONG)
    bench = Bench(small(speaking, kv_cache_tokens=192, max_running=3))
    try:
        bench.add(9, prompt, 190, sampling=under(LONG))
        settle(bench)
        while bench.core.busy and not bench.core._guided._late:
            bench.step()
        assert bench.core._guided._late
        for handle in range(2):
            bench.add(handle, tokenizer.encode("0 the mat " * 6), 90, priority=1)
        while set(bench.core._sequences) & {0, 1}:
            bench.step()
        assert bench.core.load().preemptions > 0
    finally:
        held.gate.set()
    assert bench.run()[9] == expected


def test_a_constraint_that_compiles_for_ever_holds_no_other_up(
    speaking: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun, compile_ = threading.Event(), threading.Event(), grammar._compile
    large = Constraint(ConstraintKind.CHOICE, json.dumps(["x" * 60 + str(number) for number in range(900)]))

    def held(constraint: Constraint, llguidance_tokenizer: Any) -> Any:
        if constraint == large:
            begun.set()
            gate.wait(30)
        return compile_(constraint, llguidance_tokenizer)

    monkeypatch.setattr(grammar, "_compile", held)
    bench = Bench(small(speaking))
    prompt = tokenizer.encode("the cat")
    try:
        bench.add(0, prompt, 100, sampling=under(large))
        assert begun.wait(30)
        bench.add(1, prompt, 20)
        bench.add(2, prompt, 60, sampling=under(LIST), eos_ids=frozenset({2}))
        made = bench.core.compiling._waiting[2][1]
        wait([made])
        while bench.core.busy:
            bench.step()
        assert len(bench.answers[1]) == 20
        assert json.loads(tokenizer.decode(bench.answers[2]))
        assert bench.answers[0] == []
    finally:
        gate.set()
    assert tokenizer.decode(bench.run()[0]) in json.loads(large.source)


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
