"""The tables, for SQLite and PostgreSQL alike: a column for each field of a record, nullable where that may be None."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_type_hints

from sqlalchemy import BigInteger, Column, Index, LargeBinary, MetaData, Table, Text
from sqlalchemy.types import TypeEngine

from router.jobs.records import Batch, Deferred, Event, Line, StoredFile

SCHEMA = 1
"""Raised when tables change in a way that an older version cannot read."""

METADATA = MetaData()


def _kind(annotation: type) -> TypeEngine[Any]:
    if issubclass(annotation, str):  # statuses too
        return Text()
    return LargeBinary() if annotation is bytes else BigInteger()


def _table(name: str, record: type, *more: Column[Any] | Index, key: tuple[str, ...] = ("id",)) -> Table:
    hints, columns = get_type_hints(record), []
    for field in fields(record):
        present, *nothing = get_args(hints[field.name]) or (hints[field.name],)
        kind, keys = _kind(present), field.name in key
        columns.append(Column(field.name, kind, primary_key=keys, autoincrement=False, nullable=bool(nothing)))
    return Table(name, METADATA, *columns, *more)


FACTS = Table("facts", METADATA, Column("name", Text, primary_key=True), Column("value", Text, nullable=False))

FILES = _table("files", StoredFile, Index("files_of", "owner", "id"))

BATCHES = _table("batches", Batch, Index("batches_of", "owner", "id"), Index("batches_by_status", "status"))

DEFERRED = _table(
    "deferred",
    Deferred,
    Index("deferred_asked", "asked", unique=True),
    Index("deferred_of", "owner", "id"),
    Index("deferred_by_status", "status", "id"),
)
"""`asked` tells one asking from another: who asks again under the same request id gets what is kept already."""

EVENTS = _table("events", Event, Index("events_due", "due_s", "id"))
"""What the webhook has not taken yet; written in the transaction of what it tells."""

LINES = _table("lines", Line, Column("kind", Text), Column("answer", LargeBinary), key=("batch_id", "number"))
"""A line has a `kind` exactly if it was answered; its answer is never written a second time."""
