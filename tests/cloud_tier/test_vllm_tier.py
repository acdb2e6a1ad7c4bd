"""The tier with a vLLM server of its own, over real sockets; a small program stands in vLLM's place (`fake_vllm`)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from cloud_tier.cli import _settings
from cloud_tier.plan import Plan, make_plan
from cloud_tier.server import Phase
from tests.cloud_tier.engines.test_process import alive
from tests.cloud_tier.test_server import Running
from tests.support.fake_engine import FakeEngine
from tests.support.paths import REPOSITORY
from tests.support.waiting import until, until_answered

pytestmark = pytest.mark.process

CHAT = {"model": "tiny-7b", "messages": [{"role": "user", "content": "count"}], "max_tokens": 5}


def program(folder: Path) -> Path:
    """A `vllm` that is not vLLM."""
    path = folder / "bin" / "vllm"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\n{(REPOSITORY / 'tests' / 'support' / 'fake_vllm.py').read_text()}")
    path.chmod(0o755)
    return path


def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """As of `overspill cloud serve --engine vllm --model DIRECTORY --port 0`, with that `vllm` on the PATH."""
    monkeypatch.setenv("PATH", f"{program(tmp_path).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_VLLM", str(tmp_path))
    model = tmp_path / "tiny-7b"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 512}')
    with _settings(None, [str(model)], ("127.0.0.1", 0), (None, "cpu", None, "vllm")) as settings:
        return make_plan(settings, environ={})


def started(folder: Path) -> list[dict]:
    path = folder / "started.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_it_is_unavailable_for_a_time_then_serves_comes_back_after_a_kill_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "holds").touch()
    run = Running(planned(tmp_path, monkeypatch), FakeEngine)
    try:
        await run.until(Phase.SERVING)
        await until(lambda: started(tmp_path))
        (card,) = (await run.client.get("/v1/models")).json()["data"]
        assert card["id"] == "tiny-7b"
        reply = await run.client.post("/v1/chat/completions", json=CHAT)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
        assert "vLLM is starting" in reply.json()["error"]["message"]
        assert 60 < int(reply.headers["retry-after"]) <= 121
        (tmp_path / "holds").unlink()

        async def answers() -> bool:
            reply = await run.client.post("/v1/chat/completions", json=CHAT)
            return reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"] == "1 2 3 4 5 "

        await until_answered(answers)
        assert (await run.client.get("/health/ready")).status_code == 200
        (first,) = started(tmp_path)
        os.kill(first["pid"], signal.SIGKILL)
        await until(lambda: len(started(tmp_path)) == 2)
        await until_answered(answers)
        run.tier.stop()
        await run.ended()
        assert (tmp_path / "stopped").exists()
        for start in started(tmp_path):
            await until(lambda start=start: not alive(start["pid"]))
            await until(lambda start=start: not alive(start["child"]))  # SIGKILL takes a moment on a busy machine
    finally:
        run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)
        await run.client.aclose()
        run.bound.close()


def test_check_tells_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from cloud_tier.cli import _describe, plan_as_json

    plan = planned(tmp_path, monkeypatch)
    _describe(plan)
    assert "vllm     tiny-7b (backend tiny-7b): 1 rank, model" in capsys.readouterr().out
    (server,) = plan_as_json(plan)["servers"]
    assert (server["backend"], server["kind"], server["ranks"], server["gpus"]) == ("tiny-7b", "vllm", 1, [])
