"""Who waits for a credit, and in which order: keys by turns, and within a key the one that has asked for longest.

Start-time fair queueing (Goyal, Vin, Cheng, 1996) over API keys: a key's places lie one apart, the first of them no
earlier than the place that was served last. A key with ten thousand devices and a key with one get a credit each.

A key owns a number of places, and its devices take them in order; so when one leaves, those behind it move up, and what
goes is the key's last place. No gap is left that would put the key back against others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import count

from router.values.credits import Asker

Place = tuple[float, int]
"""Start tag, and a number that no other place has."""


@dataclass(slots=True)
class _Key:
    """One API key: its devices by when they asked, and as many places."""

    turns: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)


class CreditLine:
    """All operations take O(log n) comparisons, and move at most n pointers."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._keys: dict[str, _Key] = {}
        self._turns: dict[Asker, int] = {}
        self._served = 0.0
        self._owing: dict[str, float] = {}  # the next place of a key that got more than one credit at once
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, asker: Asker) -> bool:
        return asker in self._turns

    def length_of(self, caller: str) -> int:
        """Return how many of a key's devices wait."""
        known = self._keys.get(caller)
        return len(known.turns) if known is not None else 0

    def join(self, asker: Asker, turn: int | None = None) -> None:
        """Take the last place of the key, or that of a `turn` which `granted` returned; who waits keeps its place."""
        if asker in self._turns:
            return
        key = self._keys.setdefault(asker.caller, _Key())
        number = next(self._numbers)
        earliest = key.places[-1][0] + 1 if key.places else self._owing.get(asker.caller, 0.0)
        place = (max(self._served, earliest), number)
        key.places.append(place)
        insort(self._places, place)
        self._turns[asker] = number if turn is None else turn
        insort(key.turns, self._turns[asker])

    def ahead(self, asker: Asker) -> int:
        """Return how many go before it. It has to wait in the line."""
        key = self._keys[asker.caller]
        return bisect_left(self._places, key.places[bisect_left(key.turns, self._turns[asker])])

    def leave(self, asker: Asker) -> None:
        """Give its place up; nothing if it has none."""
        turn = self._turns.pop(asker, None)
        if turn is None:
            return
        key = self._keys[asker.caller]
        key.turns.pop(bisect_left(key.turns, turn))
        self._remove(asker.caller, key, len(key.places) - 1)

    def granted(self, asker: Asker, credits_given: int) -> int:
        """Take it out of the line: it got that many credits. Returns its turn, to come back with if they are lost."""
        turn = self._turns.pop(asker)
        key = self._keys[asker.caller]
        index = bisect_left(key.turns, turn)
        key.turns.pop(index)
        place = key.places[index]
        self._remove(asker.caller, key, index)
        self._served = max(self._served, place[0])
        self._owing[asker.caller] = place[0] + credits_given
        if len(self._owing) > 2 * len(self._keys) + 64:
            self._owing = {caller: tag for caller, tag in self._owing.items() if tag > self._served}
        return turn

    def _remove(self, caller: str, key: _Key, index: int) -> None:
        place = key.places.pop(index)
        self._places.pop(bisect_left(self._places, place))
        if not key.places:
            del self._keys[caller]
