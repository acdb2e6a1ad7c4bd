"""`overspill cloud usage`: what each tenant used, as CSV, from a running tier or from its database."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from urllib.parse import urlencode

import msgspec

from router.base.errors import ConfigError
from router.base.json_input import UNREADABLE
from router.client.tier import TierAddress
from router.tenants.used import Counts, UsageRow, day_of

_COLUMNS = ("day", "tenant", "device", "model")


class _Page(msgspec.Struct):
    rows: list[UsageRow]


def ask_tier(address: TierAddress, since: str, until: str) -> list[UsageRow]:
    """Return what a running tier counted; with a tenant's own key, that tenant's alone.

    Raises:
        ReplicaUnreachable, Unauthenticated: as `TierAddress.get` says; or a day is none.
    """
    query = urlencode({name: day for name, day in (("since", since), ("until", until)) if day})
    reply = address.get(f"/v1/usage?{query}" if query else "/v1/usage")
    if reply.status_code == 400:
        raise ConfigError(str(reply.json()["error"]["message"]))
    if reply.status_code != 200:
        raise address.odd(reply)
    try:
        return msgspec.json.decode(reply.content, type=_Page).rows
    except UNREADABLE:
        raise address.stranger() from None


def read_database(url: str, since: str, until: str) -> list[UsageRow]:
    """Return what stands in the database of a tier, whether that runs or not.

    Raises:
        ConfigError: it cannot be used, holds no usage, or a day is none.
    """
    first, last = _day(since, "--since", "0001-01-01"), _day(until, "--until", "9999-12-31")
    from router.tenants.database import UsageDatabase  # noqa: PLC0415 - only who asks for it pays for SQLAlchemy

    database = UsageDatabase(url)
    database.open(make=False)
    try:
        return database.rows(first, last)
    finally:
        database.close()


def _day(given: str, option: str, default: str) -> str:
    try:
        return day_of(given or default)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def as_csv(rows: Sequence[UsageRow]) -> str:
    """Return a table with a head."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*_COLUMNS, *Counts.__struct_fields__])
    for row in rows:
        table.writerow([*(getattr(row.key, name) for name in _COLUMNS), *msgspec.structs.astuple(row.counts)])
    return text.getvalue()
