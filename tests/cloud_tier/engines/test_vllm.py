"""A vLLM server of the tier's own, from start to drain, with a small program in vLLM's place (`fake_vllm`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cloud_tier.engines.command import ServerSpec
from cloud_tier.engines.settings import CloudBackend, VllmSettings
from cloud_tier.engines.vllm import VllmServer
from router.base.clock import MonotonicClock
from router.base.errors import ReplicaBroken, ReplicaUnreachable
from router.upstream.servers.foreign import Surroundings
from router.upstream.settings import BackendModel
from router.upstream.source import SourceHooks
from router.values.prompt import ChatPrompt, Message
from router.values.replica import Place
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from tests.cloud_tier.engines.test_process import alive
from tests.support.paths import REPOSITORY
from tests.support.waiting import until

FAKE = REPOSITORY / "tests" / "support" / "fake_vllm.py"

pytestmark = pytest.mark.process


@dataclass
class Rig:
    """A server, the folder that tells it what to do, and what its tier heard of it."""

    folder: Path
    server: VllmServer = None  # type: ignore[assignment]
    changes: int = 0
    failures: list[str] = field(default_factory=list)

    def started(self) -> list[dict[str, Any]]:
        path = self.folder / "started.jsonl"
        whole = path.read_text().split("\n")[:-1] if path.exists() else []  # the last line may still be written
        return [json.loads(line) for line in whole]

    async def ready(self, starts: int = 1) -> None:
        await until(lambda: len(self.started()) >= starts and self.server.replicas[0].snapshot().available)

    def heard(self) -> None:
        self.changes += 1


@contextlib.asynccontextmanager
async def rig(tmp_path: Path, *does: str, warm_up: bool = False, **changes: Any) -> AsyncIterator[Rig]:
    """A server that is started; `does` names what the program in its place is to do."""
    executable = tmp_path / "vllm"
    executable.write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
    executable.chmod(0o755)
    for one in does:
        (tmp_path / one).touch()
    env = {"FAKE_VLLM": str(tmp_path)}
    settings = VllmSettings(
        model="org/tiny-7b", executable=str(executable), env=env, args=("--max-model-len", "512"), **changes
    )
    backend = CloudBackend(
        name="big",
        kind="vllm",
        vllm=settings,
        warm_up=warm_up,
        poll_interval_s=0.05,
        models=(BackendModel(served="tiny-7b", quality=0.9),),
    )
    found = Rig(tmp_path)
    hooks = SourceHooks(
        on_change=found.heard,
        probe_failed=lambda _, why: found.failures.append(why),
        misses_to_be_lost=lambda: 1,
    )
    clock = MonotonicClock()
    found.server = VllmServer(
        ServerSpec(backend, settings), Surroundings(clock, hooks, lambda name: Place("tiny", 1, 0.5), tier="cloud")
    )
    async with found.server:
        yield found


def ask(max_tokens: int = 5) -> InferenceRequest:
    return InferenceRequest(
        request_id="r",
        model="tiny-7b",
        prompt=ChatPrompt((Message("user", "count"),)),
        sampling=SamplingParams(max_tokens=max_tokens),
        objective=Objective(),
        prompt_tokens=5,
        accepted_at_s=MonotonicClock().now_s(),
    )


async def test_what_it_will_serve_is_known_while_it_starts_and_when_it_should_be_ready(tmp_path: Path) -> None:
    async with rig(tmp_path, "holds") as found:
        (replica,) = found.server.replicas
        snapshot = replica.snapshot()
        assert (replica.info.replica_id, replica.info.variant) == ("big/tiny-7b", "tiny-7b")
        assert (replica.info.family, replica.info.rung, replica.info.quality) == ("tiny", 1, 0.9)
        assert (replica.info.tier, replica.info.remote, replica.info.context_tokens) == ("cloud", False, 512)
        assert not snapshot.available
        assert snapshot.why == "vLLM is starting"
        assert 100 < snapshot.back_in_s <= 120
        assert found.server.unreached == ""
        with pytest.raises(ReplicaUnreachable, match="vLLM is starting"):
            await anext(replica.generate(ask()))
        await until(found.started)
        assert not found.server.replicas[0].snapshot().available
        (tmp_path / "holds").unlink()
        await found.ready()
        assert found.failures == []


async def test_it_serves_under_a_key_of_its_own(tmp_path: Path) -> None:
    async with rig(tmp_path) as found:
        await found.ready()
        (replica,) = found.server.replicas
        text = "".join([chunk.text async for chunk in replica.generate(ask())])
        assert text == "1 2 3 4 5 "
        (start,) = found.started()
        assert start["argv"][:2] == ["serve", "org/tiny-7b"]
        assert start["argv"][-2:] == ["--max-model-len", "512"]
        key = start["env"]["VLLM_API_KEY"]
        assert len(key) >= 32
        assert key not in " ".join(start["argv"])


async def test_speed_is_measured_once_and_kept_over_a_restart(tmp_path: Path) -> None:
    async with rig(tmp_path, warm_up=True) as found:
        await found.ready()
        prior = found.server.replicas[0].info.prior
        assert prior.source.startswith("measured")
        os.kill(found.started()[0]["pid"], signal.SIGKILL)
        await until(lambda: not found.server.replicas[0].snapshot().available)
        await found.ready(starts=2)
        assert found.server.replicas[0].info.prior == prior


async def test_killed_in_the_middle_of_an_answer_it_breaks_that_and_starts_again(tmp_path: Path) -> None:
    async with rig(tmp_path, "slow") as found:
        await found.ready()
        (first,) = found.started()
        stream = found.server.replicas[0].generate(ask(max_tokens=400))
        assert (await anext(stream)).text == "1 "
        os.kill(first["pid"], signal.SIGKILL)
        with pytest.raises(ReplicaBroken):
            async for _ in stream:
                pass
        told = "vLLM is starting again, it ended: killed by SIGKILL"
        await until(lambda: found.server.replicas[0].snapshot().why == told)  # once its end was noticed
        snapshot = found.server.replicas[0].snapshot()
        assert 0 < snapshot.back_in_s < 100  # as long as the last start took, and no more the first guess
        await found.ready(starts=2)
        assert found.server.restarts == 1
        assert found.server.replicas[0].info.replica_id == "big/tiny-7b"
        assert found.server.replicas[0].info.device_key == "vllm/big"
        await until(lambda: not alive(first["child"]))


async def test_a_start_that_fails_is_told_with_its_error_and_tried_again(tmp_path: Path) -> None:
    async with rig(tmp_path, "fails") as found:
        await until(lambda: len(found.started()) >= 2)
        why = found.server.replicas[0].snapshot().why
        assert why == "vLLM is starting again, it ended: exit status 1: ValueError: no such model"
        (tmp_path / "fails").unlink()
        await found.ready()


async def test_after_three_failed_starts_nobody_knows_when_it_will_be_back(tmp_path: Path) -> None:
    async with rig(tmp_path, "fails") as found:
        await until(lambda: found.server.restarts >= 3)
        assert found.server.replicas[0].snapshot().back_in_s == 0


async def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async with rig(tmp_path, "holds", start_timeout_s=0.5, stop_s=5.0) as found:
        await until(lambda: len(found.started()) >= 2)
        assert "not ready within start_timeout_s = 0.5" in found.server.replicas[0].snapshot().why


async def test_one_that_answers_nothing_any_more_is_started_again(tmp_path: Path) -> None:
    async with rig(tmp_path, silent_s=0.4, stop_s=0.1) as found:
        await found.ready()
        (first,) = found.started()
        os.kill(first["pid"], signal.SIGSTOP)
        await until(lambda: len(found.started()) >= 2)
        assert not alive(first["pid"])
        await found.ready(starts=2)


async def test_leaving_it_drains_and_leaves_no_process(tmp_path: Path) -> None:
    async with rig(tmp_path) as found:
        await found.ready()
        (start,) = found.started()
    assert (tmp_path / "stopped").exists()  # asked with SIGTERM, not killed
    await until(lambda: not (alive(start["pid"]) or alive(start["child"])))  # the kernel has them reaped, in its time


async def test_left_while_it_starts_it_leaves_no_process(tmp_path: Path) -> None:
    async with rig(tmp_path, "holds") as found:
        await until(found.started)
    (start,) = found.started()
    assert not alive(start["pid"])
