"""Runs one client's script against one server, and reads what it reports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

import msgspec

from benchmarks.compatibility.clients.checking import Server
from benchmarks.compatibility.environments import Command
from benchmarks.compatibility.outcomes import Check

_TAIL_CHARS = 300


class Head(msgspec.Struct, frozen=True):
    """The first line of a script: what it will check, and what it is."""

    checks: list[str]
    versions: dict[str, str]


class Report(msgspec.Struct, frozen=True):
    """All that a script told."""

    versions: dict[str, str]
    checks: list[Check]


async def ask(command: Command, server: Server, log: Path, limit_s: float, only: tuple[str, ...] = ()) -> Report:
    """Run a script; what it announced and did not report has failed.

    Args:
        log: gets what the client wrote beside its report.
        only: words; checks with one of them in their name are run, and no other.
    """
    env = {**os.environ, **command.env, "COMPATIBILITY_SERVER": json.dumps(asdict(server), default=str)}
    with log.open("wb") as noise:
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            *only,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=noise,
            env=env,
            cwd=server.folder,
            start_new_session=True,
        )
        lines: list[bytes] = []
        late = False
        try:
            await asyncio.wait_for(_read(process, lines), limit_s)
        except asyncio.TimeoutError:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it started
            await process.wait()
    end = f"no end after {limit_s:.0f} s" if late else f"the script ended with {process.returncode}: {_tail(log)}"
    return report(lines, end, complete=not only)


async def _read(process: asyncio.subprocess.Process, lines: list[bytes]) -> None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        lines.append(line)
    await process.wait()


def report(lines: list[bytes], end: str, *, complete: bool = True) -> Report:
    """Read the lines of a script; others than its own are passed over.

    Args:
        end: why there are no more lines.
        complete: announced checks without a line of their own have failed.
    """
    head, checks = Head([], {}), {}
    for line in lines:
        told = _object(line)
        if "checks" in told:
            head = msgspec.convert(told, Head)
        elif "check" in told:
            check = msgspec.convert(told, Check)
            checks[check.check] = check
    if not head.checks:
        return Report({}, [Check("the client starts", "fail", end)])
    missing = [Check(name, "fail", end) for name in head.checks if name not in checks] if complete else []
    order = {name: place for place, name in enumerate(head.checks)}
    return Report(head.versions, sorted([*checks.values(), *missing], key=lambda check: order.get(check.check, 0)))


def _object(line: bytes) -> dict[str, object]:
    with contextlib.suppress(ValueError):
        told = json.loads(line)
        if isinstance(told, dict):
            return told
    return {}


def _tail(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    return " ".join(text[-_TAIL_CHARS:].split()) or "it said nothing"
