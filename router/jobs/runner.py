"""Runs the lines of batches in the slack of the tier, and takes each batch from step to step.

One task looks at all of it, whenever something changed and a few times a second; each line that runs is a task. What
is stopped, refused or broken is run again; only what was committed counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace
from functools import partial

import orjson
import structlog

from router.base.clock import Clock
from router.base.timers import end
from router.jobs import batches
from router.jobs.agenda import LINES_AHEAD, Agenda, BatchAgenda
from router.jobs.answers import answered, failed, request_id
from router.jobs.call import Ask, Call, Told
from router.jobs.committer import Committer
from router.jobs.database import Database
from router.jobs.errors import StorageFailed
from router.jobs.lifecycle import Lifecycle
from router.jobs.records import Batch, BatchStatus, Line
from router.jobs.slack import Allowance, Slack, at_once, spacing_s

log = structlog.get_logger("router.jobs")

_LOOK_S = 0.5  # while batches run
_IDLE_LOOK_S = 5.0
_MOST_TRIES = 5  # of a line that fails, where it might not the next time
_FIRST_RETRY_S = 1.0
_MOST_RETRY_S = 60.0
_STEP_RETRY_S = 5.0
_LAST_COMMITS_S = 5.0
_MOST_CALM_S = 10.0  # a step of a batch waits for a moment without online requests
_CALM_LOOK_S = 0.05
_MOST_UNCOMMITTED = 512
_MAY_PASS = frozenset({401, 408, 409, 425, 429, 500, 502, 503, 504})


class Runner:
    """Use as `async with`, inside that of the database.

    Attributes:
        held: why no line begins, in a few words; empty while lines may.
        stopped: lines that were stopped for online requests, since the start.
        paused: those that were held up instead, with all that they had.
    """

    def __init__(self, database: Database, lifecycle: Lifecycle, slack: Slack, clock: Clock, ask: Ask) -> None:
        self._database = database
        self._lifecycle = lifecycle
        self._slack = slack
        self._clock = clock
        self._ask = ask
        self._agenda = Agenda()
        self._committer = Committer(database, clock)
        self._news = asyncio.Event()
        self._tasks: dict[Line, asyncio.Task[None]] = {}
        self._asking: dict[Line, None] = {}  # in the order of their begin
        self._stopping: set[Line] = set()
        self._unreadable: set[str] = set()  # why lines could not be read, since one could
        self._steps: dict[str, asyncio.Task[None]] = {}
        self._begun_at_s = 0.0
        self._held_up = 0
        self._stale = True
        self.held = ""
        self.stopped = self.paused = 0
        self.batches: Counter[str] = Counter()
        slack.changed = self._online_changed

    async def __aenter__(self) -> Runner:
        self._stack = contextlib.AsyncExitStack()
        await self._stack.enter_async_context(self._committer)
        self._task = asyncio.create_task(self._run(), name="jobs runner")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()
        await self._stack.aclose()

    async def stop(self) -> None:
        """Stop every line and every step; what was answered is still committed."""
        await end(self._task)
        await end(*self._asking_tasks(), *self._steps.values())
        await asyncio.wait(self._tasks.values(), timeout=_LAST_COMMITS_S) if self._tasks else None
        await end(*self._tasks.values())

    def _asking_tasks(self) -> list[asyncio.Task[None]]:
        return [self._tasks[line] for line in self._asking]

    @property
    def running(self) -> int:
        """Lines that the tier computes now."""
        return len(self._asking)

    @property
    def written(self) -> int:
        """Answers committed since the start."""
        return self._committer.written

    def look(self) -> None:
        """A batch was made, cancelled, or is over."""
        self._stale = True
        self._news.set()

    async def _calm(self) -> None:
        """Wait a while for a moment without online requests: checking a large file takes turns from the event loop."""
        waited_s = 0.0
        while waited_s < _MOST_CALM_S and (self._slack.online or self._slack.hold_left_s > 0.0):
            await self._clock.sleep(_CALM_LOOK_S)
            waited_s += _CALM_LOOK_S

    def _online_changed(self) -> None:
        """Every online request calls: while there are no lines, it costs nothing."""
        if self._asking:
            self._give_way(self._slack.allow(self.running))
        if len(self._agenda):
            self._news.set()

    async def _run(self) -> None:
        while True:
            self._news.clear()
            wait_s = _LOOK_S
            try:
                wait_s = await self._turn()
            except StorageFailed as error:
                self.held = error.message
            except Exception:  # the task's boundary: one bad turn must not end them all
                log.exception("jobs crashed")
            timer = asyncio.get_running_loop().call_later(wait_s, self._news.set)
            await self._news.wait()
            timer.cancel()

    async def _turn(self) -> float:
        """Take every step that can be taken; returns in how many seconds to look again."""
        if self._stale:
            self._stale = False  # before it is read: what changes meanwhile is read again
            try:
                running = await self._database.run(batches.running)
            except BaseException:
                self._stale = True
                raise
            self.batches = Counter(batch.status.value for batch in running)
            self._agenda.set(batch for batch in running if batch.status is BatchStatus.IN_PROGRESS)
            self._stop_others()
            for batch in running:
                self._step(batch)
        await self._over()
        await self._read_ahead()
        return self._fill()

    def _step(self, batch: Batch) -> None:
        """Take the next step of a batch beside its lines; to check or write a large file takes a while."""
        if batch.status is BatchStatus.IN_PROGRESS or batch.id in self._steps:
            return
        self._steps[batch.id] = task = asyncio.create_task(self._take_step(batch), name=f"step of {batch.id}")
        task.add_done_callback(lambda _: self._steps.pop(batch.id, None))

    async def _take_step(self, batch: Batch) -> None:
        mine = [task for line, task in self._tasks.items() if line.batch_id == batch.id]
        try:
            await end(*mine)
            await self._calm()
            await self._lifecycle.advance(batch)
        except StorageFailed as error:
            log.warning("a batch cannot go on", batch=batch.id, status=batch.status.value, why=error.message)
            await self._clock.sleep(_STEP_RETRY_S)
        except Exception:  # the task's boundary: the step is taken again
            log.exception("a step of a batch crashed", batch=batch.id)
            await self._clock.sleep(_MOST_RETRY_S)
        self._steps.pop(batch.id, None)
        self.look()

    async def _over(self) -> None:
        """Take those on whose lines are all answered, or whose window has ended."""
        for there in list(self._agenda):
            if self._lifecycle.is_late(there.batch) or there.done:
                await self._settle(there)

    async def _settle(self, there: BatchAgenda) -> None:
        batch_id = there.batch.id
        mine = [task for line, task in self._tasks.items() if line.batch_id == batch_id]
        if mine and not self._lifecycle.is_late(there.batch):
            return
        now = await self._database.run(lambda connection: batches.get(connection, None, batch_id))
        late = self._lifecycle.is_late(now)  # the clock may have leapt, and its window with it
        if late:
            await end(*mine)
        elif mine:
            return
        if now.status is BatchStatus.IN_PROGRESS and now.answered < now.total and not late:
            there.begin_again()  # a line was lost on its way: it stands in the database
            return
        if now.status is BatchStatus.IN_PROGRESS:
            await self._lifecycle.finalize(now)
        self.look()

    def _stop_others(self) -> None:
        """Stop the lines of batches that no longer run."""
        for line in [line for line in self._asking if line.batch_id not in self._agenda]:
            self._tasks[line].cancel()

    async def _read_ahead(self) -> None:
        for there in list(self._agenda):
            if there.wants_more:
                read = partial(_unanswered, there.batch.id, there.read_to)
                self._agenda.add(there.batch.id, await self._database.run(read))

    def _fill(self) -> float:
        """Begin as many lines as may run now; returns in how many seconds to look again."""
        if not len(self._agenda):
            self.held = ""
            return _IDLE_LOOK_S
        allowance = self._slack.allow(self.running)
        self._give_way(allowance)
        why = self._committer.stuck or self._lifecycle.no_room() or allowance.why
        if why or len(self._tasks) - len(self._asking) > _MOST_UNCOMMITTED:
            self.held = why
            return min(_LOOK_S, self._slack.hold_left_s + 0.001) if not self._slack.online else _LOOK_S
        self.held = ""
        now_s, next_s = self._clock.now_s(), self._begun_at_s + spacing_s(allowance)
        if now_s < next_s:
            return next_s - now_s
        running = self._by_owner()
        for _ in range(min(allowance.lines - self.running, at_once(allowance))):
            line = self._agenda.take(now_s, running)
            if line is None:
                return _LOOK_S
            self._begin(line)
            self._begun_at_s = now_s
            running[self._agenda.owner_of(line)] += 1
        if self.running == allowance.lines and not self._stopping:
            self._make_place(now_s, running)
        return spacing_s(allowance) if self.running < allowance.lines else _LOOK_S

    def _by_owner(self) -> Counter[str | None]:
        """Count the lines that run by their callers; not where there is one caller alone."""
        counted = Counter(map(self._agenda.owner_of, self._asking) if self._agenda.shared else ())
        del counted[None]  # those of a batch that is over are being stopped
        return counted

    def _make_place(self, now_s: float, running: Counter[str | None]) -> None:
        """Stop a line of who has most, where a caller has none: it may hang, and the others hung with it."""
        most = max(running.values(), default=0)
        if most > 1 and self._agenda.kept_out(now_s, running):
            last = next(line for line in reversed(self._asking) if running[self._agenda.owner_of(line)] == most)
            self._stop(last)

    def _begin(self, line: Line) -> None:
        self._asking[line] = None
        self._tasks[line] = task = asyncio.create_task(self._line(line), name=f"line {request_id(line)}")
        task.add_done_callback(partial(self._ended, line))

    def _give_way(self, allowance: Allowance) -> None:
        """Hold lines up or stop them, as many as may not go on beside who is there now."""
        self.paused += max(0, allowance.held_up - min(self._held_up, self.running))
        self._held_up = allowance.held_up
        self._slack.limit(allowance)
        self._stop_beyond(allowance.keep)

    def _stop_beyond(self, lines: int) -> None:
        """Stop the lines that began last, until no more run than may."""
        running = [line for line in self._asking if line not in self._stopping]
        for line in running[max(0, lines) :]:
            self._stop(line)

    def _stop(self, line: Line) -> None:
        """Stop a line, to be run again."""
        self._stopping.add(line)
        self.stopped += 1
        self._tasks[line].cancel()

    def _ended(self, line: Line, task: asyncio.Task[None]) -> None:
        self._tasks.pop(line, None)
        self._asking.pop(line, None)
        self._stopping.discard(line)
        if task.cancelled():
            self._agenda.back(line, self._clock.now_s())
        elif (error := task.exception()) is not None:
            log.error("line crashed", line=request_id(line), exc_info=error)
            self._agenda.back(line, self._clock.now_s() + _MOST_RETRY_S)
        self._news.set()

    async def _line(self, line: Line) -> None:
        """Run one line, and write what became of it."""
        there = next((item.batch for item in self._agenda if item.batch.id == line.batch_id), None)
        if there is None:
            return
        try:
            body = await asyncio.to_thread(self._lifecycle.body_of, there, line)
            self._unreadable.clear()
        except OSError as error:
            self._asking.pop(line, None)
            if error.errno is not None and not isinstance(error, FileNotFoundError):
                self._put_back(line, error)
                return
            await self._committer.commit(failed(line, _unreadable(error)))
            return
        told = await self._ask(Call(request_id(line), there.owner, there.endpoint, body, _headers(there)))
        self._asking.pop(line, None)  # the device is free again: nobody has to stop it now
        self._news.set()
        if told.status in _MAY_PASS and not await self._is_final(line, told):
            return
        await self._committer.commit(answered(line, told.status, request_id(line), told.body))

    def _put_back(self, line: Line, error: OSError) -> None:
        """Run a line later whose file cannot be read now: the disk, or this process that has too many open."""
        why = str(error.strerror)
        if why not in self._unreadable:
            self._unreadable.add(why)
            log.warning("lines cannot be read, and run later", line=request_id(line), why=why)
        self._agenda.back(line, self._clock.now_s() + _STEP_RETRY_S)

    async def _is_final(self, line: Line, told: Told) -> bool:
        """Whether a failure that may pass has come too often; if not, the line is due again later.

        A refusal for want of capacity says nothing of the line, and is never counted.
        """
        if told.retry_after_s is not None:
            self._agenda.back(line, self._clock.now_s() + min(max(told.retry_after_s, 0.1), _MOST_RETRY_S))
            return False
        tried = replace(line, tries=line.tries + 1)
        if tried.tries >= _MOST_TRIES:
            return True
        with contextlib.suppress(StorageFailed):
            await self._database.run(lambda connection: batches.tried(connection, line))
        wait_s = min(_FIRST_RETRY_S * 2**line.tries, _MOST_RETRY_S)
        self._agenda.back(tried, self._clock.now_s() + wait_s)
        return False


def _unanswered(batch_id: str, after: int, connection: object) -> list[Line]:
    return batches.unanswered(connection, batch_id, after, LINES_AHEAD)  # type: ignore[arg-type]


def _headers(batch: Batch) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in orjson.loads(batch.headers))


def _unreadable(error: OSError) -> StorageFailed:
    return StorageFailed(f"the line could not be read again: {error}", retry_after_s=0.0)
