"""When an upstream is polled next: spread over a fleet, sooner where a request waits for a credit, later when lost.

Where nothing is asked of it polls may come further apart: on a metered link one a second is gigabytes a month. Whoever
then asks brings the next one forward.

All devices of a site lose their link at the same moment, and find it again at the same moment. Polls of a lost upstream
are therefore the further apart the longer it has been away, and every pause is drawn at random.
"""

from __future__ import annotations

import random

from router.base.clock import Clock
from router.signals.credit_account import CreditAccount

_JITTER = (0.9, 1.1)
_LOST_JITTER = (0.5, 1.5)
_LOST_SHARE = 0.1  # of the time since it was lost
_LOST_MOST_S = 10.0
_SOONEST = 0.1  # of the usual interval: not more often, whatever happens
_RESTS_AFTER_S = 60.0  # in which nothing ran there, nor waited


class PollSchedule:
    """The pauses between the polls of one upstream.

    Args:
        interval_s: between two polls while it is used.
        draw: by which the instances of a fleet differ.
        idle_interval_s: between two polls once it was not used for a minute; `interval_s` where that is longer.

    Attributes:
        soonest_s: least time between two polls.
        resting: the next poll is as far off as it is because nobody uses it: a request brings it forward.
    """

    def __init__(
        self, interval_s: float, clock: Clock, account: CreditAccount, draw: random.Random, idle_interval_s: float = 0.0
    ) -> None:
        self.soonest_s = interval_s * _SOONEST
        self.resting = False
        self._interval_s = interval_s
        self._idle_interval_s = max(interval_s, idle_interval_s)
        self._used_s = clock.now_s()
        self._clock = clock
        self._account = account
        self._draw = draw
        self._lost_at_s: float | None = None

    def pause_s(self, *, reachable: bool, busy: bool = False, confirming: bool = False) -> float:
        """Return how long to wait now before the next poll.

        Args:
            busy: requests run there or wait without a turn, or a probe has just failed: news is needed soon.
            confirming: it has just refused a connection, and a few probes more decide that it is lost.
        """
        self.resting = False
        if confirming:
            return self.soonest_s
        now_s = self._clock.now_s()
        if busy or not reachable:
            self._used_s = now_s
        if not reachable:
            self._lost_at_s = now_s if self._lost_at_s is None else min(self._lost_at_s, now_s)
            away_s = min(_LOST_SHARE * (now_s - self._lost_at_s), _LOST_MOST_S)
            return max(self._interval_s, away_s) * self._draw.uniform(*_LOST_JITTER)
        self._lost_at_s = None
        pause_s = self._account.ask_in_s()
        if not self._account.in_line:
            pause_s = max(self._interval_s, pause_s)
        if busy:
            pause_s = min(self._interval_s, pause_s)
        elif not self._account.in_line and now_s - self._used_s >= _RESTS_AFTER_S:
            self.resting = self._idle_interval_s > max(self._interval_s, pause_s)
            pause_s = max(self._idle_interval_s, pause_s)
        return max(pause_s * self._draw.uniform(*_JITTER), self.soonest_s)

    def wants_poll(self) -> bool:
        """Whether a request that begins to wait is reason to ask now: it needs a credit, and has no turn yet."""
        return self.used() or (self._account.available() == 0 and not self._account.in_line)

    def used(self) -> bool:
        """A request goes there, or waits: return whether that is reason to ask now, as polls had become rare."""
        self._used_s = self._clock.now_s()
        return self.resting
