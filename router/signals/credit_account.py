"""Credits as the tier that got them sees them: what it may send upstream now, and when to ask for more.

A pure state machine on the tier's clock. Times in reports are relative, and count from when the report was asked for,
so that a credit is void here no later than there. Whoever never reported credits sets no limit.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from router.base.clock import Clock
from router.values.credits import Grant

_MOST_CREDITS = 10_000  # at once, whatever a report says
_LONGEST_S = 3_600.0
_TRIAL_S = 30.0  # a report that is so long overdue may never come: one request finds out


@dataclass(slots=True, eq=False)
class HeldCredits:
    """Credits of one report: how many are left, and until when they hold."""

    until_s: float
    left: int


class CreditAccount:
    """What one upstream lets this instance send.

    Args:
        draw: spreads trials over the fleet.

    Attributes:
        in_line: it wanted more than the last report gave, so that it has a turn to wait for.
        unreadable: reports whose credits could not be read, and were ignored.
    """

    def __init__(self, clock: Clock, draw: random.Random) -> None:
        self.in_line = False
        self.unreadable = 0
        self._clock = clock
        self._draw = draw
        self._limited = False
        self._batches: deque[HeldCredits] = deque()
        self._told_s = 0.0
        self._again_s = 0.0
        self._wait_s = 0.0
        self._next_trial_s = 0.0
        self._clock_s = clock.now_s()

    @property
    def limited(self) -> bool:
        """Whether the upstream issues credits at all."""
        return self._limited

    def told(self, grant: Grant | None, asked_at_s: float, wanted: int = 0) -> None:
        """A report has come.

        Args:
            grant: None says that the upstream issues no credits.
            asked_at_s: when it was asked for; wanted: and for how many.
        """
        now_s = self._now_s()
        self._limited = grant is not None
        self.in_line = grant is not None and wanted > grant.credits
        if grant is None:
            self._batches.clear()
            return
        self._told_s = now_s
        self._again_s, self._wait_s = _time_s(grant.again_s), _time_s(grant.wait_s)
        self._next_trial_s = now_s + self._again_s + self._trial_pause_s()
        until_s = min(asked_at_s, now_s) + _time_s(grant.for_s)
        if grant.credits > 0 and until_s > now_s:
            self._batches.append(HeldCredits(until_s, min(grant.credits, _MOST_CREDITS)))

    def misread(self) -> None:
        """A report's credits could not be read: what was said before stays."""
        self.unreadable += 1

    @property
    def held(self) -> int:
        """Credits that are there and not void."""
        self._drop_void(self._now_s())
        return sum(batch.left for batch in self._batches)

    def available(self) -> int | None:
        """Return how many requests may be sent now, None for no limit."""
        if not self._limited:
            return None
        return self.held or int(self._now_s() >= self._next_trial_s)

    def spend(self) -> HeldCredits | None:
        """Take a credit for a request that is about to be sent; None where none is needed, or none is left."""
        if not self._limited:
            return None
        now_s = self._now_s()
        self._drop_void(now_s)
        if not self._batches:
            if now_s >= self._next_trial_s:
                self._next_trial_s = now_s + self._trial_pause_s()
            return None
        batch = min(self._batches, key=lambda batch: batch.until_s)
        batch.left -= 1
        if batch.left == 0:
            self._batches.remove(batch)
        return batch

    def give_back(self, batch: HeldCredits) -> None:
        """The request was refused before it cost anything; nothing if the credit is void by now."""
        if batch.until_s <= self._now_s() or not self._limited:
            return
        batch.left += 1
        if batch not in self._batches:
            self._batches.appendleft(batch)

    def ask_in_s(self) -> float:
        """Return the time until the upstream wants to be asked again."""
        return max(0.0, self._told_s + self._again_s - self._now_s())

    def next_in_s(self) -> float:
        """Return the time until a credit may be expected, by the upstream's word; 0 where one is there."""
        if self.available() != 0:
            return 0.0
        return max(0.0, self._told_s + self._wait_s - self._now_s())

    def _trial_pause_s(self) -> float:
        return _TRIAL_S * self._draw.uniform(0.5, 1.5)

    def _drop_void(self, now_s: float) -> None:
        if self._batches and min(batch.until_s for batch in self._batches) <= now_s:
            self._batches = deque(batch for batch in self._batches if batch.until_s > now_s)

    def _now_s(self) -> float:
        """Return the clock's time. One that went back makes all void, and lets it ask at once."""
        now_s = self._clock.now_s()
        if now_s < self._clock_s:
            self._batches.clear()
            self._told_s = now_s
            self._again_s = self._wait_s = 0.0
            self._next_trial_s = now_s + _TRIAL_S
        self._clock_s = now_s
        return now_s


def _time_s(told_s: float) -> float:
    return min(max(told_s, 0.0), _LONGEST_S)
