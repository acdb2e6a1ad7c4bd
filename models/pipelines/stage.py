"""One stage of a pipeline: its queue, its own workers, its figures.

A stage is a function of a batch. Its workers are threads that take batches out of its queue and hand the results on by
themselves, so that neither a slow stage behind it nor a busy event loop keeps one waiting. A worker of a `processes`
pool is such a thread too, which waits for a process of its own (`process.py`).

A batch that fails is halved until the input is alone that it fails on: only who sent that is told. One that ends the
process of its worker again and again is not computed any more (`set_apart.py`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import structlog

from models.pipelines.batching import Batch, BatchSettings, Waiting
from models.pipelines.lessons import Lessons
from models.pipelines.set_apart import ProcessEnded
from models.pipelines.ticket import Item, Outcomes, Ticket
from router.base.errors import DeadlineLost, OverspillError, RequestFailed, in_words

log = structlog.get_logger("models.pipelines")

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the classes in which the sizes of batches are counted."""

ALONE = BatchSettings()
"""Each input by itself."""

Work = Callable[[list[Any]], Sequence[Any]]
"""A function of a batch: one result for each value, in order. A result that is an exception is that value's own."""


class Opens(Protocol):
    """Makes a stage's function for one worker; called in the worker's thread, and loads what the function needs."""

    def __call__(self) -> Work: ...


def cost_of_one(value: Any) -> int:  # noqa: ARG001 - the cost of any value
    """Every item costs the same."""
    return 1


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage before it runs.

    Attributes:
        open: makes its function, once for each worker.
        workers: batches computed at once: the instances of a model.
        cost: size of a value at this stage, in the unit of the buckets.
        queue_items: while more items wait here, the pipeline takes no new requests; 0 bounds nothing.
        timeout_s: that a batch may take in a process; 0 bounds nothing. Nobody can end a thread.
        start_timeout_s: that making its function may take there.
    """

    name: str
    open: Opens
    workers: int = 1
    batching: BatchSettings = ALONE
    cost: Callable[[Any], int] = cost_of_one
    pool: Literal["threads", "processes"] = "threads"
    queue_items: int = 0
    timeout_s: float = 0.0
    start_timeout_s: float = 0.0


@dataclass(slots=True)
class StageCounters:
    """What a stage did since it was made; written by its workers, under its lock.

    Attributes:
        sizes: batches by size, in the classes of `SIZES` and one beyond.
        busy_s: time that its workers computed, all together; waited_s: that its items waited.
        padded, cost: what was computed, and the part of it that was no padding.
        isolated: requests that failed alone, after the batch that they came in.
        late: items dropped since their deadline had passed.
    """

    batches: int = 0
    items: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    cost: int = 0
    padded: int = 0
    failed: int = 0
    isolated: int = 0
    late: int = 0
    sizes: list[int] = field(default_factory=lambda: [0] * (len(SIZES) + 1))

    def ran(self, batch: Batch[Item], took_s: float, now_s: float) -> None:
        size = len(batch.items)
        self.batches += 1
        self.items += size
        self.busy_s += took_s
        self.waited_s += sum(now_s - took_s - item.arrived_s for item in batch.items)
        self.cost += sum(item.cost for item in batch.items)
        self.padded += batch.cost
        self.sizes[next((index for index, most in enumerate(SIZES) if size <= most), len(SIZES))] += 1


class Owner(Protocol):
    """The pipeline of a stage, as the stage's workers see it."""

    def crowded(self, stage: int) -> bool:
        """Whether so much waits behind a stage that it had better not add to it."""
        ...

    def freed(self, stage: int) -> None:
        """Hear that a stage has let go of what it computed."""
        ...

    def came(self, stage: int, outcomes: Outcomes) -> None:
        """Take what came of items at a stage."""
        ...

    def broke(self, why: str) -> None:
        """The function failed again and again, also on what it has computed before."""
        ...


_FAILURES_BEFORE_DOUBT = 3
_LET_GO_S = 30.0


@dataclass(slots=True)
class _Worker:
    """A function, and how many inputs in a row it failed on by no fault that it named."""

    work: Work
    failures: int = 0


class Stage:
    """A stage that runs, from `start` to `stop`.

    Args:
        index: which of its pipeline's stages it is.
        now_s: the time, on the pipeline's clock.
        lessons: what is known of it from before it was loaded.
    """

    def __init__(self, plan: StagePlan, index: int, owner: Owner, now_s: Callable[[], float], lessons: Lessons) -> None:
        self.plan = plan
        self.counters = StageCounters()
        self.busy = 0
        self._computing_bytes = 0
        self._index = index
        self._owner = owner
        self._now_s = now_s
        self._known_good = lessons.known_good(plan.name)
        self._set_apart = lessons.set_apart(plan.name, now_s)
        self._waiting: Waiting[Item] = Waiting(plan.batching)
        self._news = threading.Condition()
        self._ending = False
        self._threads: list[threading.Thread] = []

    @property
    def waiting(self) -> int:
        """Items in its queue."""
        return len(self._waiting)

    @property
    def size_bytes(self) -> int:
        """What its items, waiting and computed, take of the memory."""
        return self._waiting.size_bytes + self._computing_bytes

    def wake(self) -> None:
        """Have its workers look again whether they may go on."""
        with self._news:
            self._news.notify_all()

    def start(self, works: Sequence[Work], name: str) -> None:
        """Begin to work, one thread for each function."""
        self._ending = False
        for number, work in enumerate(works):
            title = f"{name}-{self.plan.name}-{number}"
            thread = threading.Thread(target=self._serve, args=(_Worker(work),), name=title, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> list[Item]:
        """End the workers after the batches that they compute; returns the items that still waited.

        Blocks, for half a minute at most: nobody can end a thread whose function does not return.
        """
        with self._news:
            self._ending = True
            left = self._waiting.clear()
            self._news.notify_all()
        ends_s = time.monotonic() + _LET_GO_S
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, ends_s - time.monotonic()))
        stuck = [thread.name for thread in others if thread.is_alive()]
        if stuck:
            log.warning("workers do not return; they are left behind", stage=self.plan.name, threads=stuck)
        self._threads.clear()
        return left

    def put(self, items: Sequence[Item]) -> None:
        """Queue items."""
        with self._news:
            for item in items:
                self._waiting.add(item)
            self._news.notify(min(len(items), self.plan.workers))

    def _serve(self, worker: _Worker) -> None:
        while (batch := self._next()) is not None:
            outcomes = self._timed(batch, worker)
            with self._news:
                self.busy -= 1
            self._owner.came(self._index, outcomes)
            with self._news:
                self._computing_bytes -= _bytes_of(batch)
            del batch, outcomes  # a worker that waits holds nobody's images
            self._owner.freed(self._index)
            if worker.failures >= _FAILURES_BEFORE_DOUBT:
                worker.failures = 0
                if broken := self._known_good.why_broken(worker.work):
                    self._owner.broke(
                        f"stage {self.plan.name} failed {_FAILURES_BEFORE_DOUBT} times in a row, {broken}"
                    )

    def _next(self) -> Batch[Item] | None:
        with self._news:
            while not self._ending:
                if len(self._waiting) and self._owner.crowded(self._index):
                    self._news.wait()
                    continue
                found = self._taken()
                if isinstance(found, Batch):
                    self.busy += 1
                    if len(self._waiting):
                        self._news.notify()  # what is left is another idle worker's
                    return found
                self._news.wait(None if found == math.inf else found)
            return None

    def _taken(self) -> Batch[Item] | float:
        """Take the next batch out of the queue; those whom nobody waits for any more leave room with it."""
        before_bytes = self._waiting.size_bytes
        found = self._waiting.take(self._now_s())
        taken_bytes = _bytes_of(found) if isinstance(found, Batch) else 0
        self._computing_bytes += taken_bytes
        if self._waiting.size_bytes + taken_bytes < before_bytes:
            self._owner.freed(self._index)
        return found

    def _timed(self, batch: Batch[Item], worker: _Worker) -> Outcomes:
        """Compute a batch, without those whose time is over and those that are set apart."""
        now_s = self._now_s()
        late = [item for item in batch.items if item.due_s <= now_s]
        outcomes: list[tuple[Item, Any]] = [(item, _too_late(item, self.plan.name)) for item in late]
        left = [item for item in batch.items if item.due_s > now_s]
        refused = [(item, why) for item in left if (why := self._set_apart.refusal(item.caller, item.value))]
        outcomes += refused
        if outcomes:
            out = {item for item, _ in outcomes}
            batch = Batch(tuple(item for item in left if item not in out), batch.size)
        if batch.items:
            began_s = time.perf_counter()
            failed: set[Ticket] = set()
            outcomes += self._computed(batch.items, worker, failed)
            took_s = time.perf_counter() - began_s
            with self._news:
                self.counters.ran(batch, took_s, self._now_s())
                self.counters.isolated += len(failed) if len(batch.items) > 1 else 0
                self._waiting.pace.took(batch.cost, took_s)
        with self._news:
            self.counters.late += len(late)
            self.counters.failed += sum(isinstance(result, BaseException) for _, result in outcomes)
        return outcomes

    def _computed(self, items: tuple[Item, ...], worker: _Worker, failed: set[Ticket]) -> list[tuple[Item, Any]]:
        """Compute items, in halves where they fail together; of a request that has failed no further one is tried."""
        items = tuple(item for item in items if item.ticket not in failed)
        if not items:
            return []
        try:
            results = list(worker.work([item.value for item in items]))
            if len(results) != len(items):
                raise RequestFailed(  # noqa: TRY301 - it is the function's failure like any other
                    f"stage {self.plan.name} returned {len(results)} results for {len(items)} inputs"
                )
        except BaseException as error:  # noqa: BLE001 - whoever wrote the function: `sys.exit` would end the worker alone
            if len(items) > 1:
                half = len(items) // 2
                return [*self._computed(items[:half], worker, failed), *self._computed(items[half:], worker, failed)]
            failed.add(items[0].ticket)
            if isinstance(error, ProcessEnded):
                self._set_apart.ended(items[0].caller, items[0].value)
            if not isinstance(error, OverspillError):
                worker.failures += 1
                log.warning("input failed", stage=self.plan.name, error=in_words(error))
            return [(items[0], _own(error, self.plan.name))]
        worker.failures = 0
        for item, result in zip(items, results, strict=True):
            if not isinstance(result, BaseException):
                self._known_good.passed(item.value, item.size_bytes)
                break
        return [(item, _own(result, self.plan.name)) for item, result in zip(items, results, strict=True)]


def _bytes_of(batch: Batch[Item]) -> int:
    return sum(item.size_bytes for item in batch.items)


def _own(result: Any, stage: str) -> Any:
    """Return a result; an exception as an error of the tree."""
    if not isinstance(result, BaseException) or isinstance(result, OverspillError):
        return result
    return RequestFailed(f"an input fails in stage {stage}: {in_words(result)}")


def _too_late(item: Item, stage: str) -> DeadlineLost:
    return DeadlineLost(f"the deadline passed before input {item.rank} reached stage {stage}", retry_after_s=1.0)
