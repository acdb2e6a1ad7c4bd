"""The circuit breaker of one endpoint: `closed`, `open`, `half_open`."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable

from router.base.clock import Clock
from router.values.settings import BreakerSettings

_PROBES_TO_CLOSE = 2


class BreakerState(enum.Enum):
    """Closed lets everything through, open nothing, half_open one request at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """State of one endpoint.

    Failures are unreachable or broken replicas. Refusals and client errors are answers: they open nothing, and close
    nothing either. Each failure has a source (`router.dispatch.attempts.blame.source_of`), and each source counts once:
    among the failures in a row, in the window, and for the trial of half_open. One request that is tried again and
    again is one failure.

    Live requests open nothing by themselves, however many fail: their content may be what the replica fails on. They
    raise a suspicion, and a self-test with a prompt of our own (`router.dispatch.probes.self_test`) tells. A live
    success while it runs, or its own, clears the suspicion; only its failure opens the breaker.

    A health probe proves that the endpoint can be reached, not that it can generate. Failing probes count like failures
    in a row, and good ones close the breaker only where failing ones came before: if probes stayed good while live
    requests failed, one live request has to succeed. A live request that succeeds proves both.
    """

    def __init__(
        self,
        endpoint: str,
        settings: BreakerSettings,
        clock: Clock,
        on_change: Callable[[str, BreakerState, str], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.settings = settings
        self.why = ""
        self._clock = clock
        self._on_change = on_change
        self._state = BreakerState.CLOSED
        self._recent: deque[str] = deque()  # the source of each failure, empty for a success
        self._in_a_row: dict[str, None] = {}
        self._anonymous = 0
        self._missed_probes = 0
        self._times_opened = 0
        self._open_until_s = 0.0
        self._trial_out = False
        self._unreachable = False
        self._good_probes = 0
        self._suspected = False
        self._trusted_until_s = -math.inf

    @property
    def unreachable(self) -> bool:
        """Whether a probe has failed since the last good one; the prober has logged that."""
        return self._unreachable

    @property
    def state(self) -> BreakerState:
        """The state now; an open breaker whose time is over is half_open."""
        if self._state is BreakerState.OPEN and self._clock.now_s() >= self._open_until_s:
            self._move(BreakerState.HALF_OPEN)
        return self._state

    @property
    def opens_for_s(self) -> float:
        """Seconds until a trial is let through; 0 unless open."""
        return max(0.0, self._open_until_s - self._clock.now_s()) if self.state is BreakerState.OPEN else 0.0

    def knows(self, source: str) -> bool:
        """Whether a request of this source has failed lately."""
        return source in self._in_a_row or source in self._recent

    def allows(self) -> bool:
        """Whether a request may be sent now."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trial_out)

    def begin(self) -> bool:
        """Note that a request was sent; returns whether it is the one trial of half_open."""
        trial = self.state is BreakerState.HALF_OPEN and not self._trial_out
        self._trial_out = self._trial_out or trial
        return trial

    def abandon(self) -> None:
        """End the trial without a result (refused, cancelled); the next request becomes the trial."""
        self._trial_out = False

    def succeed(self) -> None:
        """Note that a live request was answered in full."""
        self._suspected = False
        self._note("")
        if self.state is BreakerState.CLOSED:
            self._in_a_row.clear()
            self._missed_probes, self._unreachable = 0, False
        elif self.state is BreakerState.HALF_OPEN:
            self._close()

    def fail(self, *, source: str = "", trial: bool = False) -> bool:
        """Note that a live request found the endpoint unreachable or broken.

        Args:
            source: what the failure counts under; each source counts once. Empty counts for itself.
            trial: it was the trial of half_open. Late failures of requests sent before say nothing new.

        Returns:
            Whether the endpoint is suspected now, and was not before: a self-test is to be made, and its result told.
        """
        if not source:
            self._anonymous += 1
            source = f"#{self._anonymous}"
        state, known = self.state, source in self._in_a_row
        half_open = state is BreakerState.HALF_OPEN
        if half_open and trial and known:
            self.abandon()
            return False
        if state is BreakerState.OPEN or (half_open and not trial):
            return False
        if source not in self._recent:
            self._note(source)
        self._in_a_row[source] = None
        settings = self.settings
        bad = sum(map(bool, self._recent))
        often = len(self._recent) >= settings.window and bad >= settings.failure_ratio * len(self._recent)
        in_a_row = len(self._in_a_row) + self._missed_probes
        return (half_open or often or in_a_row >= settings.failures) and self._suspect()

    def _suspect(self) -> bool:
        half_open = self.state is BreakerState.HALF_OPEN
        if self._suspected or (not half_open and self._clock.now_s() < self._trusted_until_s):
            return False
        self._suspected = True
        self._trial_out = half_open  # nobody else is the trial meanwhile
        return True

    def self_test_passed(self) -> None:
        """The endpoint answers a prompt of our own: what failed was the requests' fault. It is trusted for a while."""
        if self._suspected:
            self._trusted_until_s = self._clock.now_s() + self.settings.open_ms / 1e3
            self._close()

    def self_test_failed(self, why: str) -> None:
        """The endpoint fails on a prompt of our own too."""
        if self._suspected:
            self._open(why, unreachable=False)

    def self_test_untold(self) -> None:
        """The self-test was refused or given up; the next failure asks for another one."""
        if self._suspected:
            self._suspected = False
            self.abandon()

    def probe_succeeded(self) -> None:
        """Note that a health probe was answered."""
        state = self.state
        if not self._unreachable:
            return
        if state is BreakerState.CLOSED:
            self._unreachable, self._missed_probes = False, 0
            self._in_a_row.clear()
            return
        self._good_probes += 1
        if state is BreakerState.HALF_OPEN or self._good_probes >= _PROBES_TO_CLOSE:
            self._close()

    def probe_failed(self, why: str) -> None:
        """Note that a health probe was not answered."""
        self._good_probes = 0
        self._unreachable = True
        state = self.state
        if state is BreakerState.OPEN:
            return
        self._missed_probes += 1
        if state is BreakerState.HALF_OPEN or self._missed_probes >= self.settings.failures:
            self._open(why, unreachable=True)

    def _note(self, source: str) -> None:
        self._recent.append(source)
        while len(self._recent) > self.settings.window:
            self._recent.popleft()

    def _open(self, why: str, *, unreachable: bool) -> None:
        open_ms = min(self.settings.max_open_ms, self.settings.open_ms * 2.0**self._times_opened)
        self._times_opened = min(self._times_opened + 1, 30)
        self._open_until_s = self._clock.now_s() + open_ms / 1e3
        self._unreachable = unreachable or self._unreachable
        self._suspected = False
        self._good_probes = 0
        self._trial_out = False
        self._missed_probes = 0
        while len(self._in_a_row) > self.settings.window:  # sources of trials that failed while it stays away
            del self._in_a_row[next(iter(self._in_a_row))]
        self.why = why
        self._move(BreakerState.OPEN)

    def _close(self) -> None:
        self._recent.clear()
        self._in_a_row.clear()
        self._missed_probes = self._times_opened = self._good_probes = 0
        self._trial_out = self._unreachable = self._suspected = False
        self.why = ""
        self._move(BreakerState.CLOSED)

    def _move(self, state: BreakerState) -> None:
        if state is not self._state:
            self._state = state
            if self._on_change is not None:
                self._on_change(self.endpoint, state, self.why)
