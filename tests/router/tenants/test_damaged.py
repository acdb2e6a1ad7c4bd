"""A database of usage that is damaged: nobody is kept out by it, it is kept, and what can be read of it counts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from router.base.clock import MonotonicClock
from router.tenants.damaged import set_aside
from router.tenants.database import UsageDatabase
from router.tenants.ledger import Ledger
from router.tenants.used import Counts, UsageKey
from router.values.usage import Usage

NOVEMBER = 1_795_312_800.0  # 2026-11-22T02:00:00Z
ROWS = 4_000


def ledger_of(path: Path) -> Ledger:
    return Ledger(UsageDatabase(str(path)), MonotonicClock(), lambda: NOVEMBER)


def filled(path: Path) -> None:
    database = UsageDatabase(str(path))
    database.open()
    keys = [UsageKey(f"tenant-{n:05d}", "", "tiny", "2026-11-21") for n in range(ROWS)]
    database.exchange({key: Counts(1, 10, 0, 5) for key in keys}, "2026-11")
    database.close()


def overwrite(path: Path, at: float, size_bytes: int) -> None:
    """Put noise into a file, at a share of its length."""
    raw = bytearray(path.read_bytes())
    begin = int(at * len(raw)) // 4096 * 4096
    raw[begin : begin + size_bytes] = b"\xa5" * len(raw[begin : begin + size_bytes])
    path.write_bytes(raw)


async def test_a_file_that_is_no_database_is_kept_and_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    path.write_bytes(b"not what it was " * 1000)
    async with ledger_of(path) as ledger:
        assert "usage.db.damaged-1" in ledger.damaged
        assert "0 rows" in ledger.damaged
        ledger.add("acme", "", "tiny", Usage(10, 5))
    assert (tmp_path / "usage.db.damaged-1").read_bytes().startswith(b"not what it was")
    async with ledger_of(path) as ledger:
        assert ledger.spent("acme") == 15
        assert ledger.damaged == ""


@pytest.mark.parametrize("at", [0.2, 0.5, 0.8])
async def test_what_can_be_read_of_a_damaged_file_counts(tmp_path: Path, at: float) -> None:
    path = tmp_path / "usage.db"
    filled(path)
    overwrite(path, at, 3 * 4096)
    async with ledger_of(path) as ledger:
        known = sum(ledger.spent(f"tenant-{n:05d}") == 15 for n in range(ROWS))
        assert known > 0.9 * ROWS
        assert f"{known} rows" in ledger.damaged
        assert str(path) in ledger.damaged
    assert (tmp_path / "usage.db.damaged-1").exists()


async def test_a_file_that_is_damaged_under_a_running_tier_loses_nothing_new(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    filled(path)
    async with ledger_of(path) as ledger:
        ledger.add("acme", "", "tiny", Usage(10, 5))
        await ledger.write()
        with sqlite3.connect(path) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        other.close()
        overwrite(path, 0.0, path.stat().st_size)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        for _ in range(3):
            ledger.add("acme", "", "tiny", Usage(10, 5))
            await ledger.write()
        assert ledger.fault == ""
        assert "usage.db.damaged-1" in ledger.damaged
    async with ledger_of(path) as ledger:
        assert ledger.spent("acme") == 45


def test_one_damaged_file_does_not_take_the_name_of_another(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    for number in (1, 2):
        path.write_text("x")
        path.with_name("usage.db-wal").write_text("y")
        assert set_aside(path).name == f"usage.db.damaged-{number}"
        assert (tmp_path / f"usage.db.damaged-{number}-wal").exists()
