"""Usage where the disk or the clock is not what it should be: what a month has cost is known all the same."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from router.base.clock import MonotonicClock
from router.tenants.database import UsageDatabase
from router.tenants.ledger import Ledger
from router.values.usage import Usage
from tests.support.disks import small_disk

NOVEMBER = 1_795_312_800.0  # 2026-11-22T02:00:00Z
DAY_S = 86_400
KILLED = """
import asyncio, os, sys
from router.base.clock import MonotonicClock
from router.tenants.database import UsageDatabase
from router.tenants.ledger import Ledger
from router.values.usage import Usage

async def main():
    async with Ledger(UsageDatabase(sys.argv[1]), MonotonicClock(), lambda: float(sys.argv[2])) as ledger:
        ledger.add("acme", "", "tiny", Usage(10, 5))
        await ledger.write()
        os._exit(9)  # as a kill does: nothing is closed

asyncio.run(main())
"""


def ledger_of(path: Path, wall: list[float]) -> Ledger:
    return Ledger(UsageDatabase(str(path)), MonotonicClock(), lambda: wall[0])


async def used_before(path: Path, wall: list[float]) -> None:
    async with ledger_of(path, wall) as ledger:
        ledger.add("acme", "", "tiny", Usage(10, 5))


@pytest.mark.process
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("fault", ["full", "read-only"])
async def test_a_month_is_known_on_a_disk_that_takes_nothing(tmp_path: Path, fault: str, killed: bool) -> None:
    wall = [NOVEMBER]
    with small_disk(tmp_path / "disk", "2m") as disk:
        path = disk.folder / "usage.db"
        await used_before(path, wall)
        if killed:
            run = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, str(path), str(wall[0]))
            assert await run.wait() == 9
        others = disk.fill()
        if fault == "read-only":
            disk.remount("ro")
        told = 30 if killed else 15
        async with ledger_of(path, wall) as ledger:
            assert ledger.fault or killed, "which leaves what is needed to read it"
            assert ledger.spent("acme") == told
            ledger.add("acme", "", "tiny", Usage(1, 2))
            await ledger.write()
            assert ledger.spent("acme") == told + 3
            if fault == "read-only":
                disk.remount("rw")
            others.unlink()
            await ledger.write()
            assert (ledger.fault, ledger.unwritten) == ("", 0)
            assert ledger.spent("acme") == (33 if killed else 18), "and nothing was lost"


@pytest.mark.process
async def test_usage_begins_on_a_disk_that_is_read_only(tmp_path: Path) -> None:
    wall = [NOVEMBER]
    with small_disk(tmp_path / "disk", "2m") as disk:
        disk.remount("ro")
        async with ledger_of(disk.folder / "usage.db", wall) as ledger:
            ledger.add("acme", "", "tiny", Usage(1, 2))
            await ledger.write()
            assert ledger.fault
            assert ledger.spent("acme") == 3
            disk.remount("rw")
            await ledger.write()
            assert (ledger.fault, ledger.spent("acme")) == ("", 3)


@pytest.mark.parametrize("kept", [False, True])
async def test_a_clock_that_is_put_right_brings_the_month_back(tmp_path: Path, kept: bool) -> None:
    """Forwards by years and back, as NTP does to a clock that began with garbage."""
    wall = [NOVEMBER]
    database = UsageDatabase(str(tmp_path / "usage.db")) if kept else None
    async with Ledger(database, MonotonicClock(), lambda: wall[0]) as ledger:
        ledger.add("acme", "", "tiny", Usage(10, 5))
        await ledger.write()
        wall[0] += 4_000 * DAY_S
        assert ledger.spent("acme") == 0
        ledger.add("acme", "", "tiny", Usage(1, 1))
        await ledger.write()
        wall[0] -= 4_000 * DAY_S
        ledger.add("acme", "", "tiny", Usage(2, 2))
        await ledger.write()
        assert ledger.spent("acme") == 19
        assert {row.key.day for row in await ledger.report("2026-11-22", "2026-11-22")} == {"2026-11-22"}
        assert ledger.month_ends_s() == 8 * DAY_S + 22 * 3600
