"""Time as a value that can be replaced: durations never come from the wall clock."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock, in seconds since an arbitrary origin."""

    def now_s(self) -> float:
        """Return the current time, in seconds."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Return after `duration_s` seconds of this clock."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
