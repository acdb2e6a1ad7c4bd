"""The router compiled by mypyc answers as its sources do: the same simulations give the same rows."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from benchmarks.compiled import simulated, trees
from router.policy.registry import POLICIES

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
COMPILER = str(sysconfig.get_config_var("CC") or "cc").split()[0]


@pytest.mark.skipif(shutil.which(COMPILER) is None or not HEADERS.exists(), reason="no C compiler, or no Python.h")
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_and_interpreted_simulations_have_the_same_rows() -> None:
    builds = ("interpreted", "compiled")
    copies = trees(*builds, opt_level="0")  # quicker to make; `make bench-compiled` looks at what users get
    found = {build: simulated(copies[build], "--requests", "60", "--policy", *POLICIES) for build in builds}
    assert {build: found[build]["router"] for build in builds} == {build: build for build in builds}
    assert found["compiled"]["sha256"] == found["interpreted"]["sha256"]
