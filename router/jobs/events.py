"""Events for the webhook, in the database until it has taken them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import orjson
from sqlalchemy import Connection, delete, insert, or_, select, update

from router.jobs.records import Event, new_id
from router.jobs.schema import EVENTS


def add(connection: Connection, kind: str, data: dict[str, Any], now_s: float) -> None:
    """Add an event, in the transaction of what it tells of."""
    event_id = new_id("evt_", now_s)
    told = {"id": event_id, "object": "event", "created_at": int(now_s), "type": kind, "data": data}
    event = Event(event_id, int(now_s), orjson.dumps(told), 0, int(now_s))
    connection.execute(insert(EVENTS).values(**asdict(event)))


def due(
    connection: Connection,
    now_s: float,
    most_wait_s: float,
    limit: int,
    *,
    is_new: bool | None = None,
    but: Sequence[str] = (),
) -> list[Event]:
    """Return those to be sent now, the oldest first.

    Args:
        most_wait_s: what is due later than that was put off while the clock was wrong, and is due.
        is_new: those that were not tried yet, or those that failed; None: either.
        but: ids of those that are on their way.
    """
    is_due = or_(EVENTS.c.due_s <= now_s, EVENTS.c.due_s > now_s + most_wait_s + 1)
    query = select(EVENTS).where(is_due, EVENTS.c.id.not_in(but)).order_by(EVENTS.c.id).limit(limit)
    if is_new is not None:
        query = query.where(EVENTS.c.tries == 0 if is_new else EVENTS.c.tries > 0)
    return [Event(**row) for row in connection.execute(query).mappings()]


def taken(connection: Connection, event_id: str) -> None:
    """The webhook has it."""
    connection.execute(delete(EVENTS).where(EVENTS.c.id == event_id))


def put_off(connection: Connection, event_id: str, due_s: float) -> None:
    """It could not be told."""
    step = update(EVENTS).where(EVENTS.c.id == event_id)
    connection.execute(step.values(tries=EVENTS.c.tries + 1, due_s=int(due_s)))


def forget(connection: Connection, created_before_s: float) -> int:
    """Give up those that nobody took for too long; returns how many."""
    return connection.execute(delete(EVENTS).where(EVENTS.c.created_s <= created_before_s)).rowcount
