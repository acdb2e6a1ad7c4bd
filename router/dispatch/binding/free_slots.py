"""Which replicas may have a free slot, and who stands first for it: by rank, by age, or for whom room is kept."""

from __future__ import annotations

from collections.abc import Iterable

from router.base.clock import Clock
from router.dispatch.binding.queue import Key, QueueEntry, RequestQueue
from router.dispatch.replicas.pool import Pool
from router.signals.signals import Signals


class FreeSlots:
    """Replicas that may have a slot; one where there is no room, or nobody waits, is forgotten when it is looked at."""

    def __init__(self, queue: RequestQueue, pool: Pool, signals: Signals, clock: Clock) -> None:
        self._queue = queue
        self._pool = pool
        self._signals = signals
        self._clock = clock
        self._names: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._names)

    def add(self, names: Iterable[str]) -> None:
        """These replicas may have a slot."""
        self._names.update(dict.fromkeys(names))

    def clear(self) -> None:
        """Nobody takes any."""
        self._names.clear()

    def first(self) -> QueueEntry | None:
        """Return who stands first for any slot that is free."""
        pool, best = self._pool.look(), None
        for name in list(self._names):
            first = self.first_at(name) if pool.has_room(name) else None
            if first is None:
                del self._names[name]
            elif first[1].moment == self._pool.moment and not first[1].takes(name):
                continue  # decided at this very moment, it goes elsewhere or waits
            elif best is None or first[0] < best[0]:
                best = first
        return None if best is None else best[1]

    def first_at(self, replica_id: str) -> tuple[Key, QueueEntry] | None:
        """Return who stands first at a replica: for whom its room is kept, unless somebody goes before all ranks."""
        kept, first = self._pool.kv.kept_for(replica_id), self._first_in_line(replica_id)
        if kept is None or (first is not None and first[0] < kept.entry.age_key):
            return first
        waits = kept.entry.moment == self._pool.moment and not kept.entry.takes(replica_id)
        return None if waits else (kept.entry.age_key, kept.entry)

    def _first_in_line(self, replica_id: str) -> tuple[Key, QueueEntry] | None:
        """Return who stands first by rank; those who leave its slot at this moment stand aside until a change."""
        line, moment = self._pool.line(replica_id), self._pool.moment
        if self._signals.oldest_first.due(self._pool.settings.fairness.oldest_first):
            oldest = self._queue.oldest(line)
            if oldest is not None and (oldest[1].moment != moment or oldest[1].takes(replica_id)):
                return oldest
        while (first := self._queue.first(line)) is not None:
            entry = first[1]
            if entry.moment != moment or not entry.leaves_slots or entry.choice is None:
                break
            self._queue.set_aside(entry, self._clock.now_s() + entry.choice.good_for_s)
        return first
