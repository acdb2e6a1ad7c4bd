"""HTTP headers that carry the promise in, and what was done about it out.

Names on the wire are lower case. A request header that does not parse is an `InvalidRequest` that names the header:
a promise that was asked for and silently dropped is worse than a refusal.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from router.base.errors import InvalidRequest
from router.values.answer import Route
from router.values.request import CacheUse, Locality, Objective
from router.values.trace import TRACEPARENT, TRACESTATE
from router.wire.names import (
    ATTEMPTS_LEFT,
    CACHE,
    CACHE_SALT,
    DEADLINE,
    DEFER,
    DEMAND,
    HOPS,
    INSTANCE,
    LATE_VALUE,
    LOCALITY,
    MIN_QUALITY,
    PRIORITY,
    REQUEST_ID,
    REQUEST_NAMES,
    SESSION,
    SHORTEN,
    TPOT,
    TPOT_NAMES,
    TTFT,
    TTFT_NAMES,
    header_safe,
    refuse_headers,
)

__all__ = [
    "ATTEMPTS_LEFT",
    "CACHE",
    "CACHE_SALT",
    "CONFLICT",
    "DEADLINE",
    "DEFER",
    "DEGRADED",
    "DEMAND",
    "HOPS",
    "INSTANCE",
    "LATE_VALUE",
    "LOCALITY",
    "MAX_ATTEMPTS",
    "MAX_HOPS",
    "MAX_REQUEST_ID_CHARS",
    "MAX_TOKENS",
    "MIN_QUALITY",
    "MODEL",
    "PREDICTED_TTFT",
    "PRIORITY",
    "REASON",
    "REPLY_NAMES",
    "REQUEST_ID",
    "REQUEST_NAMES",
    "RUNG",
    "SESSION",
    "SHORTEN",
    "TIER",
    "TPOT",
    "TPOT_NAMES",
    "TRACE_NAMES",
    "TTFT",
    "TTFT_NAMES",
    "attempts_left",
    "cache_salt",
    "cache_salt_headers",
    "cache_use",
    "cache_use_headers",
    "header_safe",
    "lower_case",
    "next_hop",
    "objective_headers",
    "parse_objective",
    "passed_on",
    "reply_id",
    "request_id",
    "retry_headers",
    "route_headers",
    "whole_number",
]

TIER = "x-overspill-tier"
MODEL = "x-overspill-model"
RUNG = "x-overspill-rung"
REASON = "x-overspill-reason"
DEGRADED = "x-overspill-degraded"
PREDICTED_TTFT = "x-overspill-predicted-ttft-ms"
MAX_TOKENS = "x-overspill-max-tokens"

REPLY_NAMES = (TIER, MODEL, RUNG, REASON, DEGRADED, PREDICTED_TTFT, MAX_TOKENS)

TRACE_NAMES = (TRACEPARENT, TRACESTATE)

CONFLICT = "\n"
"""Stands between the values of a header that was sent more than once with different ones."""

_SINGLE = frozenset({*REQUEST_NAMES, *TTFT_NAMES, *TPOT_NAMES, REQUEST_ID})
_SERVED = frozenset({*_SINGLE, *REPLY_NAMES})  # reply headers: proxies carry them from one exchange over to the next
MAX_HOPS = 8
MAX_ATTEMPTS = 1_000_000
_ALLOW = "allow"
_MAX_MS = 7 * 24 * 3600 * 1000.0
_MAX_PRIORITY = 2**31 - 1
MAX_REQUEST_ID_CHARS = 128
_REQUEST_ID = re.compile(rf"[\w.:~/+=@-]{{1,{MAX_REQUEST_ID_CHARS}}}", re.ASCII)
_NUMBER = re.compile(r"([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})(e[+-]?[0-9]{1,3})?", re.IGNORECASE)
_SESSION = re.compile(r"[\x20-\x7e]{1,256}")
_CACHE_SALT = re.compile(r"[\x20-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x20-\x7e]{0,256})?")
_TRACE_VALUE = re.compile(r"[\x20-\x7e]{1,1024}")


def lower_case(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Turn ASGI headers into a mapping.

    Different values of a repeated header are joined, as HTTP has it, by `, `: no header of which there can be one only
    reads as anything then. Those of Overspill are joined by a line feed, which no value can hold: see `CONFLICT`.
    """
    found = {name.decode("latin-1").lower(): value.decode("latin-1").strip() for name, value in raw}
    return found if len(found) == len(raw) else _joined(raw)


def _joined(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for raw_name, raw_value in raw:
        values = found.setdefault(raw_name.decode("latin-1").lower(), [])
        value = raw_value.decode("latin-1").strip()
        if value not in values:
            values.append(value)
    return {name: (CONFLICT if name in _SINGLE else ", ").join(values) for name, values in found.items()}


def request_id(headers: Mapping[str, str]) -> str:
    """Return the caller's request id, or a fresh one.

    Raises:
        InvalidRequest: it is longer than 128 characters or holds characters that do not belong into a log line.
    """
    given = headers.get(REQUEST_ID)
    if not given:
        return os.urandom(16).hex()
    if not _REQUEST_ID.fullmatch(given):
        raise InvalidRequest(
            f"`{REQUEST_ID}` must be 1 to 128 characters out of letters, digits and . _ : ~ / + = @ -", param=REQUEST_ID
        )
    return given


def reply_id(headers: Mapping[str, str]) -> str:
    """Return the id that a reply carries whose request got no further: the caller's own, if it is one."""
    given = headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()


def parse_objective(headers: Mapping[str, str], default: Objective) -> Objective:
    """Lay the request's headers over what its body asked for.

    Args:
        headers: lower-case names.

    Raises:
        InvalidRequest: a header holds a value out of range or is none of ours; `param` is the header's name.
    """
    refuse_headers(headers, _SERVED)
    _refuse_conflicts(headers)
    found: dict[str, object] = {}
    for field, names in _LIMITS.items():
        value_s = _first_s(headers, names)
        if value_s is not None:
            found[field] = value_s
    for name, (field, read) in _WISHES.items():
        if name in headers:
            found[field] = read(headers[name])
    objective = replace(default, **found) if found else default  # type: ignore[arg-type]
    if objective.late_s is not None and objective.deadline_s is None:
        raise InvalidRequest(
            f"`{LATE_VALUE}` says how the value of an answer falls after its deadline: send `{DEADLINE}` with it",
            param=LATE_VALUE,
        )
    return objective


def objective_headers(objective: Objective) -> list[tuple[str, str]]:
    """Return the headers that `parse_objective` reads back as `objective`.

    That it may be deferred is not passed on: only the tier that the caller asked keeps its request.
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
        lines.append((PRIORITY, str(objective.priority)))
    if objective.locality is not Locality.ANY:
        lines.append((LOCALITY, objective.locality.value))
    if objective.min_quality > 0:
        lines.append((MIN_QUALITY, f"{objective.min_quality:g}"))
    if objective.session is not None:
        lines.append((SESSION, objective.session))
    return lines


def passed_on(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Pick what travels with the request to the next tier: trace context and the hop count.

    A malformed `traceparent` is dropped with its `tracestate`, as the W3C recommendation asks.

    Raises:
        InvalidRequest: the request went through more than `MAX_HOPS` tiers: some tier is its own upstream.
    """
    kept = []
    if _TRACEPARENT.fullmatch(headers.get(TRACEPARENT, "")):  # a `tracestate` that is malformed goes alone
        kept = [(name, headers[name]) for name in TRACE_NAMES if _TRACE_VALUE.fullmatch(headers.get(name, ""))]
    hops = headers.get(HOPS)
    if hops is not None:
        if whole_number(hops, MAX_HOPS) is None:
            raise InvalidRequest(
                f"`{HOPS}: {header_safe(hops[:16])}`: a request may pass through {MAX_HOPS} tiers; "
                "is a tier configured as its own upstream?",
                param=HOPS,
            )
        kept.append((HOPS, hops))
    return tuple(kept)


def cache_salt(headers: Mapping[str, str]) -> str:
    """Return the caller's salt of shared KV caches, empty without one.

    Raises:
        InvalidRequest: it is longer than 128 characters, or holds more than printable ASCII.
    """
    given = headers.get(CACHE_SALT, "")
    if given and not _CACHE_SALT.fullmatch(given):
        raise InvalidRequest(f"`{CACHE_SALT}` must be 1 to 128 printable ASCII characters", param=CACHE_SALT)
    return given


def cache_use(headers: Mapping[str, str]) -> CacheUse:
    """Return what the caller lets caches of answers do; what a reply says there of itself says nothing.

    Raises:
        InvalidRequest: it is no such wish.
    """
    wish = headers.get(CACHE, "").lower()
    if wish in {"", "hit", "miss"}:
        return CacheUse.FULL
    if wish in {CacheUse.REFRESH.value, CacheUse.NOTHING.value}:
        return CacheUse(wish)
    raise InvalidRequest(
        f"`{CACHE}: {header_safe(wish[:40])}`: expected `no-store` (neither give a kept answer nor keep this one) or "
        "`no-cache` (compute it anew)",
        param=CACHE,
    )


def cache_use_headers(wish: CacheUse) -> list[tuple[str, str]]:
    """Return the header that `cache_use` reads back; nothing for what needs no word."""
    return [] if wish is CacheUse.FULL else [(CACHE, wish.value)]


def cache_salt_headers(owner: str) -> list[tuple[str, str]]:
    """Return what tells the next tier whom its caches are shared with: a digest, which tells nothing else."""
    return [(CACHE_SALT, hashlib.blake2b(owner.encode(), digest_size=16).hexdigest())] if owner else []


def attempts_left(headers: Mapping[str, str]) -> int | None:
    """Return what the tier before left of its budget of attempts, None where it says nothing.

    Raises:
        InvalidRequest: it is no whole number from 1 up.
    """
    text = headers.get(ATTEMPTS_LEFT)
    if text is None:
        return None
    left = whole_number(text, MAX_ATTEMPTS)
    if not left:
        raise InvalidRequest(
            f"`{ATTEMPTS_LEFT}: {header_safe(text[:16])}`: expected a whole number from 1 to {MAX_ATTEMPTS}, "
            "the replicas that may still be tried",
            param=ATTEMPTS_LEFT,
        )
    return left


def trace_context(kept: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """Return of the headers of `passed_on` those that any server may see."""
    return [(name, value) for name, value in kept if name in TRACE_NAMES]


def next_hop(kept: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """Return the headers of `passed_on` for the next tier, one hop further."""
    hops = next((int(value) for name, value in kept if name == HOPS), 0)
    return [(name, value) for name, value in kept if name != HOPS] + [(HOPS, str(hops + 1))]


def route_headers(route: Route) -> list[tuple[str, str]]:
    """Tell the caller who answers, and what was given up for it."""
    lines = [
        (TIER, header_safe(route.tier)),
        (MODEL, header_safe(route.variant)),
        (RUNG, str(route.rung)),
        (REASON, header_safe(route.reason)),
        (DEGRADED, "true" if route.degraded else "false"),
    ]
    if route.predicted_ttft_s is not None and math.isfinite(route.predicted_ttft_s):
        lines.append((PREDICTED_TTFT, f"{route.predicted_ttft_s * 1000:.1f}"))
    if route.max_tokens is not None:
        lines.append((MAX_TOKENS, str(route.max_tokens)))
    return lines


def retry_headers(retry_after_s: float, *, should_retry: bool) -> list[tuple[str, str]]:
    """Say when to come back: whole seconds for HTTP (at least 1), milliseconds for clients that read them."""
    finite_s = min(max(retry_after_s, 0.001), 3600.0) if math.isfinite(retry_after_s) else 3600.0
    lines = [("retry-after", str(max(1, math.ceil(finite_s)))), ("retry-after-ms", str(math.ceil(finite_s * 1000)))]
    if not should_retry:
        lines.append(("x-should-retry", "false"))
    return lines


def whole_number(text: str, most: int) -> int | None:
    """Read digits as a number from 0 to `most`; None if they are no digits or say more. A long text costs nothing."""
    if not text.isascii() or not text.isdigit():
        return None
    digits = text.lstrip("0") or "0"
    number = int(digits) if len(digits) <= len(str(most)) else most + 1
    return number if number <= most else None


def _refuse_conflicts(headers: Mapping[str, str]) -> None:
    for name in _SINGLE & headers.keys():
        if CONFLICT in headers[name]:
            values = ", ".join(f"`{header_safe(value[:40])}`" for value in headers[name].split(CONFLICT)[:4])
            raise InvalidRequest(f"`{name}` was sent more than once, with different values: {values}", param=name)


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
