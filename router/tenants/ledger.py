"""What was used: by tenant, device, model and day. Counted in memory, written to a database by a thread of its own.

Requests never wait for a disk. Each second what is new is added to the rows of a database, and what they say of this
month is read back, so that several tiers may share one database, and one budget. A process that is killed loses the
last second.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import structlog

from router.base.clock import Clock
from router.base.errors import in_words
from router.tenants.used import Counts, UsageKey, UsageRow
from router.values.usage import Usage

log = structlog.get_logger("router.tenants")

_WRITE_EVERY_S = 1.0
_DAY_S = 86_400
T = TypeVar("T")

_MAX_UNWRITTEN = 100_000  # rows kept while a database cannot be written


class UsageStore(Protocol):
    """Where usage is kept. Each call comes from one thread at a time, and may block.

    Attributes:
        damaged: what became of a store that was found damaged; empty where none was.
    """

    damaged: str

    def open(self) -> None: ...

    def close(self) -> None: ...

    def exchange(self, new: Mapping[UsageKey, Counts], month: str) -> Counter[str]:
        """Add what is new; return the tokens of each tenant in a month, such as `2026-11`."""
        ...

    def spent(self, month: str) -> Counter[str] | None:
        """Return the tokens of each tenant in a month, where nothing can be written; None if they cannot be read."""
        ...

    def rows(self, since: str, until: str) -> list[UsageRow]:
        """Return what was used from one day to another, both included."""
        ...


class Ledger:
    """Use as `async with` where there is a database.

    Args:
        wall: seconds since 1970: budgets are for months of a calendar.

    Attributes:
        totals: tenant and model → what was used since the start.
        fault: why the database could not be written; empty where it could.
    """

    def __init__(self, database: UsageStore | None, clock: Clock, wall: Callable[[], float] = time.time) -> None:
        self._database = database
        # Of one thread: what was cancelled meanwhile is over before the next call begins.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="usage")
        self._writing: set[asyncio.Task[None]] = set()
        self._clock = clock
        self._wall = wall
        self._new: dict[UsageKey, Counts] = {}
        self._month = ""
        self._read_month = ""  # of which the database told what was spent
        self._spent: Counter[str] = Counter()
        self._day, self._day_begins_s = "", math.inf
        self.totals: dict[tuple[str, str], Counts] = {}
        self.fault = ""

    @property
    def lasting(self) -> bool:
        """Whether it survives a restart."""
        return self._database is not None

    @property
    def damaged(self) -> str:
        """What became of a database that was found damaged; empty where none was."""
        return "" if self._database is None else self._database.damaged

    @property
    def unwritten(self) -> int:
        return len(self._new)

    def add(self, tenant: str, device: str, model: str, used: Usage, *, requests: int = 1) -> None:
        """Count one answer, or what there was of it; `requests`: 0 for a further choice of one that was counted."""
        self._turn()
        counts = Counts(requests, used.prompt_tokens, used.cached_tokens or 0, used.completion_tokens)
        key = UsageKey(tenant, device, model, self._day)
        present = self._new.get(key)
        if present is None and len(self._new) < _MAX_UNWRITTEN:
            present = self._new[key] = Counts()
        if present is not None:
            present.add(counts)
        self._spent[tenant] += used.total_tokens
        self.totals.setdefault((tenant, model), Counts()).add(counts)

    def spent(self, tenant: str) -> int:
        """Tokens that a tenant used this month."""
        self._turn()
        return self._spent[tenant]

    def month_ends_s(self) -> float:
        """Seconds until the next month begins."""
        today = self._today()
        following = (today.replace(day=1) + dt.timedelta(days=32)).replace(day=1)
        return (following - today).days * _DAY_S - self._wall() % _DAY_S

    async def __aenter__(self) -> Ledger:
        if self._database is not None:
            await self._in_turn(self._database.open)
            self._turn()
            await self.write()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._database is not None:
            if self._writing:  # what one of them could not write is new again
                await asyncio.wait(self._writing)
            await self.write()
            await self._in_turn(self._database.close)
        self._thread.shutdown(wait=False)

    async def keep_writing(self) -> None:
        """Write what is new every second; never returns."""
        while True:
            await self._clock.sleep(_WRITE_EVERY_S)
            if self._database is not None:
                await self.write()

    async def write(self) -> None:
        """Write what is new, and read what is known of this month; a caller that is cancelled leaves it to its end."""
        if self._database is None:
            return
        task = asyncio.create_task(self._write(self._database), name="usage write")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        await asyncio.shield(task)

    async def _write(self, database: UsageStore) -> None:
        self._turn()
        new, self._new, month = self._new, {}, self._month
        try:
            spent = await self._in_turn(lambda: database.exchange(new, month))
        except Exception as error:  # noqa: BLE001 - a database may be away for a while: what is new is kept for it
            for key, counts in new.items():
                self._new.setdefault(key, Counts()).add(counts)
            why = in_words(error).splitlines()[0]  # SQLAlchemy goes on with the statement
            if not self.fault:
                log.warning("usage not written; it is kept and written later", rows=len(self._new), why=why)
            self.fault = why
            if self._read_month != month:
                self._read(await self._in_turn(lambda: database.spent(month)), month)
            return
        if self.fault:
            log.info("usage is written again")
        self.fault = ""
        self._read(spent, month)

    def _read(self, spent: Counter[str] | None, month: str) -> None:
        """Take what the database holds of a month for what was spent, with what it does not hold yet."""
        if spent is not None and month == self._month:
            self._read_month = month
            self._spent = spent + _spent_in(month, self._new)

    async def report(self, since: str, until: str) -> list[UsageRow]:
        """Return what was used from one day to another, both included; without a database, since the start."""
        database = self._database
        if database is not None:
            await self.write()
            return await self._in_turn(lambda: database.rows(since, until))
        return [
            UsageRow(key, counts) for key, counts in sorted(self._new.items(), key=_order) if since <= key.day <= until
        ]

    async def _in_turn(self, call: Callable[[], T]) -> T:
        """Call the database when all calls before have ended."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _today(self) -> dt.date:
        return dt.datetime.fromtimestamp(self._wall(), dt.timezone.utc).date()

    def _turn(self) -> None:
        """Begin another day, and perhaps another month; an earlier one where the clock was wrong and is put right."""
        now_s = self._wall()
        if 0 <= now_s - self._day_begins_s < _DAY_S:
            return
        self._day = self._today().isoformat()
        self._day_begins_s = now_s - now_s % _DAY_S
        if self._day[:7] != self._month:
            self._month = self._day[:7]
            self._spent = _spent_in(self._month, self._new)


def _spent_in(month: str, used: Mapping[UsageKey, Counts]) -> Counter[str]:
    """Return the tokens of each tenant in a month."""
    spent: Counter[str] = Counter()
    for key, counts in used.items():
        if key.day.startswith(month):
            spent[key.tenant] += counts.prompt_tokens + counts.completion_tokens
    return spent


def _order(item: tuple[UsageKey, Counts]) -> tuple[str, str, str, str]:
    key = item[0]
    return key.day, key.tenant, key.device, key.model
