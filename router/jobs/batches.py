"""Batches and their lines in the database: every step is one transaction, and taking a step twice changes nothing.

An answer is written with its line, where there is none yet, and counted in the same transaction: so each line is
answered exactly once, whatever is killed when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from router.jobs.errors import NoSuchJob
from router.jobs.pages import Page, page_of
from router.jobs.records import ENDED, Batch, BatchStatus, Line, LineAnswer, LineKind, StoredFile
from router.jobs.schema import BATCHES, LINES

_ROWS = 500
_LINE = (LINES.c.batch_id, LINES.c.number, LINES.c.custom_id, LINES.c.at, LINES.c.size, LINES.c.tries)


def add(connection: Connection, batch: Batch) -> None:
    connection.execute(insert(BATCHES).values(**_values(batch)))


def get(connection: Connection, owner: str | None, batch_id: str) -> Batch:
    """Return a batch of this caller; of any, where `owner` is None.

    Raises:
        NoSuchJob: there is none of that id.
    """
    query = select(BATCHES).where(BATCHES.c.id == batch_id)
    rows = connection.execute(query if owner is None else query.where(BATCHES.c.owner == owner))
    row = rows.mappings().first()
    if row is None:
        raise NoSuchJob(f"there is no batch `{batch_id[:64]}` of yours here", param="batch_id")
    return _batch(row)


def list_page(connection: Connection, owner: str | None, page: Page) -> tuple[list[Batch], bool]:
    """Return a page of a caller's batches, of everybody's where that is None, and whether there are more."""
    query = select(BATCHES) if owner is None else select(BATCHES).where(BATCHES.c.owner == owner)
    rows, more = page_of(connection, query, BATCHES.c.id, page)
    return [_batch(row) for row in rows], more


def running(connection: Connection) -> list[Batch]:
    """Return every batch that has not ended, the one that expires first before the others."""
    query = select(BATCHES).where(BATCHES.c.status.not_in([status.value for status in ENDED]))
    rows = connection.execute(query.order_by(BATCHES.c.expires_s, BATCHES.c.id))
    return [_batch(row) for row in rows.mappings()]


def count_running(connection: Connection, owner: str) -> int:
    query = select(func.count()).where(
        BATCHES.c.owner == owner, BATCHES.c.status.not_in([status.value for status in ENDED])
    )
    return int(connection.execute(query).scalar_one())


def move(
    connection: Connection, batch_id: str, now_s: int, to: BatchStatus, *before: BatchStatus, **more: object
) -> bool:
    """Take a step, if the batch still is where it may be taken from; returns whether it was."""
    stamp = {} if to is BatchStatus.VALIDATING else {f"{to.value}_s": now_s}
    step = update(BATCHES).where(BATCHES.c.id == batch_id, BATCHES.c.status.in_([status.value for status in before]))
    return connection.execute(step.values(status=to.value, **stamp, **more)).rowcount == 1


def begin(connection: Connection, batch_id: str, now_s: int, lines: Sequence[Line]) -> bool:
    """Its lines were checked: it may run."""
    if not move(connection, batch_id, now_s, BatchStatus.IN_PROGRESS, BatchStatus.VALIDATING, total=len(lines)):
        return False
    connection.execute(delete(LINES).where(LINES.c.batch_id == batch_id))
    for first in range(0, len(lines), _ROWS):
        connection.execute(insert(LINES), [_line_values(line) for line in lines[first : first + _ROWS]])
    return True


def unanswered(connection: Connection, batch_id: str, after: int, limit: int) -> list[Line]:
    """Return the next lines without an answer, in their order."""
    query = select(*_LINE).where(LINES.c.batch_id == batch_id, LINES.c.number > after, LINES.c.kind.is_(None))
    return [Line(*row) for row in connection.execute(query.order_by(LINES.c.number).limit(limit))]


def commit(connection: Connection, answers: Iterable[LineAnswer]) -> int:
    """Write answers, each with its line and into the counts of its batch; returns how many had none yet.

    An answer to a line that has one, or whose batch takes none any more, is dropped.
    """
    counts: dict[tuple[str, LineKind], int] = {}
    for answer in answers:
        takes = select(BATCHES.c.id).where(
            BATCHES.c.id == answer.batch_id,
            BATCHES.c.status == BatchStatus.IN_PROGRESS.value,
        )
        line = update(LINES).where(
            LINES.c.batch_id == answer.batch_id,
            LINES.c.number == answer.number,
            LINES.c.kind.is_(None),
            LINES.c.batch_id.in_(takes),
        )
        if connection.execute(line.values(kind=answer.kind.value, answer=answer.text)).rowcount == 1:
            key = (answer.batch_id, answer.kind)
            counts[key] = counts.get(key, 0) + 1
    for (batch_id, kind), number in counts.items():
        count = BATCHES.c.completed if kind is LineKind.OUTPUT else BATCHES.c.failed
        connection.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values({count: count + number}))
    return sum(counts.values())


def tried(connection: Connection, line: Line) -> None:
    """Count a failure that may pass."""
    where = (LINES.c.batch_id == line.batch_id, LINES.c.number == line.number)
    connection.execute(update(LINES).where(*where).values(tries=LINES.c.tries + 1))


def answers_after(
    connection: Connection, batch_id: str, kind: LineKind, after: int, limit: int
) -> list[tuple[int, bytes]]:
    """Return the next answers of one kind with the numbers of their lines, in the order of the input."""
    query = select(LINES.c.number, LINES.c.answer).where(
        LINES.c.batch_id == batch_id, LINES.c.number > after, LINES.c.kind == kind.value
    )
    rows = connection.execute(query.order_by(LINES.c.number).limit(limit))
    return [(number, bytes(text)) for number, text in rows]


def end(connection: Connection, batch: Batch, now_s: int, to: BatchStatus, files: dict[LineKind, StoredFile]) -> bool:
    """Its files are kept: nothing but them is needed any more."""
    named = {f"{kind.value}_file_id": file.id for kind, file in files.items()}
    if not move(connection, batch.id, now_s, to, batch.status, **named):
        return False
    connection.execute(delete(LINES).where(LINES.c.batch_id == batch.id))
    return True


def expire(connection: Connection, before_s: float) -> int:
    """Forget batches that ended long ago."""
    over = delete(BATCHES).where(
        BATCHES.c.status.in_([status.value for status in ENDED]), BATCHES.c.created_s <= before_s
    )
    return connection.execute(over).rowcount


def answers_bytes(connection: Connection) -> int:
    """Return what answers take that are in no file yet."""
    held = select(func.coalesce(func.sum(func.length(LINES.c.answer)), 0))
    return int(connection.execute(held).scalar_one())


def _values(batch: Batch) -> dict[str, object]:
    return {**asdict(batch), "status": batch.status.value}


def _line_values(line: Line) -> dict[str, object]:
    return asdict(line)


def _batch(row: RowMapping) -> Batch:
    return Batch(**{**row, "status": BatchStatus(row["status"])})
