"""Bounds on waiting, on the tier's own clock: no await of the router is without one."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from types import TracebackType
from typing import Final

import structlog

from router.base.clock import Clock, Timer

log = structlog.get_logger("router")

_SWEEP_ABOVE: Final = 256


class Alarm:
    """Rings once at its time, unless it is cancelled before."""

    __slots__ = ("_keeper", "ring")

    def __init__(self, ring: Callable[[], None], keeper: Alarms) -> None:
        self.ring: Callable[[], None] | None = ring
        self._keeper = keeper

    def cancel(self) -> None:
        if self.ring is not None:
            self.ring = None
            self._keeper.one_cancelled()


class Deadline:
    """A bound on waiting that moves: it rings each time that `due_s` has come, and never while that is infinite.

    Moving it later costs an assignment: the alarm behind it looks at `due_s` when it rings, and is set again.
    """

    __slots__ = ("_alarm", "_alarms", "_looks_at_s", "_ring", "due_s")

    def __init__(self, alarms: Alarms, ring: Callable[[], None]) -> None:
        self._alarms = alarms
        self._ring = ring
        self._alarm: Alarm | None = None
        self._looks_at_s = math.inf
        self.due_s = math.inf

    def move(self, due_s: float) -> None:
        """Ring at `due_s` of the clock instead; infinity: not for now."""
        self.due_s = due_s
        if due_s < self._looks_at_s:
            self._set()

    def cancel(self) -> None:
        """Never ring again, and let go of whom it would call."""
        self.due_s = self._looks_at_s = math.inf
        self._ring = _nothing
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _set(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._looks_at_s = self.due_s
        self._alarm = self._alarms.set(self.due_s, self._look)

    def _look(self) -> None:
        due_s, rang_at_s = self.due_s, self._looks_at_s
        self._looks_at_s = math.inf
        if due_s > rang_at_s:
            if due_s < math.inf:
                self._set()
            return
        self.due_s = math.inf
        self._ring()


class Alarms:
    """All alarms of a dispatcher, on one timer of its clock. Use as `async with`: outside of it nothing rings."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Alarm]] = []
        self._order = count()
        self._cancelled = 0
        self._open = False
        self._timer: Timer | None = None
        self._rings_at_s = math.inf  # what the timer is set to

    async def __aenter__(self) -> Alarms:
        self._open = True
        self._arm()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        if self._timer is not None:
            self._timer.cancel()

    def set(self, due_s: float, ring: Callable[[], None]) -> Alarm:
        """Call `ring` at `due_s` of the clock. What it raises is logged: the other alarms ring all the same."""
        alarm = Alarm(ring, self)
        heappush(self._heap, (due_s, next(self._order), alarm))
        if due_s < self._rings_at_s:
            self._arm()
        return alarm

    def deadline(self, ring: Callable[[], None]) -> Deadline:
        """Return a bound that calls `ring`; it waits for its first `move`."""
        return Deadline(self, ring)

    def one_cancelled(self) -> None:
        """Sweep the cancelled out once they are half of all."""
        self._cancelled += 1
        if self._cancelled > max(_SWEEP_ABOVE, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].ring is not None]
            heapify(self._heap)
            self._cancelled = 0

    def _arm(self) -> None:
        """Set the timer to the next alarm that was not cancelled."""
        while self._heap and self._heap[0][2].ring is None:
            heappop(self._heap)
            self._cancelled -= 1
        due_s = self._heap[0][0] if self._heap else math.inf
        if not self._open or due_s == self._rings_at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at_s = due_s
        self._timer = self._clock.call_at(due_s, self._ring_due) if due_s < math.inf else None

    def _ring_due(self) -> None:
        """Ring what is due. An alarm that is set meanwhile is looked at here too."""
        self._timer, self._rings_at_s = None, -math.inf
        now_s = self._clock.now_s()
        while self._heap and (self._heap[0][0] <= now_s or self._heap[0][2].ring is None):
            alarm = heappop(self._heap)[2]
            ring, alarm.ring = alarm.ring, None
            if ring is None:
                self._cancelled -= 1
                continue
            try:
                ring()
            except Exception:  # one bad alarm must not end every other bound on waiting
                log.exception("alarm crashed")
        self._rings_at_s = math.inf
        self._arm()


def _nothing() -> None:
    """A deadline that was cancelled calls nobody."""
