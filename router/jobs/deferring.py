"""Answers deferred requests as soon as the tier can: a few at once, callers by turns, of one in their order.

After a refusal one request alone tries again, later and later; once one is answered, the others follow. So a fleet of
devices whose link comes back asks with one request each. Where the tier has no capacity, that is one of all; a key that
is gone, a limit that is reached and a failure are the caller's own, and nobody else waits for them.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import orjson
import structlog
from sqlalchemy import Connection

from router.base.clock import Clock
from router.base.loopback import is_loopback
from router.base.timers import end
from router.jobs import deferred, events
from router.jobs.call import Ask, Call, Told
from router.jobs.database import Database
from router.jobs.errors import NoSuchJob, StorageFailed
from router.jobs.objects import deferred_object
from router.jobs.records import Deferred, DeferredStatus
from router.values.request import Locality, Objective
from router.wire.promise import parse_objective

log = structlog.get_logger("router.jobs")

_LOOK_S = 2.0
_AT_ONCE = 4
_OF_ONE = 3  # of one caller, where callers are told apart: what hangs of one leaves a place to the others
_AHEAD = 256  # of one caller: what cannot be served for long keeps only its own others waiting
_MOST_TRIES = 5
_FIRST_PAUSE_S = 0.5
_MOST_PAUSE_S = 30.0
# 529 is Anthropic's, for 429 as for 503: it holds up its own caller alone, as a 429 does.
_MAY_PASS = frozenset({401, 408, 409, 425, 429, 500, 502, 503, 504, 529})


@dataclass(slots=True)
class _Pause:
    """How long those whom a refusal speaks for are not to try again, and how many of them at once then."""

    lasts_s: float = 0.0
    until_s: float = 0.0
    at_once: int = _AT_ONCE

    def lengthen(self, now_s: float) -> None:
        """Something cannot be served now: one tries again, later and later."""
        self.at_once = 1
        self.lasts_s = min(max(self.lasts_s * 2, _FIRST_PAUSE_S), _MOST_PAUSE_S)
        self.until_s = now_s + self.lasts_s


class Deferring:
    """Use as `async with`, inside that of the database.

    Args:
        webhook: where to tell of what has ended; empty: nowhere. The answer of a `local-only` request is told on this
            machine alone.
        wall: Unix time, in seconds.

    Attributes:
        answered: since the start.
        waiting: as they were counted last.
    """

    def __init__(self, database: Database, clock: Clock, wall: Callable[[], float], ask: Ask, *, webhook: str) -> None:
        self._database = database
        self._clock = clock
        self._wall = wall
        self._ask = ask
        self._tells = bool(webhook)
        self._leaves = not is_loopback(urlsplit(webhook).hostname or "")
        self._news = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: Counter[str] = Counter()  # by caller
        self._everybody = _Pause()
        self._pauses: dict[str, _Pause] = {}  # of single callers
        self._due_s: dict[str, float] = {}  # of those that were refused
        self._fault = ""
        self.answered = 0
        self.waiting = 0

    async def __aenter__(self) -> Deferring:
        self._task = asyncio.create_task(self._run(), name="jobs deferred")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop what runs: it is answered after the next start."""
        await end(self._task, *self._tasks.values())

    def look(self) -> None:
        """A request was deferred, or forgotten."""
        self._news.set()

    def forget(self, deferred_id: str) -> None:
        """Stop one that runs."""
        if deferred_id in self._tasks:
            self._tasks[deferred_id].cancel()

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._turn()
                self._fault = ""
            except StorageFailed as error:
                if not self._fault:  # once, and not every two seconds
                    log.warning("deferred requests wait", why=error.message)
                self._fault = error.message
            except Exception:  # the task's boundary: one bad turn must not end them all
                log.exception("deferred requests crashed")
            timer = asyncio.get_running_loop().call_later(self._wait_s(), self._news.set)
            await self._news.wait()
            timer.cancel()

    def _wait_s(self) -> float:
        """Return in how many seconds to look again, if there is no news."""
        now_s = self._clock.now_s()
        ends_s = [self._everybody.until_s, *(pause.until_s for pause in self._pauses.values()), *self._due_s.values()]
        return min(_LOOK_S, max(min((end_s for end_s in ends_s if end_s > now_s), default=math.inf) - now_s, 0.05))

    async def _turn(self) -> None:
        for late in await self._database.run(lambda c: deferred.late(c, self._wall())):
            self.forget(late.id)
            await self._end(late, DeferredStatus.EXPIRED, None)
        self.waiting = await self._database.run(deferred.count)
        room = self._everybody.at_once - len(self._tasks)
        if room <= 0 or self._clock.now_s() < self._everybody.until_s:
            return
        waiting = await self._database.run(lambda c: deferred.queued(c, _AHEAD))
        known, owners = {request.id for request in waiting}, {request.owner for request in waiting}
        self._due_s = {name: due_s for name, due_s in self._due_s.items() if name in known}
        self._pauses = {owner: pause for owner, pause in self._pauses.items() if owner in owners}
        self._begin(waiting, room)

    def _begin(self, waiting: Sequence[deferred.Waiting], room: int) -> None:
        """Begin to answer as many as there is room for, of those that are due and whose callers may try."""
        now_s = self._clock.now_s()
        for request in waiting:
            pause = self._pauses.get(request.owner)
            most = _OF_ONE if request.owner else _AT_ONCE
            if pause is not None:
                most = 0 if now_s < pause.until_s else min(most, pause.at_once)
            held = self._running[request.owner] >= most
            if held or request.id in self._tasks or self._due_s.get(request.id, 0.0) > now_s:
                continue
            self._running[request.owner] += 1
            self._tasks[request.id] = task = asyncio.create_task(self._answer(request), name=f"answer {request.id}")
            task.add_done_callback(partial(self._done, request))
            room -= 1
            if not room:
                return

    def _done(self, request: deferred.Waiting, task: asyncio.Task[None]) -> None:
        self._tasks.pop(request.id, None)
        self._running -= Counter({request.owner: 1})  # keeps nobody who has none
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a deferred request crashed", id=request.id, exc_info=error)
            self._everybody.lengthen(self._clock.now_s())
        self._news.set()

    async def _answer(self, waiting: deferred.Waiting) -> None:
        try:
            request = await self._database.run(lambda c: deferred.get(c, waiting.owner, waiting.id))
        except NoSuchJob:  # its caller has just forgotten it
            return
        call = Call(request.id, request.owner, request.path, request.body, _headers(request), in_slack=False)
        told = await self._ask(call)
        if told.status in _MAY_PASS and not await self._is_final(request, told):
            pause = self._everybody if _no_capacity(told) else self._pauses.setdefault(request.owner, _Pause())
            pause.lengthen(self._clock.now_s())
            self._due_s[request.id] = pause.until_s + (told.retry_after_s or 0.0)  # another one may try before
            return
        self._everybody = _Pause()
        self._pauses.pop(request.owner, None)
        status = DeferredStatus.COMPLETED if 200 <= told.status < 300 else DeferredStatus.FAILED
        await self._end(request, status, (told.status, told.body))

    async def _is_final(self, request: Deferred, told: Told) -> bool:
        if told.retry_after_s is not None:
            return False  # there is no capacity, which says nothing of the request
        await self._database.run(partial(_tried, request.id))
        return request.tries + 1 >= _MOST_TRIES

    async def _end(
        self, request: Deferred | deferred.Waiting, to: DeferredStatus, reply: tuple[int, bytes] | None
    ) -> None:
        """Write what became of one, and tell the webhook of it, in one transaction."""
        now_s = self._wall()

        def work(connection: Connection) -> bool:
            if not deferred.end(connection, request.id, to, int(now_s), reply):
                return False
            if self._tells:
                ended = deferred.get(connection, request.owner, request.id)
                events.add(connection, f"deferred.{to.value}", self._told(ended), now_s)
            return True

        if await self._database.run(work):  # counted after that: others end meanwhile
            self.answered += 1

    def _told(self, ended: Deferred) -> dict[str, Any]:
        """Return what the webhook gets: an answer that may not leave this machine has to be fetched here."""
        told = deferred_object(ended)
        objective = parse_objective(dict(_headers(ended)), Objective())
        if self._leaves and objective.locality is Locality.LOCAL_ONLY:
            told["response"] = None
        return told


def _headers(request: Deferred) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in orjson.loads(request.headers))


def _no_capacity(told: Told) -> bool:
    """Whether a refusal speaks for everybody."""
    return told.status == 503 and told.retry_after_s is not None


def _tried(deferred_id: str, connection: Connection) -> None:
    deferred.tried(connection, deferred_id)
