"""A damaged file of SQLite: what can be read of a table, and the file under another name."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

_DAMAGED = re.compile("malformed|not a database|file is encrypted", re.IGNORECASE)  # as SQLite words it
_HEADER = b"SQLite format 3\0"
_CHUNK_BYTES = 1 << 20
_WITH_IT = ("", "-wal", "-shm")  # what was written last stands in its log of changes


def tells_damage(error: object) -> bool:
    """Whether an error says that the file is none that SQLite can go on with."""
    return _DAMAGED.search(str(error)) is not None


def is_foreign(path: Path) -> bool:
    """Whether a file was never SQLite's: it neither begins as one does, nor is what a lost machine leaves of one.

    What it leaves is an empty file, or one of zeros alone.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        chunk = file.read(_CHUNK_BYTES)
        if chunk.startswith(_HEADER):
            return False
        while chunk:
            if chunk.count(0) < len(chunk):
                return True
            chunk = file.read(_CHUNK_BYTES)
    return False


def readable_rows(path: Path, table: str, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the rows of a table that can still be read: from its begin to the damage, and from its end to it."""
    found: dict[int, tuple[Any, ...]] = {}
    for order in ("ASC", "DESC"):
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as damaged,
        ):
            damaged.text_factory = lambda raw: raw.decode("utf-8", "replace")
            # NOT INDEXED: where the index is damaged, the rows may be whole.
            named = ", ".join(columns)
            for row_id, *row in damaged.execute(
                f"SELECT rowid, {named} FROM {table} NOT INDEXED ORDER BY rowid {order}"  # noqa: S608 - names of ours
            ):
                if order == "DESC" and row_id in found:
                    break
                found[row_id] = tuple(row)
    return list(found.values())


def set_aside(path: Path) -> Path:
    """Give the file and its log of changes another name, which no other file has; returns it.

    Raises:
        OSError: the folder does not take that.
    """
    numbered = (path.with_name(f"{path.name}.damaged-{number}") for number in count(1))
    aside = next(name for name in numbered if not name.exists())
    for suffix in _WITH_IT:
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside
