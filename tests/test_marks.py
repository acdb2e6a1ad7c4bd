"""The marks of a test are true: whoever is marked as starting no process cannot start one (tests/conftest.py)."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys

import pytest

REFUSED = pytest.raises(pytest.fail.Exception, match="mark it `process`")


def test_an_unmarked_test_is_refused_a_process() -> None:
    with REFUSED:
        subprocess.run([sys.executable, "-c", ""], check=False)


async def test_an_unmarked_test_is_refused_a_process_of_asyncio() -> None:
    with REFUSED:
        await asyncio.create_subprocess_exec(sys.executable, "-c", "")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_unmarked_test_is_refused_a_process_of_multiprocessing(method: str) -> None:
    with REFUSED:
        multiprocessing.get_context(method).Process(target=os.getpid).start()  # type: ignore[attr-defined]


@pytest.mark.process
def test_a_marked_test_may_start_one() -> None:
    assert subprocess.run([sys.executable, "-c", ""], check=False).returncode == 0


@pytest.mark.live
def test_a_live_test_may_start_one_too() -> None:
    assert subprocess.run([sys.executable, "-c", ""], check=False).returncode == 0
