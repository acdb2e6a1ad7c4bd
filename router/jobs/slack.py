"""How many lines may run now: what online requests leave free, with a margin, and none while they could feel it.

A line that runs delays an online request by the step it is in, and slows it down afterwards. So a step of lines alone
is short (a tenth of a second), and while there are online requests, only so many lines run as slow these down by a
share that the operator set; when one comes, what runs beyond that is stopped and run again later. After the last online
request lines hold back for as long as the next one usually takes to come: of the arrivals lately, no more than one in
fifty shall find the device full of lines. Gaps of more than ten seconds are not waited for: traffic that sparse would
let no line run at all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.base.clock import Clock
from router.values.replica import ReplicaSnapshot, SpeedPrior

_GAPS = 256
_SURPRISED = 0.02  # of the arrivals, those that may find lines that have to be stopped
_MARGIN = 1.2
_LEAST_HOLD_S = 0.25
_UNKNOWN_HOLD_S = 2.0  # while few gaps were seen
_KNOWN_GAPS = 50
_MOST_HOLD_S = 10.0
_MOST_STEP_S = 0.1  # an online request that comes waits for the step that it finds
_FLAT = 1e-6  # a slope below it is none
_SPACING_S = 0.1  # between lines begun beside online requests: the door that both come through is one
_AT_ONCE = 4  # lines begun in one turn of the event loop


@dataclass(frozen=True, slots=True)
class Allowance:
    """What may run.

    Attributes:
        lines: at once; those that run beyond are to be stopped.
        beside: there are online requests, or there will soon be: the next line begins with some spacing.
        why: nothing more may, in a few words; empty while something may.
    """

    lines: int
    beside: bool
    why: str = ""


class Slack:
    """Told of every online request; asked by what runs lines. On the event loop.

    Args:
        load: a snapshot of every replica.
        changed: called when an online request came or left.
    """

    def __init__(
        self, load: Callable[[], Sequence[ReplicaSnapshot]], clock: Clock, concurrency: int, beside_slowdown: float
    ) -> None:
        self.changed: Callable[[], None] = _nobody
        self._load = load
        self._clock = clock
        self._concurrency = concurrency
        self._beside_slowdown = beside_slowdown
        self._online = 0
        self._left_at_s = -math.inf
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._hold_s: float | None = _UNKNOWN_HOLD_S  # None: to be found again, once somebody asks

    @property
    def online(self) -> int:
        """Online requests inside the tier."""
        return self._online

    def came(self) -> None:
        """An online request came in."""
        gap_s = 0.0 if self._online else self._clock.now_s() - self._left_at_s
        if gap_s <= _MOST_HOLD_S:  # a longer one cannot be waited for
            self._gaps.append(gap_s)
            self._hold_s = None
        self._online += 1
        self.changed()

    def left(self) -> None:
        """An online request has left."""
        self._online -= 1
        self._left_at_s = self._clock.now_s()
        self.changed()

    @property
    def hold_left_s(self) -> float:
        """Seconds until lines stop to hold back, if nobody comes."""
        return max(0.0, self._left_at_s + self._usual_gap_s() - self._clock.now_s())

    def _usual_gap_s(self) -> float:
        """Return how long to hold back; found when it is asked for, since every online request changes it."""
        if self._hold_s is None:
            ranked = sorted(self._gaps)
            usual_s = ranked[min(len(ranked) - 1, int(len(ranked) * (1.0 - _SURPRISED)))]
            known = len(self._gaps) >= _KNOWN_GAPS
            self._hold_s = max(_MARGIN * usual_s, _LEAST_HOLD_S if known else _UNKNOWN_HOLD_S)
        return self._hold_s

    def allow(self, running: int) -> Allowance:
        """Say how many lines may run, of which `running` do."""
        room = _room(self._load())
        if not room.slots:
            return Allowance(0, beside=False, why="no replica is available")
        beside = self._online > 0 or self.hold_left_s > 0.0
        # What others have sent to a server that is not ours alone is told by that server only.
        taken = max(self._online, room.occupied - running)
        lines = min(room.slots - taken, self._beside(room) if beside else room.alone)
        lines = max(0, min(lines, self._concurrency) if self._concurrency else lines)
        why = "" if lines else ("online requests come first" if beside else "every slot is taken")
        return Allowance(lines, beside, why)

    def _beside(self, room: _Room) -> int:
        """Return with how many lines a step takes no longer than the operator lets it, beside online requests.

        A step of b sequences takes 1 + slope · (b − 1) of one alone (`SpeedPrior`).
        """
        online = math.ceil(max(1, self._online) / room.devices)
        if room.slope < _FLAT:
            return room.slots
        each = self._beside_slowdown * (1.0 / room.slope + online - 1)
        return room.devices * math.floor(each + 1e-9)


@dataclass(frozen=True, slots=True)
class _Room:
    """What the replicas can take together: slots belong to devices.

    Attributes:
        alone: sequences with which no device takes longer for a step than an online request may have to wait for it.
        slope: the steepest.
    """

    devices: int
    slots: int
    alone: int
    occupied: int
    slope: float


def _room(snapshots: Sequence[ReplicaSnapshot]) -> _Room:
    slots: dict[str, int] = {}
    alone: dict[str, int] = {}
    occupied, slope = 0, 0.0
    for snapshot in snapshots:
        if snapshot.available:
            device, prior = snapshot.info.device_key, snapshot.info.prior
            slots[device] = max(slots.get(device, 0), snapshot.slots)
            alone[device] = min(alone.get(device, snapshot.slots), _within_a_step(prior, snapshot.slots))
            occupied += snapshot.running + snapshot.queued
            slope = max(slope, prior.decode_batch_slope)
    return _Room(len(slots), sum(slots.values()), sum(alone.values()), occupied, slope)


def _within_a_step(prior: SpeedPrior, slots: int) -> int:
    """Return with how many sequences a step takes no longer than `_MOST_STEP_S`; one may always run."""
    if prior.decode_batch_slope < _FLAT:
        return slots
    beyond_first = (_MOST_STEP_S * prior.decode_tokens_per_s - 1.0) / prior.decode_batch_slope
    return max(1, min(slots, math.floor(1.0 + beyond_first)))


def spacing_s(allowance: Allowance) -> float:
    """Return seconds from one line to the next."""
    return _SPACING_S if allowance.beside else 0.0


def at_once(allowance: Allowance) -> int:
    """Return how many lines begin in one turn."""
    return 1 if allowance.beside else _AT_ONCE


def _nobody() -> None:
    """Nobody runs lines."""
