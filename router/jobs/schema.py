"""The tables, for SQLite and PostgreSQL alike."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, MetaData, String, Table, Text

SCHEMA = 1
"""Raised when tables change in a way that an older version cannot read."""

METADATA = MetaData()


def _time(name: str) -> Column[int]:
    return Column(name, BigInteger)


FACTS = Table(
    "facts",
    METADATA,
    Column("name", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

FILES = Table(
    "files",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("owner", String(128), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    _time("expires_s"),
    Index("files_of", "owner", "id"),
)

BATCHES = Table(
    "batches",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("owner", String(128), nullable=False),
    Column("status", String(16), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("window", String(16), nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("expires_s", BigInteger, nullable=False),
    Column("labels", Text, nullable=False),
    Column("headers", Text, nullable=False),
    Column("errors", Text, nullable=False),
    _time("keep_output_s"),
    *(
        _time(f"{step}_s")
        for step in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    ),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    *(Column(name, Integer, nullable=False) for name in ("total", "completed", "failed")),
    Index("batches_of", "owner", "id"),
    Index("batches_by_status", "status"),
)

DEFERRED = Table(
    "deferred",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("owner", String(128), nullable=False),
    Column("asked", String(64), unique=True),
    Column("status", String(16), nullable=False),
    Column("path", String(64), nullable=False),
    Column("request_id", String(128), nullable=False),
    Column("headers", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("why", Text, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("expires_s", BigInteger, nullable=False),
    _time("ended_s"),
    Column("tries", Integer, nullable=False),
    Column("status_code", Integer),
    Column("answer", LargeBinary),
    Index("deferred_of", "owner", "id"),
    Index("deferred_by_status", "status", "id"),
)
"""`asked` tells one asking from another: who asks again under the same request id gets what is kept already."""

EVENTS = Table(
    "events",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("created_s", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("due_s", BigInteger, nullable=False),
    Index("events_due", "due_s", "id"),
)
"""What the webhook has not taken yet; written in the transaction of what it tells."""

LINES = Table(
    "lines",
    METADATA,
    Column("batch_id", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("custom_id", Text, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("kind", String(8)),
    Column("answer", LargeBinary),
)
"""A line has a `kind` exactly if it was answered; its answer is never written a second time."""
