"""A server's process: what it writes, how it ends, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloud_tier.engines import launch
from cloud_tier.engines.process import ServerProcess
from tests.support.waiting import until, until_true

pytestmark = pytest.mark.process


@contextlib.asynccontextmanager
async def running(code: str) -> AsyncIterator[tuple[ServerProcess, list[str]]]:
    lines: list[str] = []
    process = ServerProcess([sys.executable, "-c", code], dict(os.environ), lines.append)
    try:
        await process.start()
        yield process, lines
    finally:
        await process.end()


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet fetched does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}


async def test_what_it_writes_is_told_line_by_line_without_colours() -> None:
    code = r"import sys; print('\x1b[32mone\x1b[0m\rtwo', flush=True); print('three', file=sys.stderr)"
    code += "; print('x' * 200000, end='')"
    async with running(code) as (process, lines):
        assert await process.ended() == "exit status 0"
        await process.end()
    assert lines[:2] == ["one", "two"]
    assert "three" in lines
    assert all(len(line) <= 2000 for line in lines)


async def test_the_error_that_it_ended_of_is_told() -> None:
    async with running("print('loading'); raise ValueError('no such model')") as (process, _):
        await until(lambda: process.fault)
        assert await process.ended() == "exit status 1: ValueError: no such model"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("vllm serve: error: unrecognized arguments: --foo", "vllm serve: error: unrecognized arguments: --foo"),
        (
            "(EngineCore pid=7) ERROR 11-22 04:53:40 [core.py:12] torch.OutOfMemoryError: full",
            "torch.OutOfMemoryError: full",
        ),
        ("(APIServer pid=7) INFO 11-22 04:53:40 [core.py:12] loading: no error: yet", ""),
        ("RuntimeError: Engine core initialization failed.", "RuntimeError: Engine core initialization failed."),
    ],
)
async def test_what_vllm_ends_of_is_found_in_what_it_writes(line: str, fault: str) -> None:
    async with running(f"print({line!r})") as (process, _):
        await process.ended()
        await process.end()
        assert process.fault == fault


async def test_a_program_that_is_not_there_is_said_so() -> None:
    lines: list[str] = []
    process = ServerProcess(["/nonexistent/vllm"], dict(os.environ), lines.append)
    await process.start()
    assert (await process.ended()).startswith("exit status 1")
    await process.end()
    assert lines == ["cannot run /nonexistent/vllm: No such file or directory"]


async def test_it_ends_at_once_when_asked_and_may_tidy_up() -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('tidied'), sys.exit(0)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    async with running(code) as (process, lines):
        await until(lambda: "ready" in lines)
        await process.end(grace_s=30.0)
        assert lines == ["ready", "tidied"]
        assert await process.ended() == "exit status 0"


async def test_what_does_not_end_is_killed_and_its_children_too() -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    async with running(code) as (process, lines):
        await until(lambda: lines)
        child = int(lines[0])
        await process.end(grace_s=0.05)
        assert await process.ended() == "killed by SIGKILL"
        await until(lambda: not alive(child))


async def test_children_of_one_that_was_killed_do_not_outlive_it() -> None:
    """As of vLLM: its engine's processes go on without the API server that started them."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    async with running(code) as (process, lines):
        await until(lambda: lines)
        os.kill(process.pid, signal.SIGKILL)
        assert await process.ended() == "killed by SIGKILL"  # although its child still holds the pipe
        child = int(lines[0])
        assert alive(child)
        await process.end()
        await until(lambda: not alive(child))


def test_it_is_asked_to_end_when_its_parent_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "told"
    server = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(told)!r}).write_text('asked'), sys.exit(0)))\n"
        f"pathlib.Path({str(told)!r}).write_text('ready')\n"
        "time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, {launch.__file__!r}, str(os.getpid()), sys.executable, '-c', {server!r}])\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent]) as tier:
        until_true(lambda: told.exists() and told.read_text() == "ready")
        tier.kill()
    until_true(lambda: told.read_text() == "asked")


async def test_waiting_for_its_end_may_be_cancelled() -> None:
    async with running("import time; time.sleep(600)") as (process, _):
        waiting = asyncio.create_task(process.ended())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await process.end()
        assert await process.ended() == "killed by SIGKILL"
