"""Jobs that are killed with SIGKILL at a counted point, in forks of one process: `python -m tests.support.killed_jobs`.

A point is whatever changes something that outlives the process, or comes back from there: a transaction before its
commit and after it, a flush, a rename, a deletion, an answer. Reads from stdin one JSON list of points a line, runs one
life of the tier for each, killed there, and a last one to the end; writes what became of it as a JSON object a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Engine, event

from router.base.clock import MonotonicClock
from router.jobs import lifecycle
from router.jobs.call import Call, Told
from router.jobs.database import Database
from router.jobs.jobs import Jobs
from router.jobs.lines import check
from router.jobs.pages import Page
from router.jobs.records import ENDED
from router.jobs.settings import JobsSettings
from router.values.replica import ReplicaInfo, ReplicaSnapshot
from tests.support.gateway_fakes import replica_info
from tests.support.waiting import until_answered

LINES = 9
OWNER = "me"


class Points:
    """Counts points; at one of them the process ends as a killed one does."""

    def __init__(self, last: int | None) -> None:
        self.left = last

    def passed(self, *_: object) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **more: Any) -> Any:
            self.passed()
            result = function(*args, **more)
            self.passed()
            return result

        return counted


class _Slots:
    """A tier of four slots."""

    def load(self) -> list[ReplicaSnapshot]:
        return [ReplicaSnapshot(replica_info(), available=True, slots=4)]

    def limit_lines(self, lines: int | None) -> None:
        """Nothing here holds lines up."""

    def step_s(self, info: ReplicaInfo, batch: int, slots: int) -> float:
        return 0.001


async def _life(folder: Path, points: Points) -> None:
    """One start of a tier, until all its batches have ended."""
    _watch(points)
    settings = JobsSettings(dir=str(folder), min_free_mbytes=0, webhook_url="http://127.0.0.1:9/", webhook_secret="x")
    jobs = Jobs(settings, MonotonicClock(), _Slots(), webhook_secret="x")

    async def ask(call: Call) -> Told:
        with (folder.parent / "asked").open("a", encoding="utf-8") as asked:
            asked.write(f"{call.body.decode()}\n")
        points.passed()
        await asyncio.sleep(0)
        return Told(400 if b"bad" in call.body else 200, call.body)

    async with jobs:
        await jobs.serve(ask)
        if not (await jobs.list_batches(OWNER, Page(9)))[0]:
            await _submit(jobs)
        await until_answered(functools.partial(_all_ended, jobs), 60)


async def _all_ended(jobs: Jobs) -> bool:
    return all(batch.status in ENDED for batch in (await jobs.list_batches(OWNER, Page(9)))[0])


async def _submit(jobs: Jobs) -> None:
    incoming = await jobs.begin_file(OWNER, 0)
    for number in range(1, LINES + 1):
        body = {"model": "m", "n": number, "kind": "bad" if number % 4 == 0 else "good"}
        line = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}
        incoming.write(json.dumps(line).encode() + b"\n")
    file = await jobs.keep_file(incoming, OWNER, "lines.jsonl", None)
    await jobs.create_batch(OWNER, file.id, "/v1/completions", "24h", labels={}, headers=[])


def _watch(points: Points) -> None:
    """Count what outlives the process."""
    os.fsync = points.around(os.fsync)
    Path.replace = points.around(Path.replace)  # type: ignore[method-assign]
    Path.unlink = points.around(Path.unlink)  # type: ignore[method-assign]
    vars(lifecycle)["check"] = points.around(check)
    opened = Database.open

    def opening(self: Database) -> Engine:
        engine = opened(self)
        event.listen(self._engine, "commit", points.passed)
        event.listen(self._engine, "after_cursor_execute", lambda *_: points.passed())
        return engine

    Database.open = opening  # type: ignore[method-assign]


def _fork(folder: Path, last: int | None) -> int:
    """Run one life in a fork; returns its wait status."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            asyncio.run(_life(folder, Points(last)))
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1]


async def _told(folder: Path) -> dict[str, Any]:
    """What a caller finds in the end."""
    jobs = Jobs(JobsSettings(dir=str(folder), min_free_mbytes=0), MonotonicClock(), _Slots())
    async with jobs:
        found, _ = await jobs.list_batches(OWNER, Page(9))
        files, _ = await jobs.list_files(OWNER, Page(99), None)
        texts = {file.id: jobs.path_of(file).read_text() for file in files}
        events = await jobs._database.run(lambda c: c.exec_driver_sql("select body from events").fetchall())
        lines = await jobs._database.run(lambda c: c.exec_driver_sql("select count(*) from lines").scalar())
        return {
            "batches": [[b.status.value, b.total, b.completed, b.failed] for b in found],
            "output": [texts.get(b.output_file_id or "", "") for b in found],
            "error": [texts.get(b.error_file_id or "", "") for b in found],
            "files": len(files),
            "on_disk": len(list((folder / "files").iterdir())),
            "events": [json.loads(body)["type"] for (body,) in events],
            "lines_left": lines,
            "asked": (folder.parent / "asked").read_text().splitlines(),
        }


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "jobs"
            (Path(name) / "asked").touch()
            killed = [_fork(folder, point) != 0 for point in json.loads(line)]
            ended = _fork(folder, None)
            told = {"killed": killed, "ended": ended, **asyncio.run(_told(folder))}
            sys.stdout.write(f"{json.dumps(told)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
