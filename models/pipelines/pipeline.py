"""Stages in a row: what goes in at the front comes out at the back, batch by batch, each stage at its own pace.

Nothing between two stages is bounded: a stage never waits for the next one. What is bounded is how many items are
inside (`queue_items`), and whoever comes beyond that is refused with a time to come back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.pipelines.known_good import KnownGoods
from models.pipelines.process import ProcessWork
from models.pipelines.stage import Stage, StagePlan, Work
from models.pipelines.ticket import Item, Outcomes, Ticket
from router.base.clock import Clock
from router.base.errors import OverspillError, ReplicaBroken, ReplicaUnreachable, Unavailable

_RETRY_AFTER_S = 0.25


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A pipeline before it runs.

    Attributes:
        queue_items: inputs inside it at most, those that are computed included.
    """

    name: str
    stages: tuple[StagePlan, ...]
    queue_items: int = 4096


class Pipeline:
    """A pipeline that runs, from `open` to `close`. Create it on the event loop.

    Args:
        broke: called on the event loop when a stage failed again and again, also on what it has computed before.
        known_good: what is known of its stages from before they were loaded.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        clock: Clock,
        broke: Callable[[str], None] = lambda _: None,
        known_good: KnownGoods | None = None,
    ) -> None:
        self.plan = plan
        known = known_good or KnownGoods()
        self.stages = [
            Stage(stage, index, self, clock.now_s, known.of(stage.name)) for index, stage in enumerate(plan.stages)
        ]
        self._clock = clock
        self._broke = broke
        self._told_broken = False
        self._event_loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._tickets: set[Ticket] = set()
        self._items = 0
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
    def cost(self) -> int:
        """What their submitters said that they cost, of those that are not through."""
        return sum(ticket.cost for ticket in self._tickets)

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
        process = ProcessWork(f"{self.plan.name}-{stage.name}", stage.open)
        self._processes.append(process)
        process.start()
        return process

    async def close(self, why: str = "it is shutting down") -> None:
        """End the workers after the batches that they compute; requests still inside end with an error."""
        self._closed = True
        await asyncio.to_thread(self._stop)
        lost, self._tickets = self._tickets, set()
        for ticket in lost:
            if not ticket.over:
                ticket.error = ReplicaBroken(f"{self.plan.name}: {why}")
                self._end([ticket])
        self._items = 0

    def _stop(self) -> None:
        with ThreadPoolExecutor(max_workers=len(self.stages)) as pool:  # side by side: each may compute for a while
            list(pool.map(Stage.stop, self.stages))
        self._end_processes()

    def _end_processes(self) -> None:
        for process in self._processes:
            process.close()
        self._processes.clear()

    async def run(self, values: Sequence[Any], *, priority: int, due_s: float, cost: int) -> Ticket:
        """Send inputs through all stages; return what they came to, in order, and when.

        Args:
            due_s: when the answer is worth nothing any more, on the pipeline's clock; infinity without a deadline.
            cost: what the inputs are expected to cost, in any unit; see `cost`.

        Raises:
            Unavailable: too much is inside already.
            ReplicaUnreachable: it is closed.
            OverspillError: an input failed.
        """
        if self._closed:
            raise ReplicaUnreachable(f"{self.plan.name}: it is closed")
        most = self.plan.queue_items
        if self._items and self._items + len(values) > most:
            raise Unavailable(
                f"{self.plan.name}: {self._items} inputs are inside already, the limit is {most}",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._refuse_where_full()
        ticket = Ticket(len(values), self._event_loop.create_future(), priority, due_s)
        ticket.cost = cost
        self._tickets.add(ticket)
        self._items += ticket.left
        now_s, first = self._clock.now_s(), self.stages[0]
        ticket.began_s = now_s
        measure = first.plan.cost
        first.put([Item(ticket, rank, value, now_s, measure(value)) for rank, value in enumerate(values)])
        try:
            await ticket.done
        finally:
            ticket.over = True
            if ticket in self._tickets:
                self._tickets.discard(ticket)
                self._items -= ticket.size
        if ticket.error is not None:
            raise ticket.error
        return ticket

    def _refuse_where_full(self) -> None:
        """Raises Unavailable while a stage has more before it than it may: it is refused at the door, never between."""
        for stage in self.stages:
            most = stage.plan.queue_items
            if most and stage.waiting >= most:
                raise Unavailable(
                    f"{self.plan.name}: {stage.waiting} inputs wait at stage {stage.plan.name}, the limit is {most}",
                    retry_after_s=_RETRY_AFTER_S,
                )

    # --- in the workers ---

    def came(self, stage: int, outcomes: Outcomes) -> None:
        """Hand results on to the next stage, or to those who wait for them."""
        ended: list[Ticket] = []
        onward: list[Item] = []
        following = self.stages[stage + 1] if stage + 1 < len(self.stages) else None
        now_s = self._clock.now_s()
        with self._lock:
            for item, result in outcomes:
                ticket = item.ticket
                if ticket.over:
                    continue
                if isinstance(result, OverspillError):
                    ticket.error, ticket.over = result, True
                    ended.append(ticket)
                elif following is not None:
                    onward.append(Item(ticket, item.rank, result, now_s, following.plan.cost(result)))
                else:
                    ticket.results[item.rank] = result
                    ticket.left -= 1
                    if ticket.left == 0:
                        ticket.over, ticket.ended_s = True, now_s
                        ended.append(ticket)
        if onward and following is not None:
            following.put(onward)
        if ended:
            self._tell(partial(self._end, ended))

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
