"""Lines in an engine: held up for all others with all that they have, and no token is other than it would have been."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloud_tier.engine.inbox import Inbox
from cloud_tier.engine.messages import Abort, Add, Channel, Compute, LimitLines, ToRank0
from cloud_tier.engine.model import Computed
from cloud_tier.engine.protocol import EngineRequest
from cloud_tier.engine.streams import Streams
from cloud_tier.engine.torch_engine import TorchEngine
from router.values.constraint import Constraint, ConstraintKind
from router.values.request import LINE_PRIORITY
from router.values.sampling import SamplingParams
from tests.cloud_tier.engine.test_scheduler import Echo
from tests.support import engine_models
from tests.support.engine_models import Bench, prompt, small
from tests.support.waiting import until

LINE: dict[str, Any] = {"priority": LINE_PRIORITY}
KINDS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.8, seed=8, top_p=0.9, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=0.9, seed=9, repetition_penalty=1.3, min_tokens=4, logprobs=2),
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_models.save("llama", tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_models.save_with_tokenizer(tmp_path_factory.mktemp("weights"))


def _lines(bench: Bench) -> None:
    for number, sampling in enumerate(KINDS):
        bench.add(number, prompt(30 + number, number), 16, sampling=sampling, **LINE)


@pytest.fixture(scope="module")
def undisturbed(llama: Path) -> Bench:
    bench = Bench(small(llama))
    _lines(bench)
    bench.run()
    return bench


@given(
    happens=st.lists(
        st.one_of(st.sampled_from(["step", "leave", "online", "hold", "one", "free"]), st.integers(1, 4)), max_size=20
    ),
    kv_cache_tokens=st.sampled_from([256, 512]),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_between_an_answer_is_what_it_would_have_been(
    *, llama: Path, undisturbed: Bench, happens: list[str | int], kv_cache_tokens: int
) -> None:
    bench = Bench(small(llama, kv_cache_tokens=kv_cache_tokens))
    compute, left = bench.core._compute, []

    def run(step: Compute) -> Computed:
        if left:
            left.pop()
            return bench.model.run(step, lambda: True)
        return compute(step)

    bench.core._compute = run
    _lines(bench)
    online = 100
    for what in happens:
        if what == "online":
            bench.add(online, prompt(20, online), 5)
            online += 1
        elif what in {"hold", "one", "free"}:
            bench.core.limit_lines({"hold": 0, "one": 1, "free": None}[what])
        elif what == "leave" and bench.core.busy:
            left.append(1)
            bench.step()
            left.clear()
        else:
            for _ in range(what if isinstance(what, int) else 1):
                if bench.core.busy:
                    bench.step()
    bench.core.limit_lines(None)
    answers = bench.run()
    assert not bench.failures
    assert {number: answers[number] for number in range(len(KINDS))} == undisturbed.answers
    told, expected = bench.logprobs[3], undisturbed.logprobs[3]
    assert [token.token_id for token in told] == [token.token_id for token in expected]
    assert [token.logprob for token in told] == pytest.approx([token.logprob for token in expected], abs=1e-4)
    assert bench.core.pool.num_free == bench.core.pool.num_blocks


def test_a_constrained_answer_is_held_up_and_goes_on_within_its_constraint(speaking: Path) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, constraint=Constraint(ConstraintKind.REGEX, "[a-z]{12}"))
    expected, bench = Bench(small(speaking)), Bench(small(speaking))
    for each in (expected, bench):
        each.add(0, prompt(20), 40, sampling=sampling, **LINE)
    while len(bench.answers[0]) < 3:
        bench.step()
    bench.core.limit_lines(0)
    assert not bench.core.busy
    bench.add(1, prompt(20, 1), 4)
    while bench.core.busy:
        bench.step()
    assert len(bench.answers[1]) == 4
    assert 3 <= len(bench.answers[0]) <= 4
    bench.core.limit_lines(None)
    assert bench.run()[0] == expected.run()[0]


def test_nobody_in_the_slack_is_computed_beside_others() -> None:
    echo = Echo()
    echo.add(0, 4, **LINE)
    echo.add(1, 4, **LINE)
    echo.step()
    echo.add(2, 4, 3)
    for _ in range(3):
        echo.step()
        assert [segment.handle for segment in echo.steps[-1]] == [2]
    echo.step()
    assert [segment.handle for segment in echo.steps[-1]] == [0, 1]
    echo.run()
    assert len(echo.answers[0]) == len(echo.answers[1]) == 8
    assert echo.core.load().preemptions == 0, "their blocks were not asked for"


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_as_many_are_computed_as_they_are_told(limit: int) -> None:
    echo = Echo(max_running=8, kv_cache_tokens=256)
    for number in range(5):
        echo.add(number, 4, 100, **LINE)
    echo.step()
    echo.core.limit_lines(limit)
    assert echo.core.busy == (limit > 0)
    echo.add(9, 4, 20)
    echo.step()
    for _ in range(3):
        echo.step()
        handles = [segment.handle for segment in echo.steps[-1]]
        assert handles == [9, *range(limit)]
    echo.core.limit_lines(None)
    while 9 not in echo.ended:
        echo.step()
        assert [segment.handle for segment in echo.steps[-1]] == [9]
    echo.step()
    assert len(echo.steps[-1]) == 5


def test_who_is_held_up_is_no_load_and_leaves_slots_and_blocks_to_others() -> None:
    echo = Echo()
    whole = echo.core.load().kv_blocks_free
    for number in range(4):
        echo.add(number, 8, **LINE)
    echo.step()
    load = echo.core.load()
    assert (load.running, load.queued, load.queued_prefill_tokens, load.pending_decode_tokens) == (0, 0, 0, 0)
    assert load.kv_blocks_free == whole
    for number in (5, 6, 7, 8):
        echo.add(number, 12, 4)
    echo.step()
    assert {segment.handle for segment in echo.steps[-1]} <= {5, 6, 7, 8}
    load = echo.core.load()
    assert load.running + load.queued == 4
    echo.run()
    assert all(len(echo.answers[number]) == 8 for number in range(4))


def test_a_step_is_left_for_whoever_comes_and_for_no_other_word() -> None:
    mine, theirs = socket.socketpair()
    decoder = msgspec.msgpack.Decoder(ToRank0)
    with mine, theirs:
        parent, inbox = Channel(mine, decoder), Inbox(Channel(theirs, decoder))

        def add(handle: int, priority: int = 0) -> Add:
            return Add(handle, EngineRequest(f"r{handle}", (1, 2), SamplingParams(), 4, priority=priority))

        parent.send(add(5, **LINE))
        parent.send(LimitLines(2))
        assert not inbox.deserted([0, 1], {0, 1})
        parent.send(add(6))
        assert inbox.deserted([0, 1], {0, 1})
        assert not inbox.deserted([0, 1], {0}), "somebody waits for the other one"
        parent.send(Abort(1))
        assert inbox.deserted([0, 1], {0})
        assert len(inbox.take(wait=True)) == 4
        assert not inbox.deserted([0, 1], {0, 1}), "what was taken is known to the engine"
        parent.send(LimitLines(0))
        assert inbox.deserted([0, 1], {0, 1})


@asynccontextmanager
async def _engine(weights: Path) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(small(weights))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def _answer(engine: TorchEngine, seed: int, max_tokens: int = 40, **options: Any) -> list[int]:
    request = EngineRequest(f"r{seed}", tuple(prompt(20, seed)), SamplingParams(temperature=0), max_tokens, **options)
    return [token async for chunk in engine.generate(request) for token in chunk.token_ids]


def test_nothing_need_be_heard_of_an_engine_that_holds_all_up() -> None:
    streams = Streams()
    handle, _ = streams.open(EngineRequest("r", (1, 2), SamplingParams(), 4, **LINE))
    assert streams.owes_soon
    streams.lines_limit = 0
    assert not streams.owes_soon
    assert not streams.idle.is_set(), "it is still owed its answer"
    other, _ = streams.open(EngineRequest("o", (1, 2), SamplingParams(), 4))
    assert streams.owes_soon
    streams.close(other)
    assert not streams.owes_soon
    streams.lines_limit = None
    assert streams.owes_soon
    streams.close(handle)
    assert not streams.owes_soon


@pytest.mark.process
async def test_an_engine_holds_requests_up_and_goes_on_with_them(llama: Path) -> None:
    async with _engine(llama) as engine:
        expected = await _answer(engine, 1)
        engine.limit_lines(0)
        held = asyncio.create_task(_answer(engine, 1, **LINE))
        assert len(await _answer(engine, 2, 8)) == 8
        assert not held.done()
        assert engine.load().running == engine.load().queued == 0
        engine.limit_lines(None)
        assert await held == expected


@pytest.mark.process
async def test_a_limit_holds_for_the_engine_that_is_started_next(llama: Path) -> None:
    async with _engine(llama) as engine:
        engine.limit_lines(0)
        first = engine.info
        assert first is not None
        os.kill(first.pids[0], signal.SIGKILL)
        await until(lambda: engine.ready and engine.info is not first)
        held = asyncio.create_task(_answer(engine, 1, **LINE))
        assert len(await _answer(engine, 2, 8)) == 8
        assert not held.done()
        engine.limit_lines(None)
        assert len(await held) == 40
