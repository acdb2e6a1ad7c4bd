"""When an upstream is polled next: spread over a fleet, sooner where a request waits for a credit, later when lost.

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


class PollSchedule:
    """The pauses between the polls of one upstream.

    Args:
        interval_s: between two polls while nothing happens.
        draw: by which the instances of a fleet differ.

    Attributes:
        soonest_s: least time between two polls.
    """

    def __init__(self, interval_s: float, clock: Clock, account: CreditAccount, draw: random.Random) -> None:
        self.soonest_s = interval_s * _SOONEST
        self._interval_s = interval_s
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
        if confirming:
            return self.soonest_s
        now_s = self._clock.now_s()
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
        return max(pause_s * self._draw.uniform(*_JITTER), self.soonest_s)

    def wants_poll(self) -> bool:
        """Whether a request that begins to wait is reason to ask now: it needs a credit, and has no turn yet."""
        return self._account.available() == 0 and not self._account.in_line
