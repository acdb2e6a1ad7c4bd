"""A request's place in a distributed trace (W3C Trace Context), and the stages that become its spans. Plain values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
_SAMPLED = 0x01

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where the span of one request stands.

    Attributes:
        trace_id: 128 bits, of the whole trace.
        span_id: 64 bits, of this request on this tier.
        parent_id: of the span that the caller named, None where the trace begins here.
        sampled: its spans are exported; if not, the ids still travel on.
    """

    trace_id: int
    span_id: int
    parent_id: int | None
    sampled: bool

    def link_id(self, number: int) -> int:
        """Return the span id of one attempt over a link: the same for the same number, so that nothing is kept."""
        digest = hashlib.blake2b(f"{self.span_id:016x}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") or 1

    def onward(self, headers: Headers, span_id: int) -> Headers:
        """Return the headers of an attempt: `span_id` is the parent of what the replica does."""
        own = {TRACEPARENT} if self.parent_id is not None else {TRACEPARENT, TRACESTATE}
        kept = tuple(header for header in headers if header[0] not in own)
        flags = _SAMPLED if self.sampled else 0
        return (*kept, (TRACEPARENT, f"00-{self.trace_id:032x}-{span_id:016x}-{flags:02x}"))


def parent_of(headers: Headers) -> tuple[int, int, bool] | None:
    """Return trace id, span id and whether it is sampled, as a caller's `traceparent` has it; None without a sound one.

    Args:
        headers: what `router.wire.headers.passed_on` let through, so sound.
    """
    told = next((value for name, value in headers if name == TRACEPARENT), "")
    if not told:
        return None
    _, trace, span, flags = told.split("-")[:4]
    return int(trace, 16), int(span, 16), bool(int(flags, 16) & _SAMPLED)


@dataclass(frozen=True, slots=True)
class Stage:
    """One span of a request.

    Attributes:
        name: `request`, or a stage of it: `queue`, `bind`, `link`, `prefill`, `decode`.
        begin_s, end_s: since the request was accepted.
        parent: index of its parent among the stages, None for the request itself.
        span_id: where others know it already; None takes a fresh one.
        error: why it failed, empty if it did not.
        events: what happened within: seconds since the request was accepted, and a name.
    """

    name: str
    begin_s: float
    end_s: float
    kind: Literal["server", "client", "internal"] = "internal"
    parent: int | None = 0
    span_id: int | None = None
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    error: str = ""
    events: tuple[tuple[float, str], ...] = ()
