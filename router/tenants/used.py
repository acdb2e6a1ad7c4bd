"""What was used, by whom, of what and when: the rows of a report. Plain values."""

from __future__ import annotations

import datetime as dt

import msgspec


class UsageKey(msgspec.Struct, frozen=True, gc=False):
    """Whose usage, of what, and when.

    Attributes:
        device: empty where the key is nobody's in particular.
        model: the variant that answered.
        day: of UTC, as `2026-11-22`.
    """

    tenant: str
    device: str
    model: str
    day: str


class Counts(msgspec.Struct):
    """What was used."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: Counts) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens


def day_of(text: str) -> str:
    """Return a day as rows have it.

    Raises:
        ValueError: the text is none; says what one looks like.
    """
    try:
        return dt.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError(f"`{text[:40]}` is no day such as 2026-11-22") from None


class UsageRow(msgspec.Struct, frozen=True):
    """One line of a report."""

    key: UsageKey
    counts: Counts
