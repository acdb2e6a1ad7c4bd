"""Room in KV caches: for whom what a replica has is kept, so that short prompts never take it from a long one for good.

A request that finds a free slot and too little room waits, and leaves the slot to whoever needs less. Once it has
waited for `KEPT_AFTER_S`, the room of that replica is kept for it: nobody else of its priority or a lower one starts
there, what ends makes room, and it goes first. One request at a time for each replica; begun answers are not held up.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from router.values.choice import Choice
from router.values.request import InferenceRequest

KEPT_AFTER_S = 1.0


class Waiting(Protocol):
    """An entry of the tier's queue."""

    entered_s: float
    bound: asyncio.Future[Any]

    @property
    def request(self) -> InferenceRequest:
        """What waits."""
        ...


EntryT = TypeVar("EntryT", bound=Waiting)


@dataclass(frozen=True)
class Kept(Generic[EntryT]):
    """So many tokens of a replica's KV cache are kept for a request."""

    entry: EntryT
    tokens: int

    def from_others(self, priority: int) -> int:
        """Return how much of it others of that priority may not take."""
        return self.tokens if self.entry.request.objective.priority >= priority else 0


class KvRoom(Generic[EntryT]):
    """Who has waited for room, by replica id."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept[EntryT]] = {}

    def kept_for(self, replica_id: str) -> Kept[EntryT] | None:
        kept = self._kept.get(replica_id)
        return None if kept is None or kept.entry.bound.done() else kept

    def waits(self, entry: EntryT, choice: Choice, tokens: int, now_s: float) -> None:
        """A request waits by this decision; it needs so many tokens of room where it goes.

        What is kept for one that found room stays so until it is bound.
        """
        if choice.starts:
            return
        candidate = choice.candidate
        name = candidate.info.replica_id if candidate.kv_short else None
        self.left(entry, but=name)
        if name is not None and now_s - entry.entered_s >= KEPT_AFTER_S and self.kept_for(name) is None:
            self._kept[name] = Kept(entry, tokens)

    def left(self, entry: EntryT, *, but: str | None = None) -> None:
        """A request waits no longer, or for nothing `but` that replica."""
        if self._kept:
            self._kept = {name: kept for name, kept in self._kept.items() if kept.entry is not entry or name == but}
