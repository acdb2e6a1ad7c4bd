"""What the dispatcher hands to the gateway: where the request went, and the stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol, cast

import msgspec

from router.values.chunk import TokenChunk
from router.values.usage import Usage


class Route(msgspec.Struct, frozen=True):
    """Where a request was sent and why: the source of the `x-overspill-*` response headers.

    Attributes:
        tier: `edge` or `cloud`.
        variant: the catalogue name of the variant that answers.
        rung: its position on the ladder, 0 is the best.
        reason: a code of `router.dispatch.records.record.REASONS`.
        degraded: a smaller rung or a shorter answer than asked for.
        predicted_ttft_s: the promise made, in seconds; None for a request pinned to a single candidate unseen so far.
        max_tokens: the answer cap in force, None if none was set.
    """

    tier: str
    variant: str
    rung: int
    reason: str
    degraded: bool
    predicted_ttft_s: float | None
    max_tokens: int | None = None


class Tap(Protocol):
    """Whom the text of an answer is given as it comes."""

    @property
    def full(self) -> bool:
        """It takes nothing now; the reader of the answer gets it instead."""
        ...

    def give(self, chunks: list[TokenChunk]) -> None:
        """Take the chunks that came at once."""
        ...


class Tapped(Protocol):
    """Chunks of an answer that can go past their reader: a token then wakes no task."""

    def tap(self, tap: Tap) -> None:
        """Give what is no more than text to `tap` while the next chunk is waited for, and let the wait go on.

        The first and the last chunk, an error, and what comes while the reader is away or the tap is full are the
        reader's, so that order and back-pressure stay what they are.
        """
        ...


def tapped(chunks: AsyncGenerator[TokenChunk, None]) -> Tapped | None:
    """Return chunks that are `Tapped` as that. For each stream: `isinstance` of a protocol takes 10 µs."""
    return cast("Tapped", chunks) if hasattr(chunks, "tap") else None


def _never() -> bool:
    return False


def _nothing() -> Usage:
    return Usage(0, 0)


def _at_once(told: Callable[[], None]) -> None:
    told()


class Answer(msgspec.Struct, eq=False):
    """A running answer.

    Attributes:
        route: as it stood when the first chunk arrived; once an answer ended that a cap or its deadline has cut, it
            says so. A continuation on another replica is recorded in the decision record, and the stream goes on
            without a seam.
        chunks: the first chunk is ready when this object exists. The last chunk carries a finish reason; the
            generator raises `ReplicaBroken` when no replica could finish. Closing it cancels the work.
        ready: whether the next chunk is here already, so that whoever writes chunks out may write several at once.
        used: the tokens of it that were made so far, and of its prompt.
        cache: `hit` if it was given before, `miss` if it may be given again; empty otherwise.
        when_computed: calls what it is given once no replica works on it any more, at once where none does; its reader
            may be far behind.
        seamless: whether one replica made all of it so far.
    """

    route: Route
    chunks: AsyncGenerator[TokenChunk, None]
    ready: Callable[[], bool] = _never
    used: Callable[[], Usage] = _nothing
    cache: str = ""
    when_computed: Callable[[Callable[[], None]], None] = _at_once
    seamless: Callable[[], bool] = _never
