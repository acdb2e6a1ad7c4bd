"""Store and forward on disk: what the device has to say survives a lost broker, `kill -9` and a full disk.

A row leaves only when its PUBACK was seen (`ack`), so each arrives at least once; its idempotency key lets the reader
drop a second copy. Two kinds of rows:

- `state` (such as `reported`): never dropped for room. Rows of one `slot` stand for the same retained value: a newer
  one takes the older one's place, so that state cannot grow without bound.
- `telemetry`: when the bounds are reached the oldest leave first, and are counted.

When the disk fails (full, read-only, damaged), the outbox warns, goes on in memory, and tries the disk again later.
All methods block on the disk: call them from one thread of their own.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import structlog

log = structlog.get_logger("edge_agent.fleet")

Kind = Literal["state", "telemetry"]
_RETRY_DISK_S = 60.0
_MEMORY_ROWS = 1_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS outbox (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    slot TEXT,
    topic TEXT NOT NULL,
    payload BLOB NOT NULL,
    retain INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS outbox_order ON outbox (kind, id);
CREATE UNIQUE INDEX IF NOT EXISTS outbox_slot ON outbox (slot) WHERE slot IS NOT NULL;
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One message to deliver.

    Attributes:
        key: idempotency key; a row with a key that is still waiting is not stored again.
        slot: rows of one slot replace each other, None for rows that all count.
        place: in the queue, given by the outbox.
    """

    key: str
    kind: Kind
    topic: str
    payload: bytes
    retain: bool = False
    slot: str | None = None
    place: int = 0


@dataclass(frozen=True, slots=True)
class OutboxStats:
    """Rows and bytes that wait; telemetry rows dropped for room since the start; whether the disk is out of use."""

    pending: int = 0
    pending_bytes: int = 0
    dropped: int = 0
    in_memory: bool = False


@dataclass(slots=True)
class Outbox:
    """The queue of one device.

    Attributes:
        path: the SQLite file; its folder exists. None keeps everything in memory.
        max_rows, max_bytes: bounds on what waits; `max_bytes` counts payloads.
    """

    path: Path | None
    max_rows: int = 20_000
    max_bytes: int = 64 * 1024 * 1024
    retry_disk_s: float = _RETRY_DISK_S
    dropped: int = 0
    _db: sqlite3.Connection | None = None
    _rows: int = 0
    _bytes: int = 0
    _in_memory: bool = False
    _retry_at_s: float = 0.0
    _left_on_disk: set[str] = field(default_factory=set)
    _acked_in_memory: set[str] = field(default_factory=set)

    def open(self) -> None:
        """Open or create the store; a damaged file is set aside, an unusable disk leads to memory. Never raises."""
        if self.path is None:
            self._fall_to_memory(None)
            return
        try:
            self._use(_connect(self.path))
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                self._fall_to_memory(error)
                return
            self._set_aside(error)

    def close(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def put(self, row: Row) -> bool:
        """Store a row. Returns False when its key is already waiting."""
        self._retry_disk()
        try:
            return self._put(row)
        except sqlite3.Error as error:
            self._fall_to_memory(error)
            return self._put(row)

    def pending(self, limit: int, skip: Iterable[str] = ()) -> list[Row]:
        """Return up to `limit` rows in the order to send: state first, then telemetry, oldest first.

        Args:
            skip: keys of rows already on their way.
        """
        skipped = frozenset(skip)
        try:
            rows = _read(self._open_db(), "ORDER BY kind, id LIMIT ?", limit + len(skipped))
        except sqlite3.Error as error:
            self._fall_to_memory(error)
            rows = _read(self._open_db(), "ORDER BY kind, id LIMIT ?", limit + len(skipped))
        return [row for row in rows if row.key not in skipped][:limit]

    def ack(self, rows: Iterable[Row]) -> None:
        """Take rows out: the broker has them."""
        done = [row.key for row in rows]
        if not done:
            return
        try:
            self._ack(done)
        except sqlite3.Error as error:
            self._fall_to_memory(error)
            self._ack(done)

    def stats(self) -> OutboxStats:
        return OutboxStats(
            pending=self._rows, pending_bytes=self._bytes, dropped=self.dropped, in_memory=self._in_memory
        )

    def _open_db(self) -> sqlite3.Connection:
        if self._db is None:
            raise sqlite3.ProgrammingError("the outbox is not open")
        return self._db

    def _use(self, db: sqlite3.Connection) -> None:
        """Count the rows and bytes of an existing store once; every change keeps the sums afterwards."""
        count, size = db.execute("SELECT count(*), coalesce(sum(length(payload)), 0) FROM outbox").fetchone()
        self._db, self._rows, self._bytes = db, int(count), int(size)

    def _put(self, row: Row) -> bool:
        db = self._open_db()
        max_rows = min(self.max_rows, _MEMORY_ROWS) if self._in_memory else self.max_rows
        rows, size, dropped = self._rows, self._bytes, 0
        with db:  # one transaction: all of it, or nothing after a crash
            if db.execute("SELECT 1 FROM outbox WHERE key = ?", (row.key,)).fetchone():
                return False
            if row.slot is not None:
                before = db.execute("SELECT id, length(payload) FROM outbox WHERE slot = ?", (row.slot,)).fetchone()
                if before is not None:
                    db.execute("DELETE FROM outbox WHERE id = ?", (before[0],))
                    rows, size = rows - 1, size - before[1]
            _insert(db, row)
            rows, size = rows + 1, size + len(row.payload)
            while rows > max_rows or size > self.max_bytes:
                oldest = db.execute(
                    "SELECT id, length(payload) FROM outbox WHERE kind = 'telemetry' ORDER BY id LIMIT 1"
                ).fetchone()
                if oldest is None:
                    break  # only state is left, which is never dropped
                db.execute("DELETE FROM outbox WHERE id = ?", (oldest[0],))
                rows, size, dropped = rows - 1, size - oldest[1], dropped + 1
        self._rows, self._bytes = rows, size
        self._count_dropped(dropped)
        return True

    def _count_dropped(self, dropped: int) -> None:
        if dropped and self.dropped == 0:
            log.warning("the outbox is full: the oldest telemetry is dropped from now on", max_rows=self.max_rows)
        self.dropped += dropped

    def _ack(self, done: list[str]) -> None:
        db = self._open_db()
        rows, size = self._rows, self._bytes
        with db:  # by key: a row that took this one's slot meanwhile has another
            for key in done:
                found = db.execute("SELECT id, length(payload) FROM outbox WHERE key = ?", (key,)).fetchone()
                if found is not None:
                    db.execute("DELETE FROM outbox WHERE id = ?", (found[0],))
                    rows, size = rows - 1, size - found[1]
        self._rows, self._bytes = rows, size
        self._acked_in_memory.update(self._left_on_disk.intersection(done))

    def _fall_to_memory(self, error: sqlite3.Error | None) -> None:
        """Go on in memory with whatever can still be read from the disk."""
        if self._in_memory and error is not None:
            raise error  # memory itself failed: nothing is left to fall to
        saved: list[Row] = []
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.rollback()
            with contextlib.suppress(sqlite3.Error):
                saved = _read(self._db, "ORDER BY kind, id DESC LIMIT ?", _MEMORY_ROWS)
            self.close()
        if error is not None:
            log.warning(
                "the outbox cannot use its disk and goes on in memory: what is not sent before a restart is lost",
                path=str(self.path),
                error=str(error),
                retry_s=self.retry_disk_s,
            )
        self._use(_connect(None))
        self._in_memory = True
        self._acked_in_memory.clear()
        self._left_on_disk = {row.key for row in saved}
        self._retry_at_s = time.monotonic() + self.retry_disk_s
        for row in sorted(saved, key=lambda row: row.place):
            self._put(row)

    def _retry_disk(self) -> None:
        """Move back to the disk when it works again; rows it kept from before stay unless they were sent meanwhile."""
        if not self._in_memory or self.path is None or time.monotonic() < self._retry_at_s:
            return
        self._retry_at_s = time.monotonic() + self.retry_disk_s
        memory = self._open_db()
        rows = _read(memory, "ORDER BY id LIMIT ?", _MEMORY_ROWS + self.max_rows)
        disk: sqlite3.Connection | None = None
        try:
            disk = _connect(self.path)
            with disk:
                disk.executemany("DELETE FROM outbox WHERE key = ?", [(key,) for key in self._acked_in_memory])
                for row in rows:
                    if row.slot is not None:
                        disk.execute("DELETE FROM outbox WHERE slot = ?", (row.slot,))
                    _insert(disk, row)
            self._use(disk)
        except sqlite3.Error as error:
            if disk is not None:
                disk.close()
            if type(error) is sqlite3.DatabaseError and _move_aside(self.path, error):
                self._retry_at_s = 0.0  # it was damaged while it was in use: the next row begins a new one
            return
        memory.close()
        self._in_memory = False
        self._acked_in_memory.clear()
        self._left_on_disk.clear()
        log.info("the outbox is back on its disk", path=str(self.path), rows=len(rows))

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        """Begin a new file in place of a damaged one."""
        path = self._path()
        try:
            if not _move_aside(path, error):
                raise error
            self._use(_connect(path))
        except sqlite3.Error as again:
            self._fall_to_memory(sqlite3.OperationalError(str(again)))

    def _path(self) -> Path:
        if self.path is None:
            raise sqlite3.ProgrammingError("the outbox has no file")
        return self.path


def _move_aside(path: Path, error: sqlite3.DatabaseError) -> bool:
    """Keep a damaged file for the curious (one, the newest); returns whether the disk took that."""
    aside = path.with_name(path.name + ".damaged")
    log.error("the outbox file is damaged; it is set aside", path=str(path), aside=str(aside), error=str(error))
    try:
        path.replace(aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    except OSError as failed:
        log.warning("the damaged outbox file stays where it is", error=str(failed))
        return False
    return True


def _connect(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        with contextlib.suppress(OSError):  # SQLite says what is wrong
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    db = sqlite3.connect(path if path is not None else ":memory:", check_same_thread=False, timeout=5.0)
    try:
        if path is not None:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")  # power cuts are everyday life at the edge
            db.execute("PRAGMA journal_size_limit = 1048576")
            damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                raise sqlite3.DatabaseError(damage)
        db.executescript(_SCHEMA)
    except sqlite3.Error:
        db.close()
        raise
    return db


def _insert(db: sqlite3.Connection, row: Row) -> None:
    db.execute(
        "INSERT OR IGNORE INTO outbox (key, kind, slot, topic, payload, retain) VALUES (?, ?, ?, ?, ?, ?)",
        (row.key, row.kind, row.slot, row.topic, row.payload, int(row.retain)),
    )


def _read(db: sqlite3.Connection, order: str, limit: int) -> list[Row]:
    """Return rows; `order` is one of this module's own clauses, never data."""
    query = f"SELECT id, key, kind, slot, topic, payload, retain FROM outbox {order}"  # noqa: S608
    return [
        Row(key=key, kind=kind, topic=topic, payload=bytes(payload), retain=bool(retain), slot=slot, place=place)
        for place, key, kind, slot, topic, payload, retain in db.execute(query, (limit,))
    ]
