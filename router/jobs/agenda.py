"""Which line is next: of the caller who has the fewest running, by turns; of its batches the one that expires first.

Lines are read from the database a few at a time. A line that was stopped, or has to wait before it is tried again,
stands here until it is due.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from router.jobs.records import Batch, Line

LINES_AHEAD = 256


@dataclass(slots=True)
class BatchAgenda:
    """The lines of one batch that are not answered.

    Attributes:
        read_to: number of the last line that was read from the database.
        whole: there is nothing more to read.
    """

    batch: Batch
    read_to: int = 0
    whole: bool = False
    next: deque[Line] = field(default_factory=deque)
    later: list[tuple[float, int, Line]] = field(default_factory=list)

    @property
    def wants_more(self) -> bool:
        """Whether lines are to be read from the database."""
        return not self.whole and len(self.next) < LINES_AHEAD // 2

    @property
    def done(self) -> bool:
        """Whether no line is left to begin."""
        return self.whole and not self.next and not self.later

    def begin_again(self) -> None:
        """Read all that is not answered once more."""
        self.read_to, self.whole = 0, False

    def is_due(self, now_s: float) -> bool:
        """Whether `take` would return a line."""
        return bool(self.next) or bool(self.later and self.later[0][0] <= now_s)

    def take(self, now_s: float) -> Line | None:
        if self.later and self.later[0][0] <= now_s:
            return heapq.heappop(self.later)[2]
        return self.next.popleft() if self.next else None


class Agenda:
    """All batches that run."""

    def __init__(self) -> None:
        self._batches: dict[str, BatchAgenda] = {}
        self._turns: deque[str] = deque()  # owners, whose turn is next before the others
        self._order = count()

    def __iter__(self) -> Iterator[BatchAgenda]:
        return iter(list(self._batches.values()))

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, batch_id: str) -> bool:
        return batch_id in self._batches

    def set(self, running: Iterable[Batch]) -> None:
        """Replace what runs; batches that were there keep their place."""
        found = {batch.id: batch for batch in running}
        for batch_id in self._batches.keys() - found.keys():
            del self._batches[batch_id]
        for batch_id, batch in found.items():
            if batch_id in self._batches:
                self._batches[batch_id].batch = batch
            else:
                self._batches[batch_id] = BatchAgenda(batch)
        owners = {batch.owner for batch in found.values()}
        self._turns = deque([owner for owner in self._turns if owner in owners])
        self._turns.extend(sorted(owners - set(self._turns)))

    def add(self, batch_id: str, lines: list[Line]) -> None:
        """Lines were read; none: there are no more."""
        there = self._batches.get(batch_id)
        if there is None:
            return
        there.whole = not lines
        if lines:
            there.read_to = lines[-1].number
            there.next.extend(lines)

    def back(self, line: Line, due_s: float) -> None:
        """A line was not answered: it is due again at `due_s` of the tier's clock."""
        there = self._batches.get(line.batch_id)
        if there is not None:
            heapq.heappush(there.later, (due_s, next(self._order), line))

    @property
    def shared(self) -> bool:
        """Whether there are batches of several callers."""
        return len(self._turns) > 1

    def owner_of(self, line: Line) -> str | None:
        """Return whose a line is; None where its batch no longer runs."""
        there = self._batches.get(line.batch_id)
        return None if there is None else there.batch.owner

    def kept_out(self, now_s: float, running: Counter[str | None]) -> bool:
        """Whether a line is due of a caller of whom none is running."""
        return any(there.is_due(now_s) and not running[there.batch.owner] for there in self._batches.values())

    def take(self, now_s: float, running: Counter[str | None]) -> Line | None:
        """Return the next line that is due; None if there is none now.

        Args:
            running: lines by caller; may be empty where there is one caller alone.
        """
        for owner in sorted(self._turns, key=running.__getitem__):  # of as many, whose turn is next
            mine = [there for there in self._batches.values() if there.batch.owner == owner]
            for there in sorted(mine, key=lambda item: (item.batch.expires_s, item.batch.id)):
                line = there.take(now_s)
                if line is not None:
                    self._turns.remove(owner)
                    self._turns.append(owner)
                    return line
        return None
