"""HTTP headers of a request and of its reply: ids, what travels on to the next tier, and what was done about it.

Names on the wire are lower case. A request header that does not parse is an `InvalidRequest` that names the header.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Mapping

from router.base.errors import InvalidRequest
from router.values.answer import Route
from router.values.request import CacheUse
from router.values.trace import TRACEPARENT, TRACESTATE
from router.wire.names import (
    ATTEMPTS_LEFT,
    CACHE,
    CACHE_SALT,
    DEGRADED,
    HOPS,
    MAX_TOKENS,
    MODEL,
    PREDICTED_TTFT,
    REASON,
    REPLY_NAMES,
    REQUEST_ID,
    REQUEST_NAMES,
    RUNG,
    TIER,
    TPOT_NAMES,
    TTFT_NAMES,
    header_safe,
    refuse_headers,
)

TRACE_NAMES = (TRACEPARENT, TRACESTATE)

CONFLICT = "\n"
"""Stands between the values of a header that was sent more than once with different ones."""

_SINGLE = frozenset({*REQUEST_NAMES, *TTFT_NAMES, *TPOT_NAMES, REQUEST_ID})
_SERVED = frozenset({*_SINGLE, *REPLY_NAMES})  # reply headers: proxies carry them from one exchange over to the next
MAX_HOPS = 8
MAX_ATTEMPTS = 1_000_000
MAX_REQUEST_ID_CHARS = 128
_REQUEST_ID = re.compile(rf"[\w.:~/+=@-]{{1,{MAX_REQUEST_ID_CHARS}}}", re.ASCII)
_CACHE_SALT = re.compile(r"[\x20-\x7e]{1,128}")
# W3C Trace Context: no id is all zeros, no version is ff, and only later versions than 00 have more to say.
_TRACE_IDS = r"(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_TRACEPARENT = re.compile(rf"00-{_TRACE_IDS}|(?!00|ff)[0-9a-f]{{2}}-{_TRACE_IDS}(-[\x20-\x7e]{{0,256}})?")
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


def refuse_unreadable(headers: Mapping[str, str]) -> None:
    """Refuse headers that are nearly ours, and those of ours that were sent more than once with different values.

    Args:
        headers: lower-case names.

    Raises:
        InvalidRequest: one is; `param` is the header's name.
    """
    refuse_headers(headers, _SERVED)
    for name in _SINGLE.intersection(headers):
        if CONFLICT in headers[name]:
            values = ", ".join(f"`{header_safe(value[:40])}`" for value in headers[name].split(CONFLICT)[:4])
            raise InvalidRequest(f"`{name}` was sent more than once, with different values: {values}", param=name)


def request_id(headers: Mapping[str, str]) -> str:
    """Return the caller's request id, or a fresh one.

    Raises:
        InvalidRequest: it is longer than 128 characters or holds characters that do not belong into a log line.
    """
    given = headers.get(REQUEST_ID)
    if not given:
        return _fresh_id()
    if not _REQUEST_ID.fullmatch(given):
        raise InvalidRequest(
            f"`{REQUEST_ID}` must be 1 to 128 characters out of letters, digits and . _ : ~ / + = @ -", param=REQUEST_ID
        )
    return given


def _fresh_id() -> str:
    return f"{random.getrandbits(128):032x}"  # no secret: a name that no other request has


def reply_id(headers: Mapping[str, str]) -> str:
    """Return the id that a reply carries whose request got no further: the caller's own, if it is one."""
    given = headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else _fresh_id()


def passed_on(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Pick what travels with the request to the next tier: trace context and the hop count.

    A malformed `traceparent` is dropped with its `tracestate`, as the W3C recommendation asks.

    Raises:
        InvalidRequest: the request went through more than `MAX_HOPS` tiers: some tier is its own upstream.
    """
    if not (TRACEPARENT in headers or HOPS in headers):
        return ()
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
    return [(CACHE_SALT, salt_of(owner))] if owner else []


def salt_of(owner: str) -> str:
    """Return the digest of whom caches are shared with."""
    return hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


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
    if not kept:
        return [(HOPS, "1")]
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
