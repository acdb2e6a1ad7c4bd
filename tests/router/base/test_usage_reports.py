"""Libraries that tell their makers how they are used do not, under `overspill`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from router.base.usage_reports import silence_usage_reports
from tests.support.paths import REPOSITORY
from tests.support.ports import unused_port
from tests.support.tiny_store import build_world
from tests.support.waiting import until_true

# What a maker's own tests and builds set, and what this process was told: an operator's environment has none of it.
QUIET = ("CI", "GITHUB_ACTIONS", "TF_BUILD", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "XDG_CACHE_HOME")


def test_who_runs_it_decides() -> None:
    environ = {"VLLM_NO_USAGE_STATS": "0"}
    silence_usage_reports(environ)
    assert environ["VLLM_NO_USAGE_STATS"] == "0"
    assert environ["ORT_DISABLE_TELEMETRY"] == "1"


@pytest.mark.process
def test_an_agent_that_loaded_a_model_leaves_no_id_of_the_machine(tmp_path: Path) -> None:
    """ONNX Runtime writes one into the home folder where it reports, and keeps there what it could not send yet."""
    world, port, home = build_world(tmp_path / "world"), unused_port(), tmp_path / "home"
    home.mkdir()
    config = tmp_path / "edge.toml"
    config.write_text(
        f'[agent]\ncache_dir = "{tmp_path / "cache"}"\n[gateway]\nport = {port}\n[models]\nstore = "{world.store}"\n'
        f'catalogue = "{world.catalogue}"\nvariants = ["tiny-int8"]\npreload = ["tiny-int8"]\ncontext_tokens = 256\n'
    )
    environment = {name: value for name, value in os.environ.items() if name not in QUIET}
    with (tmp_path / "agent.log").open("wb") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "overspill", "edge", "run", "--config", str(config)],
            cwd=REPOSITORY, env={**environment, "HOME": str(home)}, stdout=log, stderr=log,
        )  # fmt: skip

    def serves() -> bool:
        assert agent.poll() is None, (tmp_path / "agent.log").read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health/ready").is_success
        except httpx.TransportError:
            return False

    try:
        until_true(serves, every_s=0.1)
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait(timeout=60)
    assert "model loaded" in (tmp_path / "agent.log").read_text()
    assert [path for path in home.rglob("*") if "onnxruntime" in path.name] == []
