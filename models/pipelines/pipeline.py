"""Stages in a row: what goes in at the front comes out at the back, batch by batch, each stage at its own pace.

How many items are inside is bounded (`queue_items`), and whoever comes beyond that is refused with a time to come back.
A stage waits for those behind it only where what waits there takes too much of the memory (`queue_bytes`): small inputs
may become large ones on their way, as images do that are decoded.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.pipelines.lessons import Lessons
from models.pipelines.process import ProcessWork
from models.pipelines.stage import Stage, StagePlan, Work
from models.pipelines.ticket import Item, Outcomes, Ticket
from router.base.clock import Clock
from router.base.errors import (
    InputsTooLarge,
    OverspillError,
    RefusedAlone,
    ReplicaBroken,
    ReplicaUnreachable,
    RequestFailed,
    Unavailable,
    in_words,
)

_RETRY_AFTER_S = 0.25


def no_bytes(value: Any) -> int:  # noqa: ARG001 - the size of any value
    """Nothing is counted."""
    return 0


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A pipeline before it runs.

    Attributes:
        queue_items: inputs inside it at most, those that are computed included.
        queue_bytes: what they may take of the memory, and what the answer to one request may; 0 bounds nothing.
        size_of: bytes that a value takes, at any stage.
    """

    name: str
    stages: tuple[StagePlan, ...]
    queue_items: int = 4096
    queue_bytes: int = 0
    size_of: Callable[[Any], int] = no_bytes


class Pipeline:
    """A pipeline that runs, from `open` to `close`. Create it on the event loop.

    Args:
        broke: called on the event loop when a stage failed again and again, also on what it has computed before.
        lessons: what is known of its stages from before they were loaded.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        clock: Clock,
        broke: Callable[[str], None] = lambda _: None,
        lessons: Lessons | None = None,
    ) -> None:
        self.plan = plan
        known = lessons or Lessons()
        self.stages = [Stage(stage, index, self, clock.now_s, known) for index, stage in enumerate(plan.stages)]
        self._clock = clock
        self._broke = broke
        self._told_broken = False
        self._event_loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._tickets: set[Ticket] = set()
        self._items = 0
        self._input_bytes = 0
        self._cost = 0
        self._answer_bytes = 0  # of requests that are not through: their results so far
        self._processes: list[ProcessWork] = []
        self._closed = False

    @property
    def requests(self) -> int:
        """Requests inside."""
        return len(self._tickets)

    @property
    def items(self) -> int:
        """Their inputs that are not through."""
        return self._items

    @property
    def size_bytes(self) -> int:
        """What is inside takes of the memory, on whatever stage."""
        return self._answer_bytes + sum(stage.size_bytes for stage in self.stages)

    @property
    def cost(self) -> int:
        """What their submitters said that they cost, of those that are not through."""
        return self._cost

    async def open(self) -> None:
        """Load what the stages need, and begin to work.

        Raises:
            OverspillError: a stage cannot be made; says why.
        """
        try:
            works = [
                [await asyncio.to_thread(self._opened, plan) for _ in range(plan.workers)] for plan in self.plan.stages
            ]
        except BaseException:
            await asyncio.to_thread(self._end_processes)
            raise
        for stage, functions in zip(self.stages, works, strict=True):
            stage.start(functions, self.plan.name)

    def _opened(self, stage: StagePlan) -> Work:
        if stage.pool == "threads":
            return stage.open()
        process = ProcessWork(f"{self.plan.name}-{stage.name}", stage.open, stage.timeout_s, stage.start_timeout_s)
        self._processes.append(process)
        process.start()
        return process

    async def close(self, why: str = "it is shutting down") -> None:
        """End the workers after the batches that they compute; requests still inside end with an error."""
        self._closed = True
        await asyncio.to_thread(self._stop)
        with self._lock:
            lost, self._tickets = [ticket for ticket in self._tickets if not ticket.over], set()
            for ticket in lost:
                ticket.error = ReplicaBroken(f"{self.plan.name}: {why}")
                self._over(ticket)
        self._end(lost)
        self._items = self._cost = 0

    def _stop(self) -> None:
        with ThreadPoolExecutor(max_workers=len(self.stages)) as pool:  # side by side: each may compute for a while
            list(pool.map(Stage.stop, self.stages))
        self._end_processes()

    def _end_processes(self) -> None:
        for process in self._processes:
            process.end()
        self._processes.clear()

    async def run(self, values: Sequence[Any], *, priority: int, due_s: float, cost: int, caller: str = "") -> Ticket:
        """Send inputs through all stages; return what they came to, in order, and when.

        Args:
            due_s: when the answer is worth nothing any more, on the pipeline's clock; infinity without a deadline.
            cost: what the inputs are expected to cost, in any unit; see `cost`.
            caller: whose they are; empty where nobody tells callers apart.

        Raises:
            Unavailable: too much is inside already.
            InputsTooLarge: they, or the answer to them, take more memory than those of one request may.
            ReplicaUnreachable: it is closed.
            OverspillError: an input failed.
        """
        if self._closed:
            raise ReplicaUnreachable(f"{self.plan.name}: it is closed")
        sizes = [self.plan.size_of(value) for value in values]
        self._refuse_where_full(len(values))
        self._refuse_too_large(sum(sizes))
        ticket = Ticket(len(values), self._event_loop.create_future(), priority, due_s, caller)
        ticket.cost, ticket.input_bytes, ticket.began_s = cost, sum(sizes), self._clock.now_s()
        first, ranked = self.stages[0], enumerate(zip(values, sizes, strict=True))
        items = [
            Item(ticket, rank, value, ticket.began_s, first.plan.cost(value), size) for rank, (value, size) in ranked
        ]
        with self._lock:
            self._tickets.add(ticket)
        self._items += ticket.size
        self._input_bytes += ticket.input_bytes
        self._cost += cost
        first.put(items)
        try:
            await ticket.done
        finally:
            self._leave(ticket)
        if ticket.error is not None:
            raise ticket.error
        return ticket

    def _leave(self, ticket: Ticket) -> None:
        with self._lock:
            self._over(ticket)
            if ticket in self._tickets:
                self._tickets.discard(ticket)
                self._items -= ticket.size
                self._input_bytes -= ticket.input_bytes
                self._cost -= ticket.cost

    def _refuse_too_large(self, size_bytes: int) -> None:
        """Raises RefusedAlone where inputs find no room in the memory now, InputsTooLarge where they never will.

        What the inputs inside have become is none of it: stages wait for that, and nobody is refused for another's.
        """
        most, inside = self.plan.queue_bytes, self._input_bytes
        if not most or inside + size_bytes <= most:
            return
        if size_bytes > most:
            raise InputsTooLarge(
                f"{self.plan.name}: inputs of {_mib(size_bytes)}, those of one request may have {_mib(most)}: send "
                "fewer at once, or smaller ones"
            )
        raise RefusedAlone(
            f"{self.plan.name}: {_mib(inside)} of inputs are inside already, the limit is {_mib(most)}, and these have "
            f"{_mib(size_bytes)}: send them later, or fewer at once",
            retry_after_s=_RETRY_AFTER_S,
        )

    def _refuse_where_full(self, items: int) -> None:
        """Raises Unavailable where more is inside, or waits before a stage, than may: at the door, never between.

        It speaks for others only where a single input would find no room either.
        """
        most = self.plan.queue_items
        if self._items and self._items + items > most:
            kind = RefusedAlone if self._items < most else Unavailable
            raise kind(
                f"{self.plan.name}: {self._items} inputs are inside already, the limit is {most}",
                retry_after_s=_RETRY_AFTER_S,
            )
        for stage in self.stages:
            most = stage.plan.queue_items
            if most and stage.waiting >= most:
                raise Unavailable(
                    f"{self.plan.name}: {stage.waiting} inputs wait at stage {stage.plan.name}, the limit is {most}",
                    retry_after_s=_RETRY_AFTER_S,
                )

    # --- in the workers ---

    def crowded(self, stage: int) -> bool:
        """Whether what is behind a stage takes all of the memory that it may; it waits for some of that to go."""
        most = self.plan.queue_bytes
        return most > 0 and sum(behind.size_bytes for behind in self.stages[stage + 1 :]) >= most

    def freed(self, stage: int) -> None:
        """Have the stages before it look whether they may go on."""
        if self.plan.queue_bytes:
            for before in self.stages[:stage]:
                before.wake()

    def came(self, stage: int, outcomes: Outcomes) -> None:
        """Hand results on to the next stage, or to those who wait for them."""
        ended: list[Ticket] = []
        onward: list[Item] = []
        following = self.stages[stage + 1] if stage + 1 < len(self.stages) else None
        now_s = self._clock.now_s()
        measured = [(item, self._measured(result, following)) for item, result in outcomes]
        with self._lock:
            for item, (result, size, cost) in measured:
                ticket = item.ticket
                if ticket.over:
                    continue
                if isinstance(result, OverspillError):
                    ticket.error = result
                    self._over(ticket)
                    ended.append(ticket)
                elif following is not None:
                    onward.append(Item(ticket, item.rank, result, now_s, cost, size))
                else:
                    ended += self._through(item, result, size, now_s)
        if onward and following is not None:
            following.put(onward)
        if ended:
            self._tell(partial(self._end, ended))

    def _measured(self, result: Any, following: Stage | None) -> tuple[Any, int, int]:
        """Return a result, its bytes, and its cost at the next stage; where it has none of these, an error of its own.

        A worker that fails here has answered nobody, and nobody after: it is gone.
        """
        if isinstance(result, OverspillError):
            return result, 0, 0
        try:
            return result, self.plan.size_of(result), 0 if following is None else following.plan.cost(result)
        except Exception as error:  # noqa: BLE001 - of whatever somebody's function has returned
            return RequestFailed(f"{self.plan.name}: an input became what has no size: {in_words(error)}"), 0, 0

    def _through(self, item: Item, result: Any, size: int, now_s: float) -> list[Ticket]:
        """Keep the result of an input that is through. Return the requests that end with it."""
        ticket = item.ticket
        ticket.results[item.rank] = result
        ticket.left -= 1
        ticket.size_bytes += size
        self._answer_bytes += size
        ended = self._given_up()
        if ticket.left == 0 and not ticket.over:
            ticket.ended_s = now_s
            self._over(ticket)
            ended.append(ticket)
        return ended

    def _over(self, ticket: Ticket) -> None:
        ticket.over = True
        self._answer_bytes -= ticket.size_bytes
        ticket.size_bytes = 0

    def _given_up(self) -> list[Ticket]:
        """End the requests with the largest answers while those that are not whole yet take more than they may."""
        most, ended = self.plan.queue_bytes, []
        while most and self._answer_bytes > most:
            largest = max(self._tickets, key=_answer_bytes)
            largest.error = _too_large_an_answer(self.plan.name, largest.size_bytes, most)
            self._over(largest)
            largest.results = []
            ended.append(largest)
        return ended

    def broke(self, why: str) -> None:
        """Tell the owner, once: what it then loads in the place of this is another."""
        self._tell(lambda: self._say_broken(why))

    def _tell(self, call: Callable[[], object]) -> None:
        try:
            self._event_loop.call_soon_threadsafe(call)
        except RuntimeError:  # the event loop is closed: nobody listens any more
            self._closed = True

    # --- on the event loop ---

    def _say_broken(self, why: str) -> None:
        if not self._told_broken:
            self._told_broken = True
            self._broke(why)

    def _end(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if not ticket.done.done():
                ticket.done.set_result(None)


def _answer_bytes(ticket: Ticket) -> int:
    return ticket.size_bytes


def _too_large_an_answer(pipeline: str, size_bytes: int, most_bytes: int) -> OverspillError:
    if size_bytes > most_bytes:
        return InputsTooLarge(
            f"{pipeline}: the answer is larger than {_mib(most_bytes)}, which one may take: send fewer inputs at once"
        )
    return RefusedAlone(
        f"{pipeline}: answers that are not whole yet take more than {_mib(most_bytes)}, and this one, with "
        f"{_mib(size_bytes)}, the most: send the inputs later, or fewer at once",
        retry_after_s=_RETRY_AFTER_S,
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
