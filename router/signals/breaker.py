"""One circuit breaker an endpoint: `closed`, `open`, `half_open`. An upstream that fails is left alone for a while."""

from __future__ import annotations

import enum
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
    nothing either.

    A health probe proves that the endpoint can be reached, not that it can generate. So a failing probe opens the
    breaker, and a good one closes it only where a failing probe came before: if probes stayed good while live requests
    failed, one live request has to succeed.
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
        self._recent: deque[bool] = deque()
        self._consecutive = 0
        self._times_opened = 0
        self._open_until_s = 0.0
        self._trial_out = False
        self._unreachable = False
        self._good_probes = 0

    @property
    def unreachable(self) -> bool:
        """A probe has failed since a good one: whoever probes knows, and has said so."""
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

    def allows(self) -> bool:
        """Whether a request may be sent now."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trial_out)

    def begin(self) -> bool:
        """A request is on its way; returns whether it is the trial of half_open, which no second one joins."""
        trial = self.state is BreakerState.HALF_OPEN and not self._trial_out
        self._trial_out = self._trial_out or trial
        return trial

    def abandon(self) -> None:
        """The trial ended without a verdict (refused, cancelled): the next request may try."""
        self._trial_out = False

    def succeed(self) -> None:
        """A live request got what it asked for."""
        self._note(good=True)
        self._consecutive = 0
        if self.state is BreakerState.HALF_OPEN:
            self._close()

    def fail(self, why: str, *, trial: bool = False) -> None:
        """A live request found the endpoint unreachable or broken.

        Args:
            trial: it was the trial of half_open. Late failures of requests sent before say nothing new.
        """
        self._note(good=False)
        self._consecutive += 1
        state = self.state
        settings = self.settings
        bad = self._recent.count(False)
        often = len(self._recent) >= settings.window and bad >= settings.failure_ratio * len(self._recent)
        enough = self._consecutive >= settings.failures or often
        if (state is BreakerState.CLOSED and enough) or (state is BreakerState.HALF_OPEN and trial):
            self._open(why, unreachable=False)

    def probe_succeeded(self) -> None:
        """A health probe was answered."""
        state = self.state
        if not self._unreachable:
            return
        if state is BreakerState.CLOSED:
            self._unreachable, self._consecutive = False, 0
            return
        self._good_probes += 1
        if state is BreakerState.HALF_OPEN or self._good_probes >= _PROBES_TO_CLOSE:
            self._close()

    def probe_failed(self, why: str) -> None:
        """A health probe was not answered."""
        self._good_probes = 0
        self._unreachable = True
        state = self.state
        if state is BreakerState.OPEN:
            return
        self._consecutive += 1
        if state is BreakerState.HALF_OPEN or self._consecutive >= self.settings.failures:
            self._open(why, unreachable=True)

    def _note(self, *, good: bool) -> None:
        self._recent.append(good)
        while len(self._recent) > self.settings.window:
            self._recent.popleft()

    def _open(self, why: str, *, unreachable: bool) -> None:
        open_ms = min(self.settings.max_open_ms, self.settings.open_ms * 2.0**self._times_opened)
        self._times_opened = min(self._times_opened + 1, 30)
        self._open_until_s = self._clock.now_s() + open_ms / 1e3
        self._unreachable = unreachable or self._unreachable
        self._good_probes = 0
        self._trial_out = False
        self.why = why
        self._move(BreakerState.OPEN)

    def _close(self) -> None:
        self._recent.clear()
        self._consecutive = self._times_opened = self._good_probes = 0
        self._trial_out = self._unreachable = False
        self.why = ""
        self._move(BreakerState.CLOSED)

    def _move(self, state: BreakerState) -> None:
        if state is not self._state:
            self._state = state
            if self._on_change is not None:
                self._on_change(self.endpoint, state, self.why)
