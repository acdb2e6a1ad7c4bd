"""Pipelines that really run, in threads and processes: order, isolation, deadlines, slow stages, crashes, reloads."""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.pipelines.batching import BatchSettings
from models.pipelines.known_good import KnownGood
from models.pipelines.lessons import Lessons
from models.pipelines.pipeline import Pipeline, PipelinePlan
from models.pipelines.process import ProcessWork
from models.pipelines.set_apart import ProcessEnded, SetApart
from models.pipelines.stage import StagePlan, Work
from router.base.clock import MonotonicClock
from router.base.errors import (
    ConfigError,
    DeadlineLost,
    InputsTooLarge,
    InvalidRequest,
    OverspillError,
    RefusedAlone,
    ReplicaBroken,
    ReplicaUnreachable,
    RequestFailed,
    Unavailable,
)
from tests.support.waiting import PATIENCE_S, until, until_answered, until_true

BATCHED = BatchSettings(max_size=64)


def stage(name: str, work: Work, **more: Any) -> StagePlan:
    return StagePlan(name, lambda: work, **{"batching": BATCHED, **more})


@asynccontextmanager
async def running(*stages: StagePlan, **more: Any) -> AsyncIterator[Pipeline]:
    broke: Callable[[str], None] = more.pop("broke", lambda _: None)
    lessons: Lessons | None = more.pop("lessons", None)
    pipeline = Pipeline(PipelinePlan("test", stages, **more), MonotonicClock(), broke, lessons)
    await pipeline.open()
    try:
        yield pipeline
    finally:
        await pipeline.close()


async def ask(
    pipeline: Pipeline, *values: Any, priority: int = 0, due_s: float = math.inf, caller: str = ""
) -> list[Any]:
    ticket = await pipeline.run(values, priority=priority, due_s=due_s, cost=len(values), caller=caller)
    assert ticket.began_s <= ticket.ended_s
    return ticket.results


def doubled(batch: list[int]) -> list[int]:
    return [2 * value for value in batch]


def poisoned(batch: list[int]) -> list[int]:
    if -1 in batch:
        raise ValueError("minus one")
    return doubled(batch)


async def test_results_come_in_order_whatever_the_batches() -> None:
    async with running(stage("one", doubled, batching=BatchSettings(3)), stage("two", doubled, workers=3)) as pipeline:
        assert await ask(pipeline, *range(50)) == [4 * value for value in range(50)]
        many = await asyncio.gather(*(ask(pipeline, value, value + 1) for value in range(40)))
        assert many == [[4 * value, 4 * value + 4] for value in range(40)]
        assert (pipeline.requests, pipeline.items) == (0, 0)


async def test_a_poisoned_input_does_not_fail_its_batch() -> None:
    gate = threading.Event()

    def work(batch: list[int]) -> list[int]:
        gate.wait(10)
        return poisoned(batch)

    async with running(stage("model", work)) as pipeline:
        first = asyncio.create_task(ask(pipeline, 0))
        await until(lambda: pipeline.stages[0].busy)
        asks = [asyncio.create_task(ask(pipeline, -1 if value == 13 else value)) for value in range(32)]
        await until(lambda: pipeline.stages[0].waiting == 32)
        gate.set()
        found = await asyncio.gather(first, *asks, return_exceptions=True)
        counters = pipeline.stages[0].counters
    assert [value for value in found if not isinstance(value, BaseException)] == [
        [0],
        *([2 * value] for value in range(32) if value != 13),
    ]
    poison = found[14]
    assert isinstance(poison, RequestFailed)
    assert "minus one" in poison.message
    assert counters.sizes[SIZE_32] == 1  # they were one batch
    assert (counters.failed, counters.isolated) == (1, 1)


SIZE_32 = 5  # its class in `models.pipelines.stage.SIZES`


async def test_a_function_that_leaves_takes_no_worker_along() -> None:
    async with running(stage("model", leaving)) as pipeline:
        found = await asyncio.wait_for(
            asyncio.gather(*(ask(pipeline, value) for value in (1, -1, 4)), return_exceptions=True), 5
        )
        assert [one for one in found if not isinstance(one, BaseException)] == [[2], [8]]
        assert isinstance(found[1], RequestFailed)
        assert await asyncio.wait_for(ask(pipeline, 5), 60) == [10]


async def test_a_request_fails_as_a_whole_and_others_do_not() -> None:
    async with running(stage("model", poisoned)) as pipeline:
        good, bad = await asyncio.gather(ask(pipeline, 1, 2), ask(pipeline, 3, -1, 4), return_exceptions=True)
    assert good == [2, 4]
    assert isinstance(bad, RequestFailed)


async def test_an_error_of_the_tree_is_its_senders_own() -> None:
    def work(batch: list[int]) -> list[Any]:
        return [InvalidRequest("odd", param="input") if value % 2 else value for value in batch]

    async with running(stage("check", work)) as pipeline:
        good, bad = await asyncio.gather(ask(pipeline, 2), ask(pipeline, 3), return_exceptions=True)
    assert good == [2]
    assert isinstance(bad, InvalidRequest)
    assert bad.param == "input"


async def test_a_wrong_number_of_results_is_an_error() -> None:
    async with running(stage("model", lambda batch: batch[1:])) as pipeline:
        with pytest.raises(RequestFailed, match="returned 0 results for 1 inputs"):
            await ask(pipeline, 1)


async def test_a_slow_stage_does_not_hold_up_the_model() -> None:
    gate = threading.Event()

    def slow(batch: list[int]) -> list[int]:
        gate.wait(10)
        return batch

    async with running(stage("model", doubled), stage("post", slow, batching=BatchSettings(1))) as pipeline:
        asks = [asyncio.create_task(ask(pipeline, value)) for value in range(100)]
        await until(lambda: pipeline.stages[0].counters.items == 100)  # though none has left the second
        assert pipeline.stages[1].counters.items == 0
        assert pipeline.requests == 100
        gate.set()
        assert [await one for one in asks] == [[2 * value] for value in range(100)]


async def test_what_is_too_late_is_not_computed() -> None:
    gate = threading.Event()
    seen: list[int] = []

    def work(batch: list[int]) -> list[int]:
        gate.wait(10)
        seen.extend(batch)
        return batch

    async with running(stage("model", work)) as pipeline:
        first = asyncio.create_task(ask(pipeline, 1))
        await until(lambda: pipeline.stages[0].busy)
        due_s = time.monotonic() + 0.02
        second, third = asyncio.create_task(ask(pipeline, 2, due_s=due_s)), asyncio.create_task(ask(pipeline, 3))
        await asyncio.sleep(0.05)
        gate.set()
        assert (await first, await third) == ([1], [3])
        with pytest.raises(DeadlineLost):
            await second
        assert pipeline.stages[0].counters.late == 1
    assert seen == [1, 3]


async def test_a_caller_who_leaves_is_not_computed_for() -> None:
    gate = threading.Event()
    seen: list[int] = []

    def work(batch: list[int]) -> list[int]:
        gate.wait(10)
        seen.extend(batch)
        return batch

    async with running(stage("model", work)) as pipeline:
        first, second = asyncio.create_task(ask(pipeline, 1)), None
        await until(lambda: pipeline.stages[0].busy)
        second = asyncio.create_task(ask(pipeline, 2))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        gate.set()
        await first
        await ask(pipeline, 3)
    assert seen == [1, 3]


async def test_more_than_fits_is_refused_with_a_time_to_come_back() -> None:
    gate = threading.Event()
    async with running(stage("model", lambda batch: [gate.wait(10) for _ in batch]), queue_items=3) as pipeline:
        inside = asyncio.create_task(ask(pipeline, 1, 2))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable) as refused:
            await ask(pipeline, 3, 4)
        assert refused.value.retry_after_s > 0
        gate.set()
        await inside
        await ask(pipeline, *range(10))  # alone, it may be as large as it likes


async def test_a_stage_that_fails_on_what_it_has_computed_before_is_told_once() -> None:
    told: list[str] = []
    dead = threading.Event()

    def work(batch: list[int]) -> list[int]:
        if dead.is_set():
            raise RuntimeError("no device")
        return doubled(batch)

    async with running(stage("model", work), broke=told.append) as pipeline:
        assert await ask(pipeline, 7) == [14]
        dead.set()
        for value in range(9):
            with pytest.raises(RequestFailed, match="no device"):
                await ask(pipeline, value)
        await until(lambda: told)
    assert told == ["stage model failed 3 times in a row, and fails on an input that it has computed before"]


async def test_inputs_that_fail_however_many_break_no_stage_that_computes_others() -> None:
    """One caller may send nothing else: everybody inside would lose their answers with each reload."""
    told: list[str] = []
    tried: list[int] = []

    def work(batch: list[int]) -> list[int]:
        tried.extend(batch)
        return poisoned(batch)

    async with running(stage("model", work), broke=told.append) as pipeline:
        assert await ask(pipeline, 7) == [14]
        for _ in range(10):
            with pytest.raises(RequestFailed, match="minus one"):
                await ask(pipeline, -1)
        assert await ask(pipeline, 8) == [16]
    assert told == []
    assert tried.count(7) == 4  # once for its sender, and after every third failure


async def test_who_comes_first_to_a_stage_has_it_loaded_anew_once_and_no_more() -> None:
    """Nothing is known of it yet; where a load did not help, another one will not."""
    told: list[str] = []
    known = Lessons()
    for loads in range(3):
        async with running(stage("model", poisoned), broke=told.append, lessons=known) as pipeline:
            for _ in range(6):
                with pytest.raises(RequestFailed):
                    await ask(pipeline, -1)
            assert told == ["stage model failed 3 times in a row, and has computed no input yet"], loads


def test_what_is_kept_is_small_and_a_copy() -> None:
    whole = np.zeros((1000, 4))
    kept = KnownGood()
    row = {"x": whole[3]}
    kept.passed(row, 100)
    row["x"][:] = 5.0
    seen: list[Any] = []

    def work(batch: list[Any]) -> list[Any]:
        seen.extend(batch)
        return batch

    assert kept.why_broken(work) == ""
    assert seen[0]["x"].tolist() == [0, 0, 0, 0]
    assert seen[0]["x"].base is None
    kept.passed("larger", 200)
    kept.passed("hardly smaller", 60)
    kept.passed("small", 50)
    kept.why_broken(work)
    assert seen[1:] == ["small"]


def test_what_has_no_size_is_copied_once() -> None:
    """Not for each batch of texts, whose memory nobody counts."""
    copies: list[int] = []

    class Told:
        def __deepcopy__(self, memo: object) -> Told:
            copies.append(1)
            return self

    kept = KnownGood()
    for _ in range(5):
        kept.passed(Told(), 0)
    assert len(copies) == 1


async def test_what_cannot_be_measured_or_told_fails_alone_and_the_worker_goes_on() -> None:
    """Where a worker ends, its stage stands still for everybody."""

    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def work(batch: list[int]) -> list[Any]:
        if -2 in batch:
            raise Silent
        return [None if value == -1 else value for value in batch]

    stages = stage("work", work), stage("next", list, cost=lambda value: value + 0)
    async with running(*stages, size_of=lambda value: value + 0) as pipeline:
        assert isinstance(await failed(ask(pipeline, -1)), RequestFailed)
        assert isinstance(await failed(ask(pipeline, -2)), RequestFailed)
        with pytest.raises(TypeError):
            await ask(pipeline, "text")
        assert await asyncio.wait_for(ask(pipeline, 4), PATIENCE_S) == [4]
        assert (pipeline.requests, pipeline.items) == (0, 0)


async def test_who_leaves_while_a_stage_is_crowded_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage behind drops what is left of it, and whoever waits for that room has to hear of it."""
    gate = threading.Event()

    def behind(batch: list[bytes]) -> list[int]:
        gate.wait(30)
        return [len(value) for value in batch]

    stages = (
        stage("enlarge", lambda batch: [1000 * v for v in batch]),
        stage("behind", behind, batching=BatchSettings(1)),
    )
    async with running(*stages, queue_bytes=1500, size_of=bytes_of) as pipeline:
        mallory = asyncio.create_task(ask(pipeline, b"m", b"m", b"m"))
        await until(lambda: pipeline.crowded(0))
        guest = asyncio.create_task(ask(pipeline, b"g"))
        await until(lambda: pipeline.requests == 2)
        mallory.cancel()
        await asyncio.gather(mallory, return_exceptions=True)
        looks, crowded, freed = itertools.count(), pipeline.crowded, pipeline.freed
        seen = [next(looks)]

        def look(stage: int) -> bool:
            found = crowded(stage)
            seen.append(next(looks))
            return found

        def free(stage: int) -> None:
            """The stage before looks at once, as it may."""
            before = seen[-1]
            freed(stage)
            if stage == 1 and pipeline.stages[0].waiting:
                until_true(lambda: seen[-1] > before)

        monkeypatch.setattr(pipeline, "crowded", look)
        monkeypatch.setattr(pipeline, "freed", free)
        gate.set()
        assert await asyncio.wait_for(guest, PATIENCE_S) == [1000]


async def test_one_request_of_many_poisons_breaks_nothing() -> None:
    told: list[str] = []
    async with running(stage("model", poisoned), broke=told.append) as pipeline:
        with pytest.raises(RequestFailed):
            await ask(pipeline, *[-1] * 50)
        assert await ask(pipeline, 4) == [8]
        await asyncio.sleep(0.05)
    assert told == []


async def test_a_stage_waits_while_those_behind_it_hold_too_much_of_the_memory() -> None:
    """Small inputs become large ones: what waits is bounded by its bytes, however many inputs one caller may send."""
    gate, made = threading.Event(), []

    def enlarge(batch: list[bytes]) -> list[bytes]:
        made.extend(batch)
        return [1000 * value for value in batch]

    def behind(batch: list[bytes]) -> list[int]:
        gate.wait(30)
        return [len(value) for value in batch]

    alone = BatchSettings(1)
    stages = stage("enlarge", enlarge, batching=alone), stage("same", list, batching=alone), stage("behind", behind)
    async with running(*stages, queue_bytes=2500, size_of=bytes_of) as pipeline:
        mallory = asyncio.create_task(ask(pipeline, *[b"m"] * 40))
        await until(lambda: pipeline.crowded(0))
        guest = asyncio.create_task(ask(pipeline, b"g", priority=1))
        await until(lambda: pipeline.requests == 2)
        assert len(made) <= 4  # 2,500 bytes are behind it, and one was on its way
        assert pipeline.size_bytes <= 4000 + 41
        gate.set()
        assert await guest == [1000]
        assert made.index(b"g") < 39, "it waits for nobody who came before it with less priority"
        assert await mallory == [1000] * 40
        await until(lambda: not pipeline.size_bytes)


def bytes_of(value: Any) -> int:
    return len(value) if isinstance(value, bytes) else 0


async def test_inputs_that_find_no_room_in_the_memory_are_refused_by_their_size() -> None:
    gate = threading.Event()

    def work(batch: list[bytes]) -> list[int]:
        gate.wait(30)
        return [len(value) for value in batch]

    mib = 2**20
    async with running(stage("model", work), queue_bytes=4 * mib, size_of=bytes_of) as pipeline:
        with pytest.raises(
            InputsTooLarge, match=r"inputs of 5\.0 MiB, those of one request may have 4\.0 MiB"
        ) as never:
            await ask(pipeline, bytes(3 * mib), bytes(2 * mib))
        assert never.value.status == 413
        inside = asyncio.create_task(ask(pipeline, bytes(3 * mib)))
        await until(lambda: pipeline.size_bytes)
        with pytest.raises(RefusedAlone, match=r"3\.0 MiB of inputs are inside already, the limit is 4\.0 MiB") as now:
            await ask(pipeline, bytes(2 * mib))
        assert now.value.retry_after_s > 0
        small = asyncio.create_task(ask(pipeline, b"small"))  # others find room
        gate.set()
        assert (await inside, await small) == ([3 * mib], [5])


async def test_the_largest_of_the_answers_that_take_too_much_memory_is_given_up() -> None:
    async with running(
        stage("enlarge", lambda batch: [1000 * v for v in batch]), queue_bytes=5000, size_of=bytes_of
    ) as p:
        with pytest.raises(InputsTooLarge, match="the answer is larger than"):
            await ask(p, *[b"m"] * 6)
        assert await ask(p, *[b"g"] * 5) == [b"g" * 1000] * 5
        await until(lambda: not p.size_bytes)


async def test_answers_of_several_that_take_too_much_memory_together_cost_the_largest_its_own() -> None:
    gate = threading.Event()

    def work(batch: list[bytes]) -> list[bytes]:
        if b"last" in batch:
            gate.wait(30)
        return [1000 * value[:1] for value in batch]

    alone = BatchSettings(1)
    async with running(stage("work", work, batching=alone, workers=3), queue_bytes=5000, size_of=bytes_of) as pipeline:
        mallory = asyncio.create_task(ask(pipeline, *[b"m"] * 4, b"last"))
        guest = asyncio.create_task(ask(pipeline, b"g", b"last"))
        await until(lambda: pipeline.size_bytes >= 5000)
        another = asyncio.create_task(ask(pipeline, b"a", b"last"))
        with pytest.raises(RefusedAlone, match="answers that are not whole yet take more than"):
            await mallory
        gate.set()
        assert await guest == [b"g" * 1000, b"l" * 1000]
        assert await another == [b"a" * 1000, b"l" * 1000]


async def test_one_input_more_than_fits_speaks_for_nobody_else() -> None:
    """A refusal that speaks for others keeps them away for a while."""
    gate = threading.Event()
    async with running(stage("model", lambda batch: [gate.wait(30) for _ in batch]), queue_items=4) as pipeline:
        inside = asyncio.create_task(ask(pipeline, 1, 2, 3))
        await until(lambda: pipeline.items == 3)
        with pytest.raises(RefusedAlone):
            await ask(pipeline, 1, 2)
        one = asyncio.create_task(ask(pipeline, 1))
        await until(lambda: pipeline.items == 4)
        with pytest.raises(Unavailable) as everybody:
            await ask(pipeline, 1)
        assert not isinstance(everybody.value, RefusedAlone)
        gate.set()
        await asyncio.gather(inside, one)


async def test_a_function_that_never_returns_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.pipelines.stage._LET_GO_S", 0.1)
    free = threading.Event()

    def stuck(batch: list[int]) -> list[int]:
        free.wait(30)
        return batch

    pipeline = Pipeline(PipelinePlan("test", (stage("model", stuck),)), MonotonicClock())
    await pipeline.open()
    try:
        asking = asyncio.create_task(ask(pipeline, 1))
        await until(lambda: pipeline.stages[0].busy)
        await asyncio.wait_for(pipeline.close(), 60)
        with pytest.raises(ReplicaBroken):
            await asking
    finally:
        free.set()


async def test_what_a_worker_brings_after_the_end_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.pipelines.stage._LET_GO_S", 0.1)
    free = threading.Event()

    def stuck(batch: list[bytes]) -> list[bytes]:
        free.wait(30)
        return [1000 * value for value in batch]

    async with running(stage("left behind", stuck), queue_bytes=10, size_of=bytes_of) as pipeline:
        asking = asyncio.create_task(ask(pipeline, b"a"))
        await until(lambda: pipeline.stages[0].busy)
        [worker] = (thread for thread in threading.enumerate() if "left behind" in thread.name)
        await pipeline.close()
        free.set()
        assert isinstance(await failed(asking), ReplicaBroken)
        await until(lambda: not worker.is_alive())


async def test_closing_ends_who_is_inside() -> None:
    gate = threading.Event()
    async with running(
        stage("model", lambda batch: [gate.wait(10) for _ in batch]), stage("post", doubled)
    ) as pipeline:
        inside = [asyncio.create_task(ask(pipeline, value)) for value in range(5)]
        await until(lambda: pipeline.stages[0].busy)
        closing = asyncio.create_task(pipeline.close())
        await asyncio.sleep(0.05)
        gate.set()
        await closing
        found = await asyncio.gather(*inside, return_exceptions=True)
    assert all(isinstance(one, ReplicaBroken) for one in found)


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def open_doubled() -> Work:
    return doubled


def deadly(batch: list[int]) -> list[int]:
    if -9 in batch:
        os._exit(9)
    return poisoned(batch)


def open_deadly() -> Work:
    return deadly


def open_failing() -> Work:
    raise ConfigError("there is no such device", param="device")


def leaving(batch: list[int]) -> list[int]:
    if -1 in batch:
        raise SystemExit(3)  # as `sys.exit` does
    return doubled(batch)


def pids(batch: list[int]) -> list[int]:
    return [os.getpid() for _ in batch]


def open_pids() -> Work:
    return pids


@pytest.mark.process
async def test_a_process_pool_computes_elsewhere_and_ends() -> None:
    plan = StagePlan("model", open_pids, workers=2, batching=BatchSettings(1), pool="processes")
    async with running(plan) as pipeline:
        found = set(await ask(pipeline, *range(20)))
    assert os.getpid() not in found
    assert 1 <= len(found) <= 2
    for pid in found:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.process
async def test_an_input_that_ends_its_process_fails_alone() -> None:
    async with running(StagePlan("model", open_deadly, batching=BATCHED, pool="processes")) as pipeline:
        values = [1, 2, -9, 4]
        found = await asyncio.gather(*(ask(pipeline, value) for value in values), return_exceptions=True)
        assert [one for one in found if not isinstance(one, BaseException)] == [[2], [4], [8]]
        assert isinstance(found[2], RequestFailed)
        assert "ended with code 9" in found[2].message
        assert await ask(pipeline, 5) == [10]


def hanging(batch: list[int]) -> list[int]:
    if -1 in batch:
        time.sleep(3600)
    return doubled(batch)


def open_hanging() -> Work:
    return hanging


@pytest.mark.process
async def test_an_input_that_never_returns_holds_no_other_up_for_ever() -> None:
    plan = StagePlan("model", open_hanging, batching=BATCHED, pool="processes", timeout_s=0.3)
    async with running(plan) as pipeline:
        found = await asyncio.gather(*(ask(pipeline, value) for value in (-1, 2)), return_exceptions=True)
        assert isinstance(found[0], RequestFailed)
        assert "did not return within 0.3 s" in found[0].message

        others = itertools.count(5)  # what took too long twice is not computed again

        async def answered() -> bool:
            value = next(others)
            try:
                return await ask(pipeline, value) == [2 * value]
            except RequestFailed:  # a machine may be so slow that even this takes longer
                return False

        await until_answered(answered)


class Pipe:
    """What a child's end looks like to the parent where both stood still, and only the child came late."""

    def __init__(self, *ready: bool) -> None:
        self.ready = list(ready)

    def send_bytes(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def poll(self, timeout_s: float) -> bool:
        return self.ready.pop(0)

    def recv_bytes(self) -> bytes:
        return pickle.dumps([2])


def test_a_child_that_stood_still_with_its_whole_host_is_not_ended_for_that() -> None:
    work = ProcessWork("test", open_hanging, timeout_s=10.0)
    work._process = SimpleNamespace(kill=lambda: None, join=lambda _: None, is_alive=bool, close=lambda: None)  # type: ignore[assignment]
    work._pipe = Pipe(False, True)  # type: ignore[assignment]
    assert work([1]) == [2]
    work._pipe = Pipe(False, False)  # type: ignore[assignment]
    with pytest.raises(ProcessEnded, match="did not return within 10 s"):
        work([1])


def test_a_wait_for_a_child_that_another_thread_ends_is_over() -> None:
    work = ProcessWork("test", open_hanging, timeout_s=10.0)

    class Closed(Pipe):
        def poll(self, timeout_s: float) -> bool:
            work.end()
            raise OSError("handle is closed")

    work._process = SimpleNamespace(join=lambda _: None, is_alive=bool, close=lambda: None)  # type: ignore[assignment]
    work._pipe = Closed()  # type: ignore[assignment]
    with pytest.raises(ReplicaBroken, match="is being unloaded"):
        work([1])


def open_never() -> Work:
    time.sleep(3600)
    return doubled


@pytest.mark.process
async def test_a_function_that_is_never_made_keeps_no_tier_from_starting() -> None:
    work = ProcessWork("test", open_never, start_timeout_s=0.5)
    with pytest.raises(ReplicaUnreachable, match=r"test: it was not ready within 0\.5 s"):
        work.start()
    assert work.pid is None


class Mortal:
    """Ends its process on negative numbers; writes down how often it is made."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def __call__(self) -> Work:
        with self._log.open("a") as file:
            file.write("made\n")
        return self.work

    def work(self, batch: list[int]) -> list[int]:
        if min(batch) < 0:
            os._exit(9)
        return doubled(batch)

    @property
    def made(self) -> int:
        return len(self._log.read_text().splitlines())


@pytest.mark.process
async def test_an_input_that_ends_its_process_again_and_again_is_set_apart(tmp_path: Path) -> None:
    mortal = Mortal(tmp_path / "made")
    async with running(StagePlan("model", mortal, batching=BATCHED, pool="processes")) as pipeline:
        assert await ask(pipeline, 1) == [2]
        told = [str(await failed(ask(pipeline, -1))) for _ in range(8)]
        assert all("ended with code 9" in one for one in told[:2])
        assert all("has ended on this input 2 times: it is not computed again" in one for one in told[2:])
        mates = await asyncio.gather(ask(pipeline, -1), ask(pipeline, 2), ask(pipeline, 3), return_exceptions=True)
        assert mates[1:] == [[4], [6]]
        assert mortal.made <= 3  # at first, and after each end


@pytest.mark.process
async def test_who_ends_a_process_with_ever_other_inputs_waits_and_nobody_else(tmp_path: Path) -> None:
    mortal = Mortal(tmp_path / "made")
    async with running(StagePlan("model", mortal, batching=BATCHED, pool="processes")) as pipeline:
        told = [await failed(ask(pipeline, -value, caller="mallory")) for value in range(1, 12)]
        assert all(isinstance(one, RequestFailed) for one in told[:3])
        assert all(isinstance(one, RefusedAlone) and 0 < one.retry_after_s <= 600 for one in told[3:])
        assert isinstance(await failed(ask(pipeline, 1, caller="mallory")), RefusedAlone)
        assert await ask(pipeline, 1, caller="guest") == [2]
        assert mortal.made <= 4


async def failed(asking: Awaitable[object]) -> OverspillError:
    with pytest.raises(OverspillError) as error:
        await asking
    return error.value


def test_what_ended_a_process_long_ago_is_computed_again() -> None:
    now_s = 0.0
    apart = SetApart("model", lambda: now_s)
    for value in range(5000):
        apart.ended("mallory", value)
        apart.ended(f"caller {value}", "poison")
    assert apart.refusal("guest", "poison") is not None
    assert apart.refusal("mallory", "sound") is not None
    assert apart.refusal("guest", "sound") is None
    assert apart.refusal("", 4999) is None, "once may have been the machine"
    now_s = 600.0
    assert apart.refusal("mallory", "poison") is None


@pytest.mark.process
async def test_what_still_runs_at_the_end_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch fails, is halved, and would begin another process that nobody ends."""
    monkeypatch.setattr("models.pipelines.stage._LET_GO_S", 0.1)
    pipeline = Pipeline(
        PipelinePlan("test", (StagePlan("left behind", open_hanging, batching=BATCHED, pool="processes"),)),
        MonotonicClock(),
    )
    await pipeline.open()
    asking = asyncio.create_task(ask(pipeline, -1, 2, 3, 4))
    await until(lambda: pipeline.stages[0].busy)
    [worker] = (thread for thread in threading.enumerate() if "left behind" in thread.name)
    await pipeline.close()
    with pytest.raises(ReplicaBroken):
        await asking
    await until(lambda: not worker.is_alive())
    assert not [child for child in multiprocessing.active_children() if "left behind" in child.name]


@pytest.mark.process
async def test_a_process_that_ended_between_batches_costs_nobody_an_answer() -> None:
    """Nobody's input is to blame: the system may have needed its memory."""
    async with running(StagePlan("model", open_pids, batching=BATCHED, pool="processes")) as pipeline:
        [before] = await ask(pipeline, 1)
        os.kill(before, signal.SIGKILL)
        [process] = pipeline._processes
        await until(lambda: process._process is None or not process._process.is_alive())
        [after] = await ask(pipeline, 1)
        assert after != before


@pytest.mark.process
async def test_a_function_that_cannot_be_made_says_why() -> None:
    pipeline = Pipeline(PipelinePlan("test", (StagePlan("model", open_failing, pool="processes"),)), MonotonicClock())
    with pytest.raises(OverspillError, match="there is no such device"):
        await pipeline.open()


@pytest.mark.process
def test_an_exception_of_the_child_is_raised_here() -> None:
    work = ProcessWork("test", partial(open_deadly))
    try:
        with pytest.raises(ValueError, match="minus one"):
            work([-1])
        assert list(work([3])) == [6]
    finally:
        work.close()
