"""The engine's processes: what callers see when all goes well, and when a rank is killed, hangs, or cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from cloud_tier.engine import worker
from cloud_tier.engine.messages import Setup
from cloud_tier.engine.processes import RankProcesses
from cloud_tier.engine.protocol import EngineChunk, EngineConfig, EngineRequest, EngineState
from cloud_tier.engine.streams import Streams
from cloud_tier.engine.torch_engine import TorchEngine
from router.base.clock import Clock
from router.base.errors import (
    ArtifactError,
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    ReplicaBroken,
    ReplicaUnreachable,
    RequestFailed,
)
from router.values.chunk import FinishReason
from router.values.sampling import SamplingParams
from tests.support import engine_models
from tests.support.clocks import SteeredClock
from tests.support.engine_models import Bench, prompt, small
from tests.support.paths import REPOSITORY
from tests.support.waiting import until

pytestmark = pytest.mark.process

LONG = 3000  # tokens: seconds of work for the tiny model


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_models.save("llama", tmp_path_factory.mktemp("weights"))


def _config(weights: Path, **options: Any) -> EngineConfig:
    return small(weights, **{"kv_cache_tokens": 8192, "max_context_tokens": 4000, **options})


@contextlib.asynccontextmanager
async def _running(config: EngineConfig, clock: Clock | None = None) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(config, clock)
    await engine.start()
    pids = engine.info.pids if engine.info else ()
    try:
        yield engine
    finally:
        pids += engine.info.pids if engine.info else ()
        await engine.stop()
    assert engine.state is EngineState.STOPPED
    assert not any(psutil.pid_exists(pid) for pid in pids)


def _request(tokens: list[int], max_tokens: int = 12, **options: Any) -> EngineRequest:
    return EngineRequest("r", tuple(tokens), SamplingParams(temperature=0), max_tokens, **options)


async def _collect(engine: TorchEngine, request: EngineRequest) -> tuple[list[int], FinishReason | None]:
    tokens: list[int] = []
    last = EngineChunk(())
    async for last in engine.generate(request):
        tokens += last.token_ids
    return tokens, last.finish_reason


async def _exhaust(stream: AsyncGenerator[EngineChunk, None]) -> None:
    async for _ in stream:
        pass


async def test_many_callers_are_served_and_abandoned_work_is_dropped(weights: Path) -> None:
    bench = Bench(small(weights))
    for seed in range(8):
        bench.add(seed, prompt(30, seed))
    expected = bench.run()
    async with _running(_config(weights)) as engine:
        with pytest.raises(RuntimeError, match="started already"):
            await engine.start()
        answers = await asyncio.gather(*(_collect(engine, _request(prompt(30, seed))) for seed in range(8)))
        assert answers == [(expected[seed], FinishReason.LENGTH) for seed in range(8)]

        endless = SamplingParams(temperature=0, top_k=2**80, max_tokens=2**80)
        stream = engine.generate(EngineRequest("r", tuple(prompt(10)), endless, 2**80))
        assert (await anext(stream)).token_ids
        assert engine.load().running == 1
        await stream.aclose()
        await until(lambda: engine.load().kv_blocks_free == engine.load().kv_blocks_total)
        assert (engine.load().running, engine.load().pending_decode_tokens) == (0, 0)

        for request, error in (
            (_request([]), InvalidRequest),
            (_request([1], 0), InvalidRequest),
            (_request([engine_models.VOCAB]), InvalidRequest),
            (_request([-1]), InvalidRequest),
            (_request([1] * 4000), ContextTooLong),
            (_request([1], priority=2**70), InvalidRequest),
            (EngineRequest("r", (1,), SamplingParams(temperature=float("nan")), 1), InvalidRequest),
            (EngineRequest("r", (1,), SamplingParams(top_p=0.0), 1), InvalidRequest),
            (EngineRequest("r", (1,), SamplingParams(seed=2**64), 1), InvalidRequest),
        ):
            with pytest.raises(error):
                await _collect(engine, request)

        draining = asyncio.create_task(_collect(engine, _request(prompt(10), 200)))
        await until(lambda: engine.load().running == 1)
        await engine.stop(drain_s=30)
        assert len((await draining)[0]) == 200
        with pytest.raises(ReplicaUnreachable, match="stopped"):
            await _collect(engine, _request([1]))


async def test_load_counts_requests_the_engine_has_not_seen(weights: Path) -> None:
    async with _running(_config(weights, max_running=1)) as engine:
        streams = [asyncio.create_task(_collect(engine, _request(prompt(50), 20))) for _ in range(3)]
        await asyncio.sleep(0)
        load = engine.load()
        assert load.queued_prefill_tokens == 150
        assert (load.queued, load.pending_decode_tokens) == (3, 60)
        await asyncio.gather(*streams)


async def test_kill_of_any_rank_fails_cleanly_and_restarts(weights: Path) -> None:
    async with _running(_config(weights, tensor_parallel=2, max_running=1)) as engine:
        plain = await _collect(engine, _request(prompt(20)))
        bench = Bench(small(weights))
        bench.add(0, prompt(20))
        assert plain == (bench.run()[0], FinishReason.LENGTH)
        for victim in (0, 1):
            assert engine.info is not None
            old = engine.info.pids
            started = engine.generate(_request(prompt(20), LONG))
            await anext(started)
            waiting = asyncio.create_task(_collect(engine, _request(prompt(20), LONG)))
            await until(lambda: engine.load().queued == 1)
            os.kill(old[victim], signal.SIGKILL)
            with pytest.raises(ReplicaBroken, match="is gone in the middle"):
                await _exhaust(started)
            with pytest.raises(ReplicaUnreachable, match="before request"):
                await waiting
            assert engine.state is EngineState.RESTARTING
            with pytest.raises(ReplicaUnreachable, match="restarting"):
                await _collect(engine, _request([1]))
            await until(lambda: engine.ready)
            assert engine.restarts == victim + 1
            assert not set(old) & set(engine.info.pids)
            assert not any(psutil.pid_exists(pid) for pid in old)
            assert await _collect(engine, _request(prompt(20))) == plain


async def test_an_engine_that_restarts_says_why_and_when_it_should_be_ready(weights: Path) -> None:
    clock = SteeredClock()
    async with _running(_config(weights), clock) as engine:
        assert engine.outage is None
        assert engine.info is not None
        load_s = engine.info.load_s
        assert load_s > 0
        for pause_s in (0.5, 1.0):  # it grows while the engine keeps dying
            assert engine.info is not None
            load_s = engine.info.load_s
            os.kill(engine.info.pids[0], signal.SIGKILL)
            await until(lambda: not engine.ready)
            outage = engine.outage
            assert outage is not None
            assert "rank 0" in outage.reason
            assert outage.ready_in_s == pytest.approx(pause_s + load_s, abs=0.4)
            clock.ahead_s += 3600  # later than expected: now, not in the past
            assert engine.outage is None or engine.outage.ready_in_s == 0
            await until(lambda: engine.ready)
            assert engine.outage is None
        await engine.stop()
        assert engine.outage is not None
        assert engine.outage.ready_in_s is None


async def test_a_hung_step_ends_like_a_dead_one(weights: Path) -> None:
    clock = SteeredClock()
    config = _config(weights)
    async with _running(config, clock) as engine:
        stream = engine.generate(_request(prompt(20), LONG))
        await anext(stream)
        assert engine.info is not None
        os.kill(engine.info.pids[0], signal.SIGSTOP)
        await clock.pass_by(config.step_timeout_s, looks=2)
        with pytest.raises(ReplicaBroken, match="nothing was heard of the engine"):
            await _exhaust(stream)
        assert engine.state is EngineState.RESTARTING


async def test_a_host_that_stood_still_is_not_taken_for_a_hung_engine(weights: Path) -> None:
    clock = SteeredClock()
    config = _config(weights)
    async with _running(config, clock) as engine:
        stream = engine.generate(_request(prompt(20), 1000))
        await anext(stream)
        await clock.pass_by(2 * config.step_timeout_s, looks=1)
        await _exhaust(stream)
        assert (engine.state, engine.restarts) == (EngineState.READY, 0)


async def test_an_answer_that_is_read_late_says_nothing_about_the_engine(weights: Path) -> None:
    clock = SteeredClock()
    config = _config(weights)
    async with _running(config, clock) as engine:
        stream = engine.generate(_request(prompt(20), 30))
        seen = len((await anext(stream)).token_ids)
        await until(lambda: engine.load().pending_decode_tokens == 0)
        await clock.pass_by(config.step_timeout_s, looks=3)
        assert (engine.state, engine.restarts) == (EngineState.READY, 0)
        async for chunk in stream:
            seen += len(chunk.token_ids)
        assert seen == 30
        assert (await _collect(engine, _request(prompt(20), 3)))[1] is FinishReason.LENGTH


async def test_a_drained_engine_does_not_wait_for_slow_readers(weights: Path) -> None:
    async with _running(_config(weights)) as engine:
        stream = engine.generate(_request(prompt(20), 30))
        seen = len((await anext(stream)).token_ids)
        await engine.stop(drain_s=10_000)
        async for chunk in stream:
            seen += len(chunk.token_ids)
        assert seen == 30


async def test_the_host_failing_a_restart_is_not_the_end(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = RankProcesses._spawn, [OSError(24, "Too many open files"), BlockingIOError(11, "try again")]

    def spawn(processes: RankProcesses, sockets: Any) -> subprocess.Popen[bytes]:
        if failures and engine.info is not None:
            raise failures.pop()
        return real(processes, sockets)

    monkeypatch.setattr(RankProcesses, "_spawn", spawn)
    engine = TorchEngine(_config(weights), SteeredClock())
    await engine.start()
    try:
        assert engine.info is not None
        os.kill(engine.info.pids[0], signal.SIGKILL)
        await until(lambda: not engine.ready)
        await until(lambda: engine.ready)
        assert engine.restarts == 3
        assert (await _collect(engine, _request(prompt(20), 3)))[1] is FinishReason.LENGTH
    finally:
        await engine.stop()


async def test_a_host_that_cannot_start_processes_is_told_as_an_error(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn(*_: Any) -> None:
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(RankProcesses, "_spawn", spawn)
    engine = TorchEngine(_config(weights))
    with pytest.raises(ReplicaUnreachable, match=r"did not start: .*no more processes"):
        await engine.start()
    assert engine.state is EngineState.STOPPED


async def test_a_message_that_cannot_be_read_ends_one_life(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = Streams.take, [msgspec.ValidationError("expected `int`, got `str`")]

    def take(streams: Streams, step: Any) -> None:
        if failures:
            raise failures.pop()
        real(streams, step)

    async with _running(_config(weights)) as engine:
        monkeypatch.setattr(Streams, "take", take)
        with pytest.raises(ReplicaUnreachable, match="expected `int`, got `str` before request"):
            await _collect(engine, _request(prompt(20)))
        await until(lambda: engine.ready)
        assert (await _collect(engine, _request(prompt(20), 3)))[1] is FinishReason.LENGTH


async def test_one_bad_message_hurts_neither_the_engine_nor_the_others(weights: Path) -> None:
    """A request that cannot be put into a message leaves no stream that the watchdog would wait for."""
    async with _running(_config(weights)) as engine:
        with pytest.raises(UnicodeEncodeError):
            await _collect(engine, EngineRequest("\ud800", (1,), SamplingParams(temperature=0), 4))
        assert engine.load().queued == 0
        await engine.stop(drain_s=10_000)  # returns at once: nothing is owed


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_step_that_brings_no_numbers_ends_one_stream_and_no_process(tmp_path: Path, ranks: int) -> None:
    """A model with one spoiled embedding: requests that hold its token fail, all others are answered."""
    spoiled = engine_models.save_with_nan_embedding(tmp_path, token=7)
    clean = [token for token in prompt(40) if token != 7]
    async with _running(_config(spoiled, token_budget=512, tensor_parallel=ranks)) as engine:
        assert engine.info is not None
        assert engine.info.devices == ("cpu",) * ranks
        pids = engine.info.pids
        expected = await _collect(engine, _request(clean, 8))
        others = [asyncio.create_task(_collect(engine, _request(clean, 8))) for _ in range(3)]
        with pytest.raises(RequestFailed, match="not a number"):
            await _collect(engine, _request([*clean, 7], 8))
        assert await asyncio.gather(*others) == [expected] * 3
        with pytest.raises(RequestFailed):
            await _collect(engine, _request([7], 8))
        assert await _collect(engine, _request(clean, 8)) == expected
        assert (engine.restarts, engine.info.pids) == (0, pids)
        assert engine.load().failed == 2


async def test_a_model_that_computes_no_numbers_at_all_is_refused_at_start(tmp_path: Path) -> None:
    engine = TorchEngine(_config(engine_models.save_with_nan_embedding(tmp_path, token=0)))  # the probe's token
    with pytest.raises(ReplicaUnreachable, match="numbers that are none in float32"):
        await engine.start()
    assert engine.state is EngineState.STOPPED


async def test_an_engine_that_cannot_start_says_why(weights: Path, tmp_path: Path) -> None:
    for config, error in (
        (_config(tmp_path / "nothing"), ArtifactError),
        (_config(weights, tensor_parallel=4), ConfigError),
    ):
        await _refuses(config, error)


@pytest.mark.skipif(torch.cuda.device_count() >= 3, reason="this machine has the GPUs that must be missing")
async def test_missing_gpus_are_found_out_in_the_ranks(weights: Path) -> None:
    await _refuses(_config(weights, device="cuda", tensor_parallel=3), ConfigError)


def test_a_model_that_exceeds_its_gpu_is_told_as_an_error(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("cloud_tier.engine.model.Model", too_large)
    with pytest.raises(ConfigError, match="8192 tokens of KV cache; lower kv_cache_tokens"):
        worker.load(Setup(_config(weights), 0, ""))


async def _refuses(config: EngineConfig, error: type[Exception]) -> None:
    engine = TorchEngine(config)
    with pytest.raises(error):
        await engine.start()
    assert engine.state is EngineState.STOPPED
    assert engine.load().kv_blocks_total == 0


async def test_stop_while_starting_leaves_nothing(weights: Path) -> None:
    others = set(psutil.Process().children())
    engine = TorchEngine(_config(weights))
    start = asyncio.create_task(engine.start())
    await until(lambda: engine.state is EngineState.STARTING and bool(set(psutil.Process().children()) - others))
    await engine.stop()
    with pytest.raises(ReplicaUnreachable, match="stopped before it was ready"):
        await start
    assert set(psutil.Process().children()) <= others


_PARENT = """
import asyncio, sys
from cloud_tier.engine.protocol import EngineConfig
from cloud_tier.engine.torch_engine import TorchEngine

async def main():
    engine = TorchEngine(EngineConfig(weights=sys.argv[1], tensor_parallel=2))
    await engine.start()
    assert "torch" not in sys.modules
    print("ranks", *engine.info.pids, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_no_rank_outlives_a_killed_parent(weights: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(weights)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout as lines:
        words = next(line.split() for line in lines if line.startswith("ranks"))
    ranks = [psutil.Process(int(pid)) for pid in words[1:]]
    assert len(ranks) == 2
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert alive == []
