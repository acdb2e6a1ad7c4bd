"""How many lines may run now: what online requests leave free, with a margin, and none while they could feel it.

A line that runs delays an online request by the step it is in, and slows it down afterwards. While there are online
requests, only so many lines run as slow these down by a share that the operator set; when one comes, what runs beyond
that is held up with all that it has, where every replica that generates can do that, or else stopped and run again
later. After the last online request lines hold back for as long as the next one usually takes to come: of the arrivals
lately, no more than one in fifty shall find the device full of lines. Gaps of more than ten seconds are not waited for:
traffic that sparse would let no line run at all. So a step of lines alone is short: a tenth of a second, and where many
arrivals find one, a fifth of what their first tokens take.

An engine that holds lines up and leaves the step that they are in has no such bound, and nothing is held back for who
may come: its lines run whenever nobody else is there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.base.clock import Clock
from router.jobs.arrivals import Arrivals
from router.values.replica import ReplicaInfo, ReplicaSnapshot
from router.values.task import Task

_MOST_STEP_S = 0.1  # an online request that comes waits for the step that it finds
_MOST_WAIT = 0.2  # of its first token's time, where many find one
_TINY_S = 1e-9
_FLAT = 1e-6  # a slope below it is none
_SPACING_S = 0.1  # between lines begun beside online requests: the door that both come through is one
_AT_ONCE = 4  # lines begun in one turn of the event loop


class Replicas(Protocol):
    """What computes lines, and how fast."""

    def load(self) -> Sequence[ReplicaSnapshot]:
        """Return a snapshot of every replica."""
        ...

    def step_s(self, info: ReplicaInfo, batch: int, slots: int) -> float:
        """Return the seconds of one decode step of so many sequences, as far as is known."""
        ...

    def limit_lines(self, lines: int | None) -> None:
        """Let each replica that can hold lines up compute so many; see `router.values.replica.HoldsUp`."""
        ...


@dataclass(frozen=True, slots=True)
class Allowance:
    """What may run.

    Attributes:
        lines: at once; no further one begins.
        keep: of those that run, how many may go on; the others are to be stopped.
        computed: of those that go on, how many each replica that holds lines up computes; None: all of them, while it
            has no other request.
        held_up: how many of those that go on are not computed now.
        beside: there are online requests, or there will soon be: the next line begins with some spacing.
        why: nothing more may, in a few words; empty while something may.
    """

    lines: int
    keep: int
    beside: bool
    why: str = ""
    computed: int | None = None
    held_up: int = 0


class Slack:
    """Told of every online request; asked by what runs lines. On the event loop.

    Args:
        changed: called when an online request came or left.
    """

    def __init__(self, replicas: Replicas, clock: Clock, concurrency: int, beside_slowdown: float) -> None:
        self.changed: Callable[[], None] = _nobody
        self._replicas = replicas
        self._clock = clock
        self._concurrency = concurrency
        self._beside_slowdown = beside_slowdown
        self._arrivals = Arrivals()

    @property
    def online(self) -> int:
        """Online requests inside the tier."""
        return self._arrivals.online

    def came(self) -> None:
        """An online request came in."""
        self._arrivals.came(self._clock.now_s())
        self.changed()

    def first_token(self, after_s: float) -> None:
        """An online request has its first token."""
        self._arrivals.first_token(after_s)

    def left(self) -> None:
        """An online request has left."""
        self._arrivals.left(self._clock.now_s())
        self.changed()

    @property
    def hold_left_s(self) -> float:
        """Seconds until lines stop to hold back, if nobody comes."""
        return self._arrivals.hold_left_s(self._clock.now_s())

    def limit(self, allowance: Allowance) -> None:
        """Have as many lines computed as that says, where lines are held up."""
        self._replicas.limit_lines(allowance.computed)

    def allow(self, running: int) -> Allowance:
        """Say how many lines may run, of which `running` do."""
        room = self._room()
        if not room.slots:
            return Allowance(0, 0, beside=False, why="no replica is available")
        beside = self.online > 0 or (self.hold_left_s > 0.0 and not room.lets_go)
        # What others have sent to a server that is not ours alone is told by that server only.
        taken = max(self.online, room.occupied - (0 if room.holds_up else running))
        most = self._concurrency or room.slots
        free = max(0, min(room.slots - taken, most))
        beside_them = self._beside(room) if beside else 0
        lines = min(free, beside_them if beside else room.alone)
        why = "" if lines else ("online requests come first" if beside else "every slot is taken")
        if room.holds_up and beside:
            computed = beside_them // room.devices
            return Allowance(lines, most, beside, why, computed, max(0, min(running, most) - computed * room.devices))
        if room.holds_up:
            return Allowance(lines, most, beside, why)
        # What is known of speeds changes all the time: for that alone nothing is stopped.
        return Allowance(lines, lines if beside else free, beside, why)

    def _beside(self, room: _Room) -> int:
        """Return with how many lines a step takes no longer than the operator lets it, beside online requests.

        A step of b sequences takes 1 + slope · (b − 1) of one alone (`SpeedPrior`). A CPU has nothing to spare beside
        them, whatever a few sequences at its start have shown; where lines are held up and let go of at once, the time
        when nobody is there is enough.
        """
        if room.lets_go:
            return 0
        online = math.ceil(max(1, self.online) / room.devices)
        if room.slope < _FLAT:
            return room.slots
        each = self._beside_slowdown * (1.0 / room.slope + online - 1)
        return room.devices * math.floor(each + 1e-9)

    def _room(self) -> _Room:
        slots: dict[str, int] = {}
        alone: dict[str, int] = {}
        occupied, slope, most_s = 0, 0.0, self._most_step_s()
        available = [snapshot for snapshot in self._replicas.load() if snapshot.available]
        for snapshot in available:
            device = snapshot.info.device_key
            slots[device] = max(slots.get(device, 0), snapshot.slots)
            alone[device] = min(alone.get(device, snapshot.slots), self._within(most_s, snapshot))
            occupied += snapshot.running + snapshot.queued
            slope = max(slope, snapshot.info.prior.decode_batch_slope)
        # What generates nothing is done with a line in milliseconds.
        generating = [snapshot.info for snapshot in available if Task.GENERATE in snapshot.info.tasks]
        holds_up = bool(generating) and all(info.holds_up for info in generating)
        lets_go = holds_up and all(info.leaves_steps for info in generating)
        return _Room(len(slots), sum(slots.values()), sum(alone.values()), occupied, slope, holds_up, lets_go)

    def _most_step_s(self) -> float:
        """Return what a step of lines alone may take."""
        first_token_s = self._arrivals.usual_first_token_s(self._clock.now_s())
        return _MOST_STEP_S if first_token_s is None else min(_MOST_STEP_S, _MOST_WAIT * first_token_s)

    def _within(self, most_s: float, snapshot: ReplicaSnapshot) -> int:
        """Return with how many sequences a step takes no longer than that; one may always run."""
        if snapshot.info.leaves_steps:
            return snapshot.slots

        def step_s(lines: int) -> float:
            return self._replicas.step_s(snapshot.info, lines, snapshot.slots) - _TINY_S

        return max(1, bisect_right(range(1, snapshot.slots + 1), most_s, key=step_s))


@dataclass(frozen=True, slots=True)
class _Room:
    """What the replicas can take together: slots belong to devices.

    Attributes:
        alone: sequences with which no device takes longer for a step than an online request may have to wait for it.
        slope: the steepest.
        occupied: by whom; lines that are held up for others are not among them.
        holds_up: whatever generates holds lines up for others; lets_go: and leaves the step that they are in.
    """

    devices: int
    slots: int
    alone: int
    occupied: int
    slope: float
    holds_up: bool
    lets_go: bool


def spacing_s(allowance: Allowance) -> float:
    """Return seconds from one line to the next."""
    return _SPACING_S if allowance.beside else 0.0


def at_once(allowance: Allowance) -> int:
    """Return how many lines begin in one turn."""
    return 1 if allowance.beside else _AT_ONCE


def _nobody() -> None:
    """Nobody runs lines."""
