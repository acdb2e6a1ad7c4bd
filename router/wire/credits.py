"""Credits between tiers: who asks and for how much, in request headers; what it gets, as named metrics of a report."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from router.values.credits import Grant, Want
from router.wire.names import DEMAND, INSTANCE

_FIELDS = {"credits_for_s": "for_s", "credits_again_s": "again_s", "credits_wait_s": "wait_s"}
_CREDITS = "credits"
_PREFIX = "credits_"
_MOST = 10**6
_LONGEST_S = 86_400.0
_INSTANCE = re.compile(r"[A-Za-z0-9_-]{8,64}")
_DEMAND = re.compile(r"([0-9]{1,6})(?:;urgent=([0-9]{1,6}))?")


class UnreadableCredits(ValueError):
    """Credits were told, or asked for, and cannot be read. Caught by who reads the report or the headers."""


def grant_metrics(grant: Grant) -> dict[str, float]:
    """Return the named metrics that `read_grant` reads back, to the millisecond."""
    times = {name: round(getattr(grant, field), 3) for name, field in _FIELDS.items()}
    return {_CREDITS: grant.credits, **times}


def read_grant(named: Mapping[str, float]) -> Grant | None:
    """Return the grant among the named metrics of a report, None if it tells of none.

    Raises:
        UnreadableCredits: a part of it is missing, or can not be.
    """
    told = {name for name in named if name == _CREDITS or name.startswith(_PREFIX)}
    if not told:
        return None
    try:
        credits_told = named[_CREDITS]
        times = {field: named[name] for name, field in _FIELDS.items()}
    except KeyError as error:
        raise UnreadableCredits(f"{error.args[0]} is missing") from None
    if not (0 <= credits_told <= _MOST and credits_told == math.floor(credits_told)):
        raise UnreadableCredits(f"credits = {credits_told}")
    for field, value_s in times.items():
        if not 0 <= value_s <= _LONGEST_S:
            raise UnreadableCredits(f"{field} = {value_s}")
    return Grant(int(credits_told), **times)


def asking_headers(instance: str, want: Want) -> list[tuple[str, str]]:
    """Return the headers by which an instance asks."""
    waiting = min(want.waiting, _MOST - 1)
    urgent = min(want.urgent, waiting)
    return [(INSTANCE, instance), (DEMAND, f"{waiting};urgent={urgent}" if urgent else str(waiting))]


def read_instance(headers: Mapping[str, str]) -> str | None:
    """Return which instance sent the request, None if it does not say.

    Raises:
        UnreadableCredits: what it calls itself is no name.
    """
    told = headers.get(INSTANCE)
    if told is not None and not _INSTANCE.fullmatch(told):
        raise UnreadableCredits(f"`{INSTANCE}` must be 8 to 64 letters, digits, `-` or `_`")
    return told


def read_want(headers: Mapping[str, str]) -> Want | None:
    """Return how many requests wait there, None if it does not ask.

    Raises:
        UnreadableCredits: it is no number, or none with `;urgent=`.
    """
    told = headers.get(DEMAND)
    if told is None:
        return None
    found = _DEMAND.fullmatch(told)
    if found is None:
        raise UnreadableCredits(f"`{DEMAND}` must be a number of requests, as in `3` or `3;urgent=1`")
    waiting = int(found[1])
    return Want(waiting, min(int(found[2] or 0), waiting))
