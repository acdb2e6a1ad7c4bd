"""Answers on their way to the disk: many in one transaction, since each transaction waits for the disk once."""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from router.base.clock import Clock
from router.base.timers import end
from router.jobs import batches
from router.jobs.database import Database
from router.jobs.errors import StorageFailed
from router.jobs.records import LineAnswer

log = structlog.get_logger("router.jobs")

_RETRY_S = 2.0
_AT_ONCE = 256


class Committer:
    """Use as `async with`. An answer is in memory until it is committed; who gave it waits for that."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._waiting: list[tuple[LineAnswer, asyncio.Future[None]]] = []
        self._news = asyncio.Event()
        self.stuck = ""
        """Why nothing can be written; empty while something can."""
        self.written = 0

    async def __aenter__(self) -> Committer:
        self._task = asyncio.create_task(self._run(), name="jobs commit")
        return self

    async def __aexit__(self, *error: object) -> None:
        await end(self._task)

    async def commit(self, answer: LineAnswer) -> None:
        """Return when the answer is on the disk, however long that takes."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((answer, done))
        self._news.set()
        await done

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                taken, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
                await self._write(taken)

    async def _write(self, taken: list[tuple[LineAnswer, asyncio.Future[None]]]) -> None:
        while True:
            try:
                self.written += await self._database.run(partial(_commit, [answer for answer, _ in taken]))
                break
            except StorageFailed as error:
                if not self.stuck:
                    log.warning("answers of batches cannot be written: batches wait", why=error.message)
                self.stuck = error.message
            except Exception:  # the task's boundary: what cannot be written now is tried again, and said
                log.exception("answers of batches were not written")
                self.stuck = "internal error; the log has the details"
            await self._clock.sleep(_RETRY_S)
        if self.stuck:
            log.info("answers of batches are written again")
        self.stuck = ""
        for _, done in taken:
            if not done.done():
                done.set_result(None)


def _commit(answers: list[LineAnswer], connection: object) -> int:
    return batches.commit(connection, answers)  # type: ignore[arg-type]
