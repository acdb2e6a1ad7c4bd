"""Unix time for what is kept, going on evenly where the system's clock leaps.

A device whose clock has no battery starts in the past, and NTP puts it right when the link is back: just then what was
deferred meanwhile must not be late. So time here follows the machine's own, and takes over a leap of the system's clock
together with all that was kept since the machine started: who has an hour left has an hour left.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from sqlalchemy import Connection, Table, update

from router.base.clock import Clock
from router.jobs.database import Database
from router.jobs.errors import StorageFailed
from router.jobs.schema import BATCHES, DEFERRED, EVENTS, FILES

log = structlog.get_logger("router.jobs")

_LOOK_S = 1.0
_DRIFT_S = 30.0  # what a clock that is slowly put right gets away with

_TIMES: tuple[tuple[Table, tuple[str, ...]], ...] = (
    (FILES, ("created_s", "expires_s")),
    (
        BATCHES,
        (
            *("created_s", "expires_s", "in_progress_s", "finalizing_s", "completed_s"),
            *("failed_s", "expired_s", "cancelling_s", "cancelled_s"),
        ),
    ),
    (DEFERRED, ("created_s", "expires_s", "ended_s")),
    (EVENTS, ("created_s", "due_s")),
)


def since_boot_s() -> float:
    """Return for how long the machine has been up, in seconds, its sleep included where the system tells that."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


class Calendar:
    """Tells the time; `follow` takes over leaps.

    Args:
        wall_s: Unix time of the system, in seconds.
        since_boot_s: seconds that pass evenly.
    """

    def __init__(
        self, wall_s: Callable[[], float] = time.time, since_boot_s: Callable[[], float] = since_boot_s
    ) -> None:
        self._wall_s = wall_s
        self._since_boot_s = since_boot_s
        self._booted_s = wall_s() - since_boot_s()

    def now_s(self) -> float:
        """Return Unix time, in seconds."""
        return self._booted_s + self._since_boot_s()

    async def follow(self, database: Database, clock: Clock, leapt: Callable[[], None]) -> None:
        """Take over each leap of the system's clock; never returns.

        Args:
            leapt: called after each: whoever keeps a time that was read before has to read it again.
        """
        while True:
            leap_s = self._wall_s() - self.now_s()
            if abs(leap_s) <= _DRIFT_S:
                self._booted_s += leap_s
            elif await self._leap(database, leap_s):
                log.warning("the system's clock leapt, and what jobs keep with it", by_s=round(leap_s, 1))
                leapt()
            await clock.sleep(_LOOK_S)

    async def _leap(self, database: Database, leap_s: float) -> bool:
        """Move all that was kept since the machine started; returns whether the database took it."""
        before_s, leap_s = self._booted_s, round(leap_s)

        def move(connection: Connection) -> None:
            for table, names in _TIMES:
                moved = {name: table.c[name] + leap_s for name in names}
                kept = table.c.created_s.between(int(before_s), int(self.now_s()) + 1)
                connection.execute(update(table).where(kept).values(moved))
            self._booted_s = before_s + leap_s  # here, before anything else asks for what is late

        try:
            await database.run(move)
        except StorageFailed:  # told by those who ask it for more than that
            self._booted_s = before_s
            return False
        except Exception:  # the task's boundary: it is tried again
            log.exception("what jobs keep does not follow the clock")
            self._booted_s = before_s
            return False
        return True
