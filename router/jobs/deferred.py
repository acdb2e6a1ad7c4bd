"""Deferred requests in the database: kept once, answered once, whatever is killed when."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from router.jobs.errors import NoSuchJob, QuotaReached
from router.jobs.pages import Page, page_of
from router.jobs.records import Deferred, DeferredStatus
from router.jobs.schema import DEFERRED

_RETRY_S = 60.0
_MOST_PAGE_BYTES = 8_000_000


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits, without what it asks: that may be megabytes."""

    id: str
    owner: str


def asking(owner: str, request_id: str, path: str, body: bytes) -> str:
    """Return what tells one asking from another: the same request under the same id is one, however often it comes."""
    digest = hashlib.sha256()
    for part in (owner.encode(), request_id.encode(), path.encode(), body):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def find(connection: Connection, asked: str) -> Deferred | None:
    """Return what is kept of an asking."""
    row = connection.execute(select(DEFERRED).where(DEFERRED.c.asked == asked)).mappings().first()
    return None if row is None else _deferred(row)


def add(connection: Connection, deferred: Deferred, most: int) -> Deferred:
    """Keep a request; if its asking is kept already, return that.

    Raises:
        QuotaReached: so many are kept, or the caller keeps nine tenths of so many: the rest is for others.
    """
    kept = None if deferred.asked is None else find(connection, deferred.asked)
    if kept is not None:
        return kept
    every = select(func.count()).select_from(DEFERRED)
    if int(connection.execute(every).scalar_one()) >= most:
        raise QuotaReached(f"{most} deferred requests are kept here, the most", retry_after_s=_RETRY_S)
    mine = most - most // 10
    if int(connection.execute(every.where(DEFERRED.c.owner == deferred.owner)).scalar_one()) >= mine:
        raise QuotaReached(
            f"{mine} deferred requests of yours are kept here, the most of one caller", retry_after_s=_RETRY_S
        )
    connection.execute(insert(DEFERRED).values(**{**asdict(deferred), "status": deferred.status.value}))
    return deferred


def get(connection: Connection, owner: str, deferred_id: str) -> Deferred:
    """Return a deferred request of this caller.

    Raises:
        NoSuchJob: there is none of that id.
    """
    query = select(DEFERRED).where(DEFERRED.c.id == deferred_id, DEFERRED.c.owner == owner)
    row = connection.execute(query).mappings().first()
    if row is None:
        raise NoSuchJob(f"there is no deferred request `{deferred_id[:64]}` of yours here", param="deferred_id")
    return _deferred(row)


def list_page(connection: Connection, owner: str, page: Page) -> tuple[list[Deferred], bool]:
    """Return a page of a caller's deferred requests, without what they ask, and whether there are more.

    It is cut short where their answers would take much memory together.
    """
    size = func.coalesce(func.length(DEFERRED.c.answer), 0).label("size")
    rows, more = page_of(connection, select(DEFERRED.c.id, size).where(DEFERRED.c.owner == owner), DEFERRED.c.id, page)
    taken = list(accumulate(row["size"] for row in rows))
    fitting = max(1, bisect_right(taken, _MOST_PAGE_BYTES))
    ids = [row["id"] for row in rows[:fitting]]
    shown = [column for column in DEFERRED.c if column.name != "body"]
    found = {row["id"]: row for row in connection.execute(select(*shown).where(DEFERRED.c.id.in_(ids))).mappings()}
    return [_deferred({**found[name], "body": b""}) for name in ids], more or fitting < len(rows)


def queued(connection: Connection, each: int) -> list[Waiting]:
    """Return those that wait: callers by turns, of one the oldest first and no more than `each`."""
    turn = func.row_number().over(partition_by=DEFERRED.c.owner, order_by=DEFERRED.c.id).label("turn")
    waits = select(DEFERRED.c.id, DEFERRED.c.owner, turn).where(DEFERRED.c.status == DeferredStatus.QUEUED.value)
    inner = waits.subquery()
    query = select(inner.c.id, inner.c.owner).where(inner.c.turn <= each).order_by(inner.c.turn, inner.c.id)
    return [Waiting(*row) for row in connection.execute(query)]


def end(
    connection: Connection, deferred_id: str, to: DeferredStatus, now_s: int, reply: tuple[int, bytes] | None = None
) -> bool:
    """Answer or give up one that waits; returns whether it still did.

    Args:
        reply: HTTP status and body.
    """
    status, body = reply or (None, None)
    step = update(DEFERRED).where(DEFERRED.c.id == deferred_id, DEFERRED.c.status == DeferredStatus.QUEUED.value)
    ended = step.values(status=to.value, ended_s=now_s, status_code=status, answer=body)
    return connection.execute(ended).rowcount == 1


def tried(connection: Connection, deferred_id: str) -> None:
    """Count a failure that may pass."""
    connection.execute(update(DEFERRED).where(DEFERRED.c.id == deferred_id).values(tries=DEFERRED.c.tries + 1))


def remove(connection: Connection, owner: str, deferred_id: str) -> None:
    """Forget one of this caller: what waits is then not answered.

    Raises:
        NoSuchJob: there is none of that id.
    """
    get(connection, owner, deferred_id)
    connection.execute(delete(DEFERRED).where(DEFERRED.c.id == deferred_id))


def late(connection: Connection, now_s: float) -> list[Waiting]:
    """Return those that wait and are to be given up."""
    waits = (DEFERRED.c.status == DeferredStatus.QUEUED.value, DEFERRED.c.expires_s <= now_s)
    return [Waiting(*row) for row in connection.execute(select(DEFERRED.c.id, DEFERRED.c.owner).where(*waits))]


def forget(connection: Connection, ended_before_s: float) -> None:
    """Forget those that ended long ago."""
    connection.execute(delete(DEFERRED).where(DEFERRED.c.ended_s <= ended_before_s))


def count(connection: Connection) -> int:
    """How many wait."""
    return int(
        connection.execute(select(func.count()).where(DEFERRED.c.status == DeferredStatus.QUEUED.value)).scalar_one()
    )


def held_bytes(connection: Connection, owner: str | None = None) -> int:
    """What they take: those of one caller, or of all."""
    size = func.length(DEFERRED.c.body) + func.coalesce(func.length(DEFERRED.c.answer), 0)
    held = select(func.coalesce(func.sum(size), 0))
    return int(connection.execute(held if owner is None else held.where(DEFERRED.c.owner == owner)).scalar_one())


def _deferred(row: Mapping[str, Any] | RowMapping) -> Deferred:
    return Deferred(**{**row, "status": DeferredStatus(row["status"])})
