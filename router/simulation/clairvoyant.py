"""A schedule that knows every length, all noise and the future: what it keeps could be kept, so the best is no less.

Requests are inserted one by one, the highest value for each device-second first, on the first rung where they and all
that are in already keep their promises; then each moves to a better rung where that still holds. A device starts
whatever must start soonest whenever it has a slot, and runs as `router.simulation.device` says. Bodies travel as if
nobody else used the uplink.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from router.simulation.replica import Truth
from router.simulation.service import ServiceOptions, service_options
from router.simulation.values import SimRequest
from router.simulation.world import DeviceSpec, World

MAX_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request went, in the clairvoyant schedule."""

    request: int
    device: int
    rung: int
    value: float


class _Item(NamedTuple):
    """One request on one device; sorted by when its prompt is there.

    Attributes:
        must_start_s: when its prefill must begin at the latest.
        tau: length of its decode on the device's token clock.
    """

    begin_s: float
    option: int
    must_start_s: float
    prefill_s: float
    tau: float
    rung: int
    end_s: float
    spread_s: float


def clairvoyant_greedy(
    world: World, requests: Sequence[SimRequest], truths: Sequence[Truth], *, max_wait_s: float = MAX_WAIT_S
) -> tuple[Placed, ...]:
    """Return who is served where, all promises kept; in order of the requests."""
    options = service_options(world, requests, truths, late=False)
    items = _items(world, options, max_wait_s)
    plans = [_Plan(device) for device in world.devices]
    device, request, value = options.device.tolist(), options.request.tolist(), options.value.tolist()
    chosen: dict[int, int] = {}
    # The work of options that last no time at all is that of one microsecond.
    # The work of options that last no time at all is that of one microsecond.
    for option in np.argsort(-options.value / np.maximum(options.work_s, 1e-6), kind="stable").tolist():
        if request[option] not in chosen and plans[device[option]].change(None, items[option]):
            chosen[request[option]] = option
    for option in np.argsort(-options.value, kind="stable").tolist():
        now = chosen.get(request[option])
        if now is None or value[option] <= value[now]:
            continue
        here, there = plans[device[now]], plans[device[option]]
        if here is there:
            moved = here.change(items[now], items[option])
        elif moved := there.change(None, items[option]):
            # Without it others start sooner, and may be in one another's way where they were not.
            moved = here.change(items[now], None)
            if not moved:
                there.undo()
        if moved:
            chosen[request[option]] = option
    rung = options.rung.tolist()
    return tuple(Placed(j, device[o], rung[o], value[o]) for j, o in sorted(chosen.items()))


def _items(world: World, options: ServiceOptions, max_wait_s: float) -> list[_Item]:
    begin_s = options.begin_s
    must_start_s = np.minimum(options.prefill_end_s - options.prefill_s, begin_s + max_wait_s)
    step_s = np.array([world.devices[d].rungs[r].step_s(1) for d, r in zip(options.device, options.rung, strict=True)])
    columns = (
        begin_s,
        np.arange(len(options)),
        must_start_s,
        options.prefill_s,
        options.alone_s / step_s if len(options) else options.alone_s,
        options.rung,
        options.end_s,
        options.spread_s,
    )
    return [_Item(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


class _Plan:
    """What one device serves; every item in it keeps its promise."""

    def __init__(self, spec: DeviceSpec) -> None:
        self._spec = spec
        self._items: list[_Item] = []
        self._idle: list[float] = []  # begins of the items that find the device idle
        self._before: tuple[list[_Item], list[float]] = ([], [])
        self._rounds: dict[tuple[int, ...], float] = {}

    def change(self, out: _Item | None, into: _Item | None) -> bool:
        """Take items out and in, both of one begin; leave all as it is if anyone would be late then."""
        item = into or out
        if item is None:
            return True
        items = self._items.copy()
        if out is not None:
            del items[bisect.bisect_left(items, out)]
        if into is not None:
            bisect.insort(items, into)
        idle = self._idle
        kept = max(bisect.bisect_right(idle, item.begin_s) - 1, 0)
        start = bisect.bisect_left(items, (idle[kept],)) if idle and idle[kept] <= item.begin_s else 0
        later = set(idle[bisect.bisect_right(idle, item.begin_s) :])
        found = self._run(items, start, later)
        if found is None:
            return False
        begins_s, rejoined_s = found
        rest = [] if rejoined_s is None else idle[bisect.bisect_left(idle, rejoined_s) :]
        self._before = (self._items, self._idle)
        self._items, self._idle = items, idle[:kept] + begins_s + rest
        return True

    def undo(self) -> None:
        """Take the last change back."""
        self._items, self._idle = self._before

    def _run(self, items: list[_Item], at: int, later: set[float]) -> tuple[list[float], float | None] | None:
        """Serve items from position `at` on, which finds the device idle; None if one is late.

        Args:
            later: begins of items that found the device idle before; from there on nothing changes.

        Returns:
            begins of the items that find the device idle, and of the first among `later` where it did again.
        """
        replay, idle = _Replay(self._spec, self._rounds, items, at), list[float]()
        while replay.take_arrivals():
            if replay.waiting and len(replay.running) < self._spec.slots:
                in_time = replay.start()
            elif replay.running:
                in_time = replay.decode()
            else:
                begin_s = replay.jump()
                if begin_s in later:
                    return idle, begin_s
                idle.append(begin_s)
                continue
            if not in_time:
                return None
        return idle, None


class _Replay:
    """A device that serves items in order of when they must start; one prefill at a time, then decode for all."""

    __slots__ = (
        "_at",
        "_count",
        "_decoding",
        "_items",
        "_now_s",
        "_round_s",
        "_rounds",
        "_spec",
        "_tau",
        "running",
        "waiting",
    )

    def __init__(self, spec: DeviceSpec, rounds: dict[tuple[int, ...], float], items: list[_Item], at: int) -> None:
        self.waiting: list[tuple[float, int]] = []  # when it must start, position
        self.running: list[tuple[float, int, float]] = []  # end on the token clock, position, when the first token came
        self._spec, self._rounds, self._items, self._at, self._count = spec, rounds, items, at, len(items)
        self._decoding = [0] * len(spec.rungs)
        self._now_s = self._tau = self._round_s = 0.0

    def take_arrivals(self) -> bool:
        """Let everyone in who is there by now; return whether anything is left to do."""
        items, now_s = self._items, self._now_s
        while self._at < self._count and items[self._at].begin_s <= now_s:
            heapq.heappush(self.waiting, (items[self._at].must_start_s, self._at))
            self._at += 1
        return bool(self.waiting or self.running or self._at < self._count)

    def jump(self) -> float:
        """Go to the next arrival, idle until then."""
        self._now_s = self._items[self._at].begin_s
        return self._now_s

    def start(self) -> bool:
        """Prefill whoever must start soonest; return whether that is in time."""
        must_start_s, position = heapq.heappop(self.waiting)
        if self._now_s > must_start_s:
            return False
        item = self._items[position]
        self._now_s += item.prefill_s
        if item.tau:
            heapq.heappush(self.running, (self._tau + item.tau, position, self._now_s))
            self._decodes(item.rung, 1)
        return True

    def decode(self) -> bool:
        """Go on to the next end, or to the next arrival that has a slot; return whether all is in time."""
        if self.waiting and self.waiting[0][0] < self._now_s:
            return False
        done_tau, position, first_s = self.running[0]
        done_s = self._now_s + (done_tau - self._tau) * self._round_s
        if self._at < self._count and len(self.running) < self._spec.slots:
            begin_s = self._items[self._at].begin_s
            if begin_s < done_s:
                self._tau += (begin_s - self._now_s) / self._round_s
                self._now_s = begin_s
                return True
        heapq.heappop(self.running)
        self._now_s, self._tau = done_s, done_tau
        item = self._items[position]
        self._decodes(item.rung, -1)
        return done_s <= item.end_s and done_s - first_s <= item.spread_s

    def _decodes(self, rung: int, more: int) -> None:
        self._decoding[rung] += more
        key = tuple(self._decoding)
        round_s = self._rounds.get(key)
        if round_s is None:
            rungs = self._spec.rungs
            round_s = self._rounds[key] = sum(rungs[i].step_s(batch) for i, batch in enumerate(key) if batch)
        self._round_s = round_s
