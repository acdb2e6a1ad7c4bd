"""A database of usage that is damaged: nobody is kept out by it, it is kept, and what can be read of it counts."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from router.base.clock import MonotonicClock
from router.base.errors import ConfigError
from router.tenants.damaged import set_aside
from router.tenants.database import UsageDatabase
from router.tenants.ledger import Ledger
from router.tenants.used import Counts, UsageKey
from router.values.usage import Usage

NOVEMBER = 1_795_312_800.0  # 2026-11-22T02:00:00Z
ROWS = 4_000
FEW = 40
HEADER = b"SQLite format 3\0"


def ledger_of(path: Path) -> Ledger:
    return Ledger(UsageDatabase(str(path)), MonotonicClock(), lambda: NOVEMBER)


def filled(path: Path, rows: int = ROWS) -> None:
    database = UsageDatabase(str(path))
    database.open()
    keys = [UsageKey(f"tenant-{n:05d}", "", "tiny", "2026-11-21") for n in range(rows)]
    database.exchange({key: Counts(1, 10, 0, 5) for key in keys}, "2026-11")
    database.close()


def overwrite(path: Path, at: float, size_bytes: int) -> None:
    """Put noise into a file, at a share of its length."""
    raw = bytearray(path.read_bytes())
    begin = int(at * len(raw)) // 4096 * 4096
    raw[begin : begin + size_bytes] = b"\xa5" * len(raw[begin : begin + size_bytes])
    path.write_bytes(raw)


@pytest.mark.parametrize("left", [HEADER + b"not what it was " * 1000, bytes(5000)])
async def test_a_file_of_which_nothing_can_be_read_is_kept_and_begun_anew(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "usage.db"
    path.write_bytes(left)
    async with ledger_of(path) as ledger:
        assert "usage.db.damaged-1" in ledger.damaged
        assert "0 rows" in ledger.damaged
        ledger.add("acme", "", "tiny", Usage(10, 5))
    assert (tmp_path / "usage.db.damaged-1").read_bytes() == left
    async with ledger_of(path) as ledger:
        assert ledger.spent("acme") == 15
        assert ledger.damaged == ""


@pytest.mark.parametrize(
    "content", [b"no", b"[tenants.acme]\nkeys = []\n", b"127.0.0.1 localhost\n" * 500, bytes(2_000_000) + b"a disk"]
)
@pytest.mark.parametrize("make", [True, False])
def test_a_file_that_was_never_a_database_stays_where_it_is(tmp_path: Path, content: bytes, make: bool) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tenants\.database: .*keys\.toml is a file.*; name another file, or move"):
        UsageDatabase(str(path)).open(make=make)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["keys.toml"]


async def test_a_foreign_file_that_takes_the_place_of_a_database_stays_there(tmp_path: Path) -> None:
    path, other = tmp_path / "usage.db", tmp_path / "letter.txt"
    async with ledger_of(path) as ledger:
        other.write_text("Dear Sir, " * 1000)
        other.replace(path)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        for _ in range(3):
            ledger.add("acme", "", "tiny", Usage(10, 5))
            await ledger.write()
        assert "not a database" in ledger.fault
        assert ledger.spent("acme") == 45
        assert path.read_text().startswith("Dear Sir")
    assert not (tmp_path / "usage.db.damaged-1").exists()


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


# ── a file that is gone, replaced or empty ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("names", [["usage.db"], ["usage.db", "usage.db-wal", "usage.db-shm"]])
async def test_a_file_that_is_deleted_under_a_running_tier_is_written_anew(tmp_path: Path, names: list[str]) -> None:
    path = tmp_path / "usage.db"
    filled(path, FEW)
    async with ledger_of(path) as ledger:
        for name in names:
            (tmp_path / name).unlink()
        ledger.add("tenant-00007", "", "tiny", Usage(10, 5))
        await ledger.write()
        assert (ledger.fault, ledger.spent("tenant-00007")) == ("", 30)
        assert "was deleted" in ledger.damaged
        assert f"{FEW} rows" in ledger.damaged
    async with ledger_of(path) as ledger:
        assert sum(ledger.spent(f"tenant-{n:05d}") == 15 for n in range(FEW)) == FEW - 1
        assert (ledger.spent("tenant-00007"), ledger.damaged) == (30, "")


async def test_where_a_deleted_file_cannot_be_written_anew_that_is_told_and_counting_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    filled(folder / "usage.db", FEW)
    async with ledger_of(folder / "usage.db") as ledger:
        shutil.rmtree(folder)
        for _ in range(2):
            ledger.add("tenant-00007", "", "tiny", Usage(10, 5))
            await ledger.write()
        assert "was deleted" in ledger.fault
        assert ledger.spent("tenant-00007") == 45
        folder.mkdir()
        await ledger.write()
        assert (ledger.fault, ledger.spent("tenant-00007")) == ("", 45)
    async with ledger_of(folder / "usage.db") as ledger:
        assert (ledger.spent("tenant-00007"), ledger.spent("tenant-00001")) == (45, 15)


async def test_a_file_that_takes_the_place_of_another_is_told_and_counts(tmp_path: Path) -> None:
    path, other = tmp_path / "usage.db", tmp_path / "restored.db"
    filled(other, FEW)
    async with ledger_of(path) as ledger:
        ledger.add("acme", "", "tiny", Usage(10, 5))
        await ledger.write()
        for name in ("usage.db-wal", "usage.db-shm"):
            (tmp_path / name).unlink()
        other.replace(path)
        ledger.add("tenant-00007", "", "tiny", Usage(10, 5))
        await ledger.write()
        assert (ledger.fault, ledger.spent("tenant-00007"), ledger.spent("acme")) == ("", 30, 0)
        assert "was replaced" in ledger.damaged


async def test_an_empty_file_is_told_as_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    filled(path, FEW)
    path.write_bytes(b"")
    async with ledger_of(path) as ledger:
        assert "0 bytes" in ledger.damaged
        ledger.add("acme", "", "tiny", Usage(10, 5))
    async with ledger_of(path) as ledger:
        assert (ledger.spent("acme"), ledger.damaged) == (15, "")


async def test_a_file_that_is_emptied_under_a_running_tier_is_told(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    filled(path, FEW)
    async with ledger_of(path) as ledger:
        os.truncate(path, 0)
        for _ in range(3):
            ledger.add("acme", "", "tiny", Usage(10, 5))
            await ledger.write()
        assert (ledger.fault, "0 bytes" in ledger.damaged) == ("", True)
    async with ledger_of(path) as ledger:
        assert ledger.spent("acme") == 45


async def test_a_tier_that_starts_for_the_first_time_has_nothing_to_tell(tmp_path: Path) -> None:
    async with ledger_of(tmp_path / "usage.db") as ledger:
        assert ledger.damaged == ""
