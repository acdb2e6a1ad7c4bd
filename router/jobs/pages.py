"""Lists page by page: ids sort by the time of their making, so that the last id of a page begins the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Connection, RowMapping, Select


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list.

    Attributes:
        after: id of the last item of the page before.
        newest_first: otherwise the oldest.
    """

    limit: int
    after: str | None = None
    newest_first: bool = True


def page_of(
    connection: Connection, query: Select[Any], key: Column[str], page: Page
) -> tuple[Sequence[RowMapping], bool]:
    """Return the rows of a page, and whether there are more behind it."""
    if page.after is not None:
        query = query.where(key < page.after if page.newest_first else key > page.after)
    order = key.desc() if page.newest_first else key.asc()
    rows = connection.execute(query.order_by(order).limit(page.limit + 1)).mappings().all()
    return rows[: page.limit], len(rows) > page.limit
