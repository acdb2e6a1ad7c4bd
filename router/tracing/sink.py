"""What takes the traces of a dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from router.values.trace import Headers, Stage, TraceContext


class TraceSink(Protocol):
    """Makes up ids when a request begins, and takes its stages when it has ended."""

    def begin(self, headers: Headers) -> TraceContext:
        """Return a request's place in its caller's trace, or in a new one. Cheap."""
        ...

    def ended(self, trace: TraceContext, since_s: float, tell: Callable[[], Sequence[Stage]]) -> None:
        """Note a request that has just left, `since_s` after it was accepted. Never waits, never raises.

        Args:
            tell: what it reads does not change any more; called by a thread of its own.
        """
        ...
