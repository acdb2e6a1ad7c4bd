"""Time as a value that can be replaced: durations never come from the wall clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that is due."""

    def cancel(self) -> object:  # futures and tasks are timers too
        """Do not call; nothing once it was called."""
        ...


class Clock(Protocol):
    """A monotonic clock, in seconds since an arbitrary origin."""

    def now_s(self) -> float:
        """Return the current time, in seconds."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Return after `duration_s` seconds of this clock."""
        ...

    def call_at(self, due_s: float, ring: Callable[[], None]) -> Timer:
        """Call `ring` on the running event loop at `due_s` of this clock, or a little before; never at once."""
        ...


# uvloop counts whole milliseconds, and rounds to the nearest: a call that came early waits for at least one.
_LEAST_DELAY_S = 1e-3


class MonotonicClock:
    """The machine's monotonic clock."""

    now_s = staticmethod(time.monotonic)  # the function itself: it is asked some fifty times a request

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)

    def call_at(self, due_s: float, ring: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(max(due_s - self.now_s(), _LEAST_DELAY_S), ring)
