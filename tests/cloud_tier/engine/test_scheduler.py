"""Scheduling without a model: budgets, order, preemption, and blocks that are conserved through random lives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_tier.engine.core import EngineCore
from cloud_tier.engine.drafts import ModelDrafts
from cloud_tier.engine.messages import Compute, Segment, Tokens
from cloud_tier.engine.model import Computed
from cloud_tier.engine.protocol import EngineConfig, EngineRequest
from router.base.errors import ConfigError
from router.values.chunk import FinishReason
from router.values.sampling import SamplingParams
from tests.support.clocks import VirtualClock

VOCAB = 32


class Echo:
    """A core over a model that answers token t with t + 1; notes every step's segments."""

    def __init__(self, clock: VirtualClock | None = None, **options: Any) -> None:
        values = {"kv_cache_tokens": 64, "kv_block_tokens": 4, "token_budget": 16, "max_running": 4, **options}
        self._config = config = EngineConfig(weights="none", **values)
        self.steps: list[list[Segment]] = []
        self.seconds_a_token = 0.0
        self.seconds_a_step = 0.0
        self._clock = clock or VirtualClock()
        self.core = EngineCore(
            config, self._compute, vocab_size=VOCAB, context_tokens=config.kv_cache_tokens, clock=self._clock
        )
        self.ended: dict[int, FinishReason] = {}
        self.answers: dict[int, list[int]] = {}

    def draft_with(self, costs_s: float) -> None:
        """Let a model draft that always says what the other will, and takes so long for each pass."""

        def compute(step: Compute) -> Computed:
            self._clock.pass_s(costs_s)
            return self._said(step)

        self.core._drafts = ModelDrafts(compute, self._config.token_budget)

    def add(self, handle: int, length: int, max_tokens: int = 8, **options: Any) -> None:
        self.answers[handle] = []
        sampling = options.pop("sampling", SamplingParams(temperature=0))
        self.core.add(
            handle, EngineRequest(f"r{handle}", tuple([handle % VOCAB] * length), sampling, max_tokens, **options)
        )

    def step(self) -> list[Tokens]:
        brought = self.core.step()
        self.core.check()
        assert 0 < len(self.steps[-1]) <= self._config.max_running
        assert sum(self.lengths()) <= self._config.token_budget
        for segment in self.steps[-1]:
            blocks = sum(number for _, number in segment.runs)
            assert segment.start + len(segment.tokens) <= blocks * self._config.kv_block_tokens
        for one in brought:
            self.answers[one.handle] += one.token_ids
            if one.finish_reason is not None:
                self.ended[one.handle] = one.finish_reason
        return brought

    def run(self) -> None:
        while self.core.busy:
            self.step()

    def lengths(self) -> list[int]:
        return [len(segment.tokens) for segment in self.steps[-1]]

    def _compute(self, step: Compute) -> Computed:
        self.steps.append(step.segments)
        tokens = sum(len(segment.tokens) for segment in step.segments)
        self._clock.pass_s(self.seconds_a_step + self.seconds_a_token * tokens)
        return self._said(step)

    def _said(self, step: Compute) -> Computed:
        segments = step.segments
        finite = [True] * len(segments)
        last = [token for s in segments if s.draws for token in s.tokens[-1 - s.earlier :]]
        if not last:
            return Computed(None, finite)
        logits = torch.zeros(len(last), VOCAB)
        logits[torch.arange(len(last)), (torch.tensor(last) + 1) % VOCAB] = 1.0
        return Computed(logits, finite)


def test_decoding_comes_before_prompts_and_the_budget_holds() -> None:
    echo = Echo()
    echo.add(0, 4)
    echo.step()
    echo.add(1, 40)
    echo.step()
    assert echo.lengths() == [1, 15]
    echo.step()
    assert echo.lengths() == [1, 15]
    echo.step()
    assert echo.lengths() == [1, 10]
    echo.run()
    assert len(echo.answers[0]) == len(echo.answers[1]) == 8


def test_prompts_hold_decoding_up_no_longer_than_the_target() -> None:
    clock = VirtualClock()
    echo = Echo(clock, token_budget=40, kv_cache_tokens=512, step_target_s=0.1)
    echo.seconds_a_token = 0.01
    echo.add(0, 4, 100)
    echo.add(1, 200, 1)
    echo.step()
    assert echo.lengths() == [4, 36]  # nobody decodes yet
    for _ in range(5):
        echo.step()
        assert echo.lengths()[0] == 1
        assert 8 <= echo.lengths()[1] <= 10  # at 100 tokens a second


def test_the_rest_of_the_budget_goes_to_the_next_waiting() -> None:
    echo = Echo()
    echo.add(0, 6)
    echo.add(1, 30)
    echo.step()
    assert echo.lengths() == [6, 10]


def test_higher_priority_is_served_first_then_earlier_arrival() -> None:
    echo = Echo(max_running=1)
    echo.add(0, 4, 1, arrival_s=3.0)
    echo.add(1, 4, 1, arrival_s=1.0)
    echo.add(2, 4, 1, arrival_s=2.0, priority=5)
    echo.run()
    assert list(echo.ended) == [2, 1, 0]


def test_lack_of_blocks_preempts_the_least_and_latest() -> None:
    echo = Echo(kv_cache_tokens=48)
    echo.add(0, 12, 30, arrival_s=1.0)
    echo.add(1, 12, 30, arrival_s=2.0, priority=-1)
    echo.add(2, 12, 30, arrival_s=3.0)
    while not echo.core.load().preemptions:
        echo.step()
    assert echo.core.load().queued == 1
    echo.run()
    assert set(echo.ended) == {0, 1, 2}
    assert list(echo.ended)[-1] == 1
    for handle, answer in echo.answers.items():
        assert answer == [(handle + 1 + step) % VOCAB for step in range(30)]


def test_a_preempted_sequence_goes_to_the_head_of_its_class() -> None:
    echo = Echo(kv_cache_tokens=32, max_running=2, prefix_caching=False)
    echo.add(0, 8, 20, arrival_s=1.0)
    echo.add(1, 8, 20, arrival_s=2.0)
    echo.step()
    echo.add(2, 8, 1, arrival_s=1.5)
    echo.add(3, 8, 1, arrival_s=0.5)
    while not echo.core.load().preemptions:
        echo.step()
    assert [sequence.handle for sequence in echo.core._scheduler.waiting] == [1, 3, 2]
    echo.run()
    assert len(echo.answers[1]) == 20


def test_the_window_ends_an_answer() -> None:
    echo = Echo(kv_cache_tokens=16)
    echo.add(0, 10, 100)
    echo.run()
    assert len(echo.answers[0]) == 6
    assert echo.ended == {0: FinishReason.LENGTH}


@pytest.mark.parametrize(("ignore_eos", "answer"), [(False, [1, 2]), (True, [1, 2, 3, 4])])
def test_an_end_token_ends_the_answer_and_is_not_emitted(ignore_eos: bool, answer: list[int]) -> None:
    echo = Echo()
    echo.add(0, 4, 4, eos_ids=frozenset({3}), sampling=SamplingParams(temperature=0, ignore_eos=ignore_eos))
    echo.run()
    assert echo.answers[0] == answer
    assert echo.ended[0] is (FinishReason.LENGTH if ignore_eos else FinishReason.STOP)


def test_load_counts_what_is_left_to_do() -> None:
    echo = Echo(max_running=1, token_budget=16)
    echo.add(0, 20, 5)
    echo.add(1, 10, 7)
    echo.step()
    load = echo.core.load()
    assert (load.running, load.queued) == (1, 1)
    assert load.queued_prefill_tokens == 4 + 10
    assert load.pending_decode_tokens == 12
    assert (load.kv_blocks_total, load.kv_blocks_free) == (16, 11)
    echo.run()
    assert echo.core.load().kv_blocks_free == 16


def test_a_budget_that_decoding_alone_would_eat_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_budget = 4 must exceed max_running = 4"):
        EngineConfig(weights="none", token_budget=4, max_running=4)


@pytest.mark.slow
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_random_lives_end_with_every_block_free_and_every_answer_right(seed: int) -> None:
    draw = random.Random(seed)
    echo = Echo(
        kv_cache_tokens=draw.choice([32, 64, 128]),
        kv_block_tokens=draw.choice([1, 4, 8]),
        token_budget=draw.choice([5, 9, 40]),
        prefix_caching=draw.random() < 0.7,
    )
    aborted: set[int] = set()
    for handle in range(draw.randrange(1, 14)):
        echo.add(
            handle,
            draw.randrange(1, 30),
            draw.randrange(1, 25),
            priority=draw.randrange(-1, 2),
            arrival_s=draw.random(),
        )
        for _ in range(draw.randrange(4)):
            if echo.core.busy:
                echo.step()
        if draw.random() < 0.3:
            victim = draw.randrange(handle + 1)
            if victim not in echo.ended:
                aborted.add(victim)
            echo.core.abort(victim)
            echo.core.check()
    echo.run()
    assert set(echo.ended) == set(echo.answers) - aborted
    for handle, answer in echo.answers.items():
        assert answer == [(handle + 1 + step) % VOCAB for step in range(len(answer))]
    load = echo.core.load()
    assert load.kv_blocks_free == load.kv_blocks_total
    assert (load.queued_prefill_tokens, load.pending_decode_tokens) == (0, 0)


def test_a_waiting_request_of_higher_priority_takes_the_slot_of_a_running_lower_one() -> None:
    echo = Echo(max_running=2)
    echo.add(1, 4, 12, arrival_s=1.0)
    echo.add(2, 4, 12, arrival_s=2.0)
    echo.step()
    echo.step()
    echo.add(3, 4, 4, arrival_s=3.0, priority=1)
    echo.step()
    assert {segment.handle for segment in echo.steps[-1]} == {1, 3}, "the later of the two lower ones went"
    echo.run()
    assert echo.core.load().preemptions == 1
    assert list(echo.ended) == [3, 1, 2]
    assert echo.answers == {
        handle: [(handle + n) % VOCAB for n in range(1, length + 1)] for handle, length in ((1, 12), (2, 12), (3, 4))
    }


def test_a_waiting_request_of_higher_priority_takes_the_blocks_of_running_lower_ones() -> None:
    echo = Echo(kv_cache_tokens=32, max_running=4)
    for handle in (1, 2):
        echo.add(handle, 12, 2, arrival_s=float(handle))
    echo.step()
    echo.add(3, 24, 2, arrival_s=3.0, priority=5)
    echo.run()
    assert next(iter(echo.ended)) == 3
    assert len(echo.ended) == 3


@pytest.mark.parametrize("finished_by", ["length", "eos"])
def test_drafts_save_steps_and_change_no_answer(finished_by: str) -> None:
    eos = frozenset({20} if finished_by == "eos" else ())
    answers, steps = [], []
    for draft_tokens in (0, 4):
        echo = Echo(kv_cache_tokens=512, max_running=3, draft_tokens=draft_tokens)
        echo.seconds_a_step = 1.0
        for handle, length in ((1, 90), (2, 61), (3, 7)):
            # A prompt that counts up to 8 twice over: what follows 8 has been seen, what follows 31 has not yet.
            ids = (*range(handle, 9), *range(9))
            request = EngineRequest(f"r{handle}", ids, SamplingParams(temperature=0), length, eos_ids=eos)
            echo.answers[handle] = []
            echo.core.add(handle, request)
        echo.run()
        answers.append((echo.answers, echo.ended))
        steps.append(len(echo.steps))
        load = echo.core.load()
        assert (load.accepted_tokens > 0) == (draft_tokens > 0 and finished_by == "length")
    assert answers[0] == answers[1]
    if finished_by == "length":
        assert steps[1] < steps[0] / 2


def test_drafts_end_by_themselves_where_every_token_costs_as_much_as_the_first() -> None:
    echo = Echo(kv_cache_tokens=2048, max_running=2, draft_tokens=4)
    echo.seconds_a_token = 1.0
    echo.add(1, 4, 1500)
    echo.run()
    assert 0 < echo.core.load().drafted_tokens < 100


def test_drafts_are_for_greedy_requests_alone_and_preempt_nobody() -> None:
    echo = Echo(kv_cache_tokens=64, max_running=4, draft_tokens=8)
    echo.seconds_a_step = 1.0
    echo.add(1, 4, 40, sampling=SamplingParams(temperature=0.5, top_k=1))
    echo.run()
    assert echo.core.load().drafted_tokens == 0
    echo.add(2, 4, 59)
    echo.run()
    assert echo.core.load().preemptions == 0
    assert echo.core.load().drafted_tokens > 0


def test_equals_never_displace_each_other() -> None:
    echo = Echo(max_running=1)
    for handle in range(4):
        echo.add(handle, 4, 8, arrival_s=float(-handle))
        echo.step()
    echo.run()
    assert echo.core.load().preemptions == 0


@pytest.mark.slow
def test_ten_thousand_random_steps_lose_no_block() -> None:
    chance = random.Random(4)
    echo = Echo(kv_cache_tokens=256, max_running=6, token_budget=24, draft_tokens=3)
    alive: dict[int, int] = {}
    for step in range(10_000):
        for handle in [handle for handle in alive if handle in echo.ended]:
            del alive[handle]
        if not alive or (len(alive) < 12 and chance.random() < 0.4):
            alive[step] = chance.randint(1, 40)
            echo.add(step, alive[step], chance.randint(1, 30), arrival_s=float(step), priority=chance.randint(-1, 2))
        if chance.random() < 0.05:
            echo.core.abort(gone := chance.choice(list(alive)))
            del alive[gone]
        if echo.core.busy:
            echo.step()
            echo.steps = echo.steps[-1:]
    assert echo.core.load().preemptions > 100
    echo.run()
    assert echo.core.pool.num_free == echo.core.pool.num_blocks
