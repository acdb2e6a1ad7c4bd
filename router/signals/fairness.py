"""Who was put back: callers, by the device time that they took lately; and whoever has waited longest."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Final

_HALF_LIFE_S: Final = 30.0
_CALLERS_KEPT: Final = 4096
_LEAST_SHARE: Final = 0.01  # of all: below it a caller does not count among those who share
_COUNTED_AGAIN: Final = 200  # twice as many as can be above it


class CallerShares:
    """Decayed device-seconds by caller. One writer, the dispatcher."""

    def __init__(self) -> None:
        self._taken_s: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._counting: dict[str, None] = {}  # may be above `_LEAST_SHARE`: to take is the only way to get there
        self._all_s = 0.0
        self._at_s = 0.0
        self._waiting: Counter[str] = Counter()

    def asked(self, caller: str) -> None:
        """A request of a caller waits: it shares, even where it got nothing yet."""
        self._waiting[caller] += 1

    def left(self, caller: str) -> None:
        """A request of a caller waits no more."""
        self._waiting[caller] -= 1
        if not self._waiting[caller]:
            del self._waiting[caller]

    def took(self, caller: str, now_s: float, device_s: float) -> None:
        """A request of a caller was sent, and is expected to take so many device-seconds."""
        self._all_s = self._all_s * _kept(now_s - self._at_s) + device_s
        self._at_s = now_s
        self._taken_s[caller] = (self._of(caller, now_s) + device_s, now_s)
        self._taken_s.move_to_end(caller)
        self._counting[caller] = None
        if len(self._taken_s) > _CALLERS_KEPT:
            oldest, _ = self._taken_s.popitem(last=False)
            self._counting.pop(oldest, None)
        if len(self._counting) > _COUNTED_AGAIN:
            least_s = _LEAST_SHARE * self._all_s
            self._leave_out([name for name in self._counting if self._of(name, now_s) <= least_s])

    def excess(self, caller: str, now_s: float) -> float:
        """How many times its equal share a caller took; 1 for one who took no more, and where nobody else asks.

        Asked at each decision: it looks at those alone who took much, however many callers there are.
        """
        whole_s = self._all_s * _kept(now_s - self._at_s)
        own_s = self._of(caller, now_s)
        if whole_s <= 0.0 or own_s <= 0.0:
            return 1.0
        least_s, sharing, small = _LEAST_SHARE * whole_s, len(self._waiting), []
        for name in self._counting:
            if name in self._waiting:
                continue
            if self._of(name, now_s) > least_s:
                sharing += 1
            else:
                small.append(name)
        self._leave_out(small)
        return max(1.0, own_s / whole_s * max(sharing, 1))

    def _leave_out(self, small: Iterable[str]) -> None:
        """Leave out who took too little to count: all that was taken fades alike, so that stays so until they take."""
        for name in small:
            del self._counting[name]

    def _of(self, caller: str, now_s: float) -> float:
        taken_s, at_s = self._taken_s.get(caller, (0.0, now_s))
        return taken_s * _kept(now_s - at_s)


class OldestFirst:
    """When it is the turn of who has waited longest (deficit round robin; Shreedhar & Varghese, 1995).

    Of W device-seconds given out while others wait, `share` · W are owed to the oldest. Once nothing is paid ahead it
    is their turn, and what they take then is paid. So turns by age take at most `share` · W and one answer more; and
    while anybody would take them, at least `share` · W less one answer.
    """

    def __init__(self) -> None:
        self._owed_s = 0.0

    def due(self, share: float) -> bool:
        return share > 0.0 and self._owed_s >= 0.0

    def took(self, device_s: float, share: float, *, oldest: bool) -> None:
        """A request was sent while others waited.

        Args:
            oldest: nobody had waited longer for that replica. Who is first by rank as well, out of turn, pays nothing.
        """
        if self.due(share) and oldest:
            self._owed_s -= (1.0 - share) * device_s
        elif self._owed_s < 0.0:  # what is owed and nobody takes is not saved up
            self._owed_s = self._owed_s + share * device_s if share > 0.0 else 0.0


def _kept(passed_s: float) -> float:
    return math.pow(0.5, max(passed_s, 0.0) / _HALF_LIFE_S)
