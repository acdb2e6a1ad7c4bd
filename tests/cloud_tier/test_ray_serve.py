"""The Ray Serve application, on a local Ray of an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

PYTHON = os.environ.get("OVERSPILL_RAY_PYTHON", "")


@pytest.mark.live
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not PYTHON, reason="OVERSPILL_RAY_PYTHON names no Python with overspill[cloud,ray] and openai: docs/scaling.md"
)
def test_ray_answers_the_openai_client_and_scales_on_a_burst(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    environ.setdefault("RAY_raylet_start_wait_time_s", "300")
    run = subprocess.run(
        [PYTHON, "-m", "tests.support.ray_burst", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
        cwd=REPOSITORY,
        timeout=870,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    told = json.loads(run.stdout.strip().splitlines()[-1])
    assert told["models"] == ["toy"]
    assert told["chunks"] > 2
    assert told["tokens"] == [300]  # of every request of the burst: none was lost or cut
    assert told["replicas"] == [1, 2, 1]
