"""Answers under constraints in the loop: led beside the steps, and no other waits for one whose masks take long."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from edge_agent.generate import batcher
from edge_agent.generate.request import Generation
from edge_agent.generate.sampling import Sampler
from edge_agent.runtime.protocol import StepInput
from models.text.grammar import Grammars, Matcher
from models.text.guide import Guide
from models.text.stream import TextStream
from models.text.tokenizer import Tokenizer
from router.base.errors import RequestFailed
from router.values.chunk import FinishReason
from router.values.constraint import Constraint, ConstraintKind
from router.values.sampling import SamplingParams
from tests.edge_agent.generate.test_loop import collect, request, running
from tests.support import tiny_tokenizer
from tests.support.fake_runtime import FakeRuntime, answer, texts
from tests.support.masks import count_masks
from tests.support.waiting import until

TOKENIZER = Tokenizer(tiny_tokenizer.backend(), eos_ids=[2], bos_id=None, adds_bos=False)
GRAMMARS = Grammars(lambda: TOKENIZER)
DIGITS = Constraint(ConstraintKind.REGEX, r"[0-9A-F]{12,40}!")


def constrained(seed: int, max_tokens: int = 100, temperature: float = 1.0) -> tuple[Generation, Matcher]:
    matcher = GRAMMARS.matcher(DIGITS)
    sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), [5], FakeRuntime().facts.vocab_size)
    sequence = batcher.Sequence([5, 6, 7], max_tokens, sampler, matcher=matcher)
    return Generation(f"c{seed}", sequence, TextStream(TOKENIZER), frozenset({2})), matcher


def hold(monkeypatch: pytest.MonkeyPatch, held: list[Matcher], gate: threading.Event) -> None:
    """Their guides are known to take long, and their masks do not come until `gate` is set."""
    mask = Matcher.mask

    def gated(matcher: Matcher, vocab_size: int) -> npt.NDArray[np.uint8]:
        if matcher in held:
            gate.wait(30)
        return mask(matcher, vocab_size)

    monkeypatch.setattr(Matcher, "mask", gated)
    slow = property(lambda guide: guide._matcher in held, lambda *_: None)
    monkeypatch.setattr(Guide, "slow", slow, raising=False)


async def test_constrained_ones_beside_free_ones() -> None:
    async with running(FakeRuntime()) as loop:
        free = request([3, 4, 5], 30)
        led = [constrained(seed)[0] for seed in range(3)]
        for generation in (*led, free):
            loop.submit(generation)
        assert (await collect(free))[0] == texts(answer([3, 4, 5], 30))
        for generation in led:
            text, last = await collect(generation)
            assert re.fullmatch(DIGITS.source, text)
            assert last.finish_reason is FinishReason.STOP


async def test_greedy_answers_are_what_they_are_with_a_mask_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def said() -> list[str]:
        async with running(FakeRuntime()) as loop:
            led = [constrained(seed, temperature=0.0)[0] for seed in range(3)]
            for number, generation in enumerate(led):
                generation.sequence.prompt_ids[0] = 10 + number
                loop.submit(generation)
            return [(await collect(generation))[0] for generation in led]

    asking = await said()
    monkeypatch.setattr(Sampler, "proposes", False)
    assert asking == await said()
    assert len(set(asking)) > 1, "nothing was told apart"


class Willing(FakeRuntime):
    """Says 7 for ever."""

    def forward(self, batch: Sequence[StepInput]) -> npt.NDArray[np.float32]:
        logits = super().forward(batch)
        logits[:] = 0
        logits[:, TOKENIZER.encode("7")[0]] = 20
        return logits


async def test_a_willing_model_needs_a_mask_at_the_beginning_and_where_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks = count_masks(monkeypatch)
    async with running(Willing()) as loop:
        led = [constrained(seed)[0] for seed in range(2)]
        for generation in led:
            loop.submit(generation)
        assert [(await collect(generation))[0] for generation in led] == ["7" * 40 + "!"] * 2
    assert len(masks) == 4


async def test_masks_that_do_not_come_hold_no_other_up_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, gate = FakeRuntime(), threading.Event()
    (slow, matcher), (quick, _) = constrained(1), constrained(2)
    hold(monkeypatch, [matcher], gate)
    async with running(runtime) as loop:
        try:
            loop.submit(slow)
            await until(lambda: len(runtime.steps) == 1)  # its prompt
            free = request([3, 4, 5], 40)
            loop.submit(free)
            loop.submit(quick)
            assert (await collect(free))[0] == texts(answer([3, 4, 5], 40))
            assert re.fullmatch(DIGITS.source, (await collect(quick))[0])
            assert slow.inbox.empty()
            # Prompts, and a step a token; those of the two come together once both decode.
            assert len(runtime.steps) <= 1 + 2 + 40 + len(quick.sequence.generated)
            assert all(handle != 1 for step in runtime.steps[1:] for handle, _ in step)
        finally:
            gate.set()
        text, last = await collect(slow)
        assert re.fullmatch(DIGITS.source, text)
        assert last.finish_reason is FinishReason.STOP
        assert last.prompt_tokens == 3
        await until(lambda: not runtime.sequences)


async def test_one_that_waits_for_its_mask_can_be_cancelled_and_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, runtime = threading.Event(), FakeRuntime()
    (gone, first), (broken, second) = constrained(1), constrained(2)
    hold(monkeypatch, [first, second], gate)
    monkeypatch.setattr(Guide, "failure", property(lambda _: "it is over", lambda *_: None), raising=False)
    async with running(runtime) as loop:
        try:
            loop.submit(gone)
            loop.submit(broken)
            await until(lambda: len(runtime.steps) == 2)
            loop.cancel(gone)
            await until(lambda: len(runtime.sequences) == 1)
        finally:
            gate.set()
        with pytest.raises(RequestFailed, match="it is over"):
            await collect(broken)
        await until(lambda: not runtime.sequences)
