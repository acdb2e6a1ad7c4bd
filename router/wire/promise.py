"""The promise of a request, as its headers say it: read into an `Objective`, and written for the next tier.

A promise that does not parse is an `InvalidRequest` that names its header: one that was asked for and silently dropped
is worse than a refusal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from router.base.errors import InvalidRequest
from router.values.request import SLACK_PRIORITY, Locality, Objective
from router.wire.headers import refuse_unreadable, whole_number
from router.wire.names import (
    DEADLINE,
    DEFER,
    LATE_VALUE,
    LOCALITY,
    MIN_QUALITY,
    PRIORITY,
    SESSION,
    SHORTEN,
    TPOT,
    TPOT_NAMES,
    TTFT,
    TTFT_NAMES,
    header_safe,
)

_ALLOW = "allow"
_MAX_MS = 7 * 24 * 3600 * 1000.0
_MAX_PRIORITY = 2**31 - 1
_NUMBER = re.compile(r"([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})(e[+-]?[0-9]{1,3})?", re.IGNORECASE)
_SESSION = re.compile(r"[\x20-\x7e]{1,256}")


def parse_objective(headers: Mapping[str, str], default: Objective) -> Objective:
    """Lay the request's headers over what its body asked for.

    Args:
        headers: lower-case names.

    Raises:
        InvalidRequest: a header holds a value out of range or is none of ours; `param` is the header's name.
    """
    refuse_unreadable(headers)
    if _ASKING.isdisjoint(headers) and default.late_s is None:
        return default
    found: dict[str, object] = {}
    for field, names in _LIMITS.items():
        value_s = _first_s(headers, names)
        if value_s is not None:
            found[field] = value_s
    for name, (field, read) in _WISHES.items():
        if name in headers:
            found[field] = read(headers[name])
    objective = replace(default, **found) if found else default
    if objective.late_s is not None and objective.deadline_s is None:
        raise InvalidRequest(
            f"`{LATE_VALUE}` says how the value of an answer falls after its deadline: send `{DEADLINE}` with it",
            param=LATE_VALUE,
        )
    return objective


def objective_headers(objective: Objective) -> list[tuple[str, str]]:
    """Return the headers that `parse_objective` reads back as `objective`.

    That it may be deferred is not passed on: only the tier that the caller asked keeps its request. A line of this tier
    is one of many to another one.
    """
    lines = []
    for name, value_s in (
        (TTFT, objective.ttft_s),
        (TPOT, objective.tpot_s),
        (DEADLINE, objective.deadline_s),
        (LATE_VALUE, objective.late_s),
    ):
        if value_s is not None:
            lines.append((name, f"{max(value_s * 1000, 0.001):.3f}"))  # 0 would be refused
    if objective.shorten:
        lines.append((SHORTEN, _ALLOW))
    if objective.priority:
        lines.append((PRIORITY, str(max(objective.priority, SLACK_PRIORITY))))
    if objective.locality is not Locality.ANY:
        lines.append((LOCALITY, objective.locality.value))
    if objective.min_quality > 0:
        lines.append((MIN_QUALITY, f"{objective.min_quality:g}"))
    if objective.session is not None:
        lines.append((SESSION, objective.session))
    return lines


def _first_s(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    for name in names:
        if name in headers:
            value_ms = _number(headers[name], name, 0.0, _MAX_MS, "milliseconds, more than 0 and at most 7 days")
            if value_ms == 0:
                raise InvalidRequest(f"`{name}` must be more than 0 milliseconds", param=name)
            return value_ms / 1000
    return None


def _number(text: str, name: str, low: float, high: float, what: str) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not low <= value <= high:  # also refuses NaN
        raise InvalidRequest(f"`{name}: {header_safe(text[:40])}`: expected {what}", param=name)
    return value


def _priority(text: str) -> int:
    size = whole_number(text.removeprefix("-"), _MAX_PRIORITY)
    if size is None:
        raise InvalidRequest(
            f"`{PRIORITY}: {header_safe(text[:20])}`: expected a 32-bit integer, "
            "higher is better, negative may be shed first",
            param=PRIORITY,
        )
    return -size if text.startswith("-") else size


def refuse_deferring(headers: Mapping[str, str]) -> None:
    """Refuse to be asked for an answer later where there never is one.

    Raises:
        InvalidRequest: it is asked for.
    """
    if DEFER in headers:
        raise InvalidRequest(
            f"`{DEFER}`: this call is not answered later: leave the header out; it is served on /v1/chat/completions, "
            "/v1/completions, /v1/responses, /v1/messages and /v1/embeddings",
            param=DEFER,
        )


def _may_be_shortened(text: str) -> bool:
    return _allowed(text, SHORTEN, "to have none shortened")


def _may_be_deferred(text: str) -> bool:
    return _allowed(text, DEFER, "to have none deferred")


def _allowed(text: str, name: str, otherwise: str) -> bool:
    if text.lower() != _ALLOW:
        raise InvalidRequest(
            f"`{name}: {header_safe(text[:40])}`: expected `{_ALLOW}`; leave the header out {otherwise}", param=name
        )
    return True


def _locality(text: str) -> Locality:
    try:
        return Locality(text.lower())
    except ValueError:
        known = ", ".join(member.value for member in Locality)
        raise InvalidRequest(
            f"`{LOCALITY}: {header_safe(text[:40])}`: expected one of {known}", param=LOCALITY
        ) from None


def _quality(text: str) -> float:
    return _number(text, MIN_QUALITY, 0.0, 1.0, "a number from 0 to 1")


def _session(text: str) -> str:
    if not _SESSION.fullmatch(text):
        raise InvalidRequest(f"`{SESSION}` must be 1 to 256 printable ASCII characters", param=SESSION)
    return text


# Field of `Objective` → the names of its header; and header → field and what reads it.
_LIMITS = {"ttft_s": TTFT_NAMES, "tpot_s": TPOT_NAMES, "deadline_s": (DEADLINE,), "late_s": (LATE_VALUE,)}
_WISHES: dict[str, tuple[str, Callable[[str], object]]] = {
    SHORTEN: ("shorten", _may_be_shortened),
    DEFER: ("defer", _may_be_deferred),
    PRIORITY: ("priority", _priority),
    LOCALITY: ("locality", _locality),
    MIN_QUALITY: ("min_quality", _quality),
    SESSION: ("session", _session),
}
_ASKING = frozenset([*_WISHES, *(name for names in _LIMITS.values() for name in names)])
