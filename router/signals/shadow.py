"""An imagined tier: devices with continuous batching, on one rung of a family, that serve what the real tier is asked.

    round    = step · (1 + slope · (b − 1))    seconds of a decode step of b sequences
    dτ/dt    = 1 / round while no prompt is computed, else 0    the token clock of a device
    a sequence ends at τ_first + (tokens − 1) · noise

Prompts are computed one after the other and pause all decode. Those that find no slot wait; a slot that comes free goes
to who stands first by priority and by value a device-second, of those who may still begin. An answer ends at its
deadline. What keeps its promise gains its value. It is the model of `router.simulation.device` without its event loop:
some microseconds a request.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from router.values.offer import Ask, Offer

_MOST_WAITING: Final = 64
_DECIMALS: Final = 2  # values that differ by less count as equal: then the device goes before the cloud


class Drawn:
    """One newcomer with the chance that it meets in every imagined tier.

    Attributes:
        tokens: of its answer; prefill_noise, pace_noise: factors on what was predicted.
    """

    __slots__ = ("ask", "at_s", "pace_noise", "prefill_noise", "tokens")

    def __init__(self, ask: Ask, at_s: float, tokens: float, prefill_noise: float, pace_noise: float) -> None:
        self.ask = ask
        self.at_s = at_s
        self.tokens = tokens
        self.prefill_noise = prefill_noise
        self.pace_noise = pace_noise


class _Sequence:
    __slots__ = ("drawn", "first_s", "offer", "over", "prefill_s")

    def __init__(self, drawn: Drawn, offer: Offer, prefill_s: float) -> None:
        self.drawn = drawn
        self.offer = offer
        self.prefill_s = prefill_s
        self.first_s = 0.0
        self.over = False


_Event = tuple[float, int, _Sequence]


@dataclass(slots=True)
class _Device:
    """One imagined device.

    Attributes:
        held: slots that are taken; decoding: those that decode.
        prefills: whose prompts are being computed, the first of them with `prefill_left_s` to go.
        ends: by the token clock; deadlines: by time.
        next_s, next_of: time of the next event, and whose it is; as long as nothing begins or happens, that stands.
    """

    slots: int
    at_s: float
    held: int = 0
    decoding: int = 0
    step_s: float = 0.01
    slope: float = 0.0
    tau: float = 0.0
    prefill_left_s: float = 0.0
    prefills: deque[_Sequence] = field(default_factory=deque)
    ends: list[_Event] = field(default_factory=list)
    deadlines: list[_Event] = field(default_factory=list)
    order: int = 0
    next_s: float = math.inf
    next_of: _Sequence | None = None

    @property
    def backlog_s(self) -> float:
        """Prefill that comes before that of a newcomer."""
        if not self.prefills:
            return 0.0
        return self.prefill_left_s + sum([s.prefill_s for s in itertools.islice(self.prefills, 1, None)])

    def look_ahead(self) -> None:
        """Find the next event."""
        soonest_s, of, ends, deadlines = math.inf, None, self.ends, self.deadlines
        while ends and ends[0][2].over:
            heappop(ends)
        while deadlines and deadlines[0][2].over:
            heappop(deadlines)
        if self.prefills:
            left_s, of = self.prefill_left_s, self.prefills[0]
            soonest_s = self.at_s + left_s if left_s > 0.0 else self.at_s
        elif ends:
            due_tau, _, of = ends[0]
            left = due_tau - self.tau
            soonest_s = self.at_s + left * self._round_s() if left > 0.0 else self.at_s
        if deadlines and deadlines[0][0] < soonest_s:
            soonest_s, of = max(deadlines[0][0], self.at_s), deadlines[0][2]
        self.next_s, self.next_of = soonest_s, of

    def pass_to(self, now_s: float) -> None:
        passed_s = now_s - self.at_s
        self.at_s = now_s
        if self.prefills:
            self.prefill_left_s -= passed_s
        elif self.decoding:
            self.tau += passed_s / self._round_s()

    def begin(self, drawn: Drawn, offer: Offer, now_s: float) -> None:
        self.pass_to(now_s)
        sequence = _Sequence(drawn, offer, offer.prefill_s * drawn.prefill_noise)
        self.step_s, self.slope = offer.step_s, offer.slope
        self.held += 1
        self.prefills.append(sequence)
        if len(self.prefills) == 1:
            self.prefill_left_s = sequence.prefill_s
        last_s = drawn.at_s + drawn.ask.deadline_s + drawn.ask.late_s - offer.network_s
        if last_s < math.inf:
            self.order += 1
            heappush(self.deadlines, (last_s, self.order, sequence))
        self.look_ahead()

    def happen(self, sequence: _Sequence, now_s: float) -> bool:
        """Let the next event happen, which is this sequence's; return whether it came to its own end."""
        self.pass_to(now_s)
        ended = self._step(sequence, now_s)
        self.look_ahead()
        return ended

    def _step(self, sequence: _Sequence, now_s: float) -> bool:
        if self.deadlines and self.deadlines[0][2] is sequence and self.deadlines[0][0] <= now_s:
            self._cut(sequence)
            return False
        if self.prefills and self.prefills[0] is sequence:
            self._next_prefill()
            sequence.first_s = now_s
            if sequence.drawn.tokens > 1.0:
                self.decoding += 1
                self.order += 1
                ends_tau = self.tau + (sequence.drawn.tokens - 1.0) * sequence.drawn.pace_noise
                heappush(self.ends, (ends_tau, self.order, sequence))
                return False
        else:
            self.tau = max(self.tau, heappop(self.ends)[0])
            self.decoding -= 1
        sequence.over = True
        self.held -= 1
        return True

    def _cut(self, sequence: _Sequence) -> None:
        sequence.over = True
        self.held -= 1
        if sequence not in self.prefills:
            self.decoding -= 1
        elif self.prefills[0] is sequence:
            self._next_prefill()
        else:
            self.prefills.remove(sequence)

    def _next_prefill(self) -> None:
        self.prefills.popleft()
        self.prefill_left_s = self.prefills[0].prefill_s if self.prefills else 0.0

    def _round_s(self) -> float:
        return self.step_s * (1.0 + self.slope * (self.decoding - 1))


class _Place:
    """Where one that found no slot waits for a device.

    Attributes:
        until_s: when it may begin there at the latest.
    """

    __slots__ = ("offer", "priority", "rank", "until_s")

    def __init__(self, drawn: Drawn, offer: Offer) -> None:
        self.offer = offer
        self.priority = drawn.ask.priority
        self.rank = offer.rank
        self.until_s = drawn.at_s + offer.latest_s

    def goes_before(self, other: _Place) -> bool:
        if self.priority != other.priority:
            return self.priority > other.priority
        return self.rank > other.rank


class _Waiting:
    """One that found no slot.

    Attributes:
        places: by device.
        until_s: when it may begin nowhere any more.
    """

    __slots__ = ("drawn", "places", "until_s")

    def __init__(self, drawn: Drawn, offers: Mapping[str, Offer], now_s: float) -> None:
        self.drawn = drawn
        self.places = {name: _Place(drawn, offer) for name, offer in offers.items()}
        self.until_s = now_s + max([offer.latest_s for offer in offers.values()])


class ShadowTier:
    """One imagined tier.

    Args:
        rungs: device and family → the replica that it runs.

    Attributes:
        runs: the replicas among them.
        gain: value of what kept its promise; the owner lets it fade.
    """

    def __init__(self, rungs: Mapping[tuple[str, str], str]) -> None:
        self.rungs = rungs
        self.gain = 0.0
        self.runs = frozenset(rungs.values())
        self._devices: dict[str, _Device] = {}
        self._waiting: list[_Waiting] = []

    def arrive(self, drawn: Drawn, now_s: float) -> None:
        """Let a newcomer in: to the free device where it is worth most, or into the queue."""
        self._advance(now_s)
        offers, best = self._offers(drawn.ask.offers), None
        for name, offer in offers.items():
            device = self._devices.get(name)
            if device is None:
                device = self._devices[name] = _Device(offer.slots, now_s)
            if device.held < device.slots and device.backlog_s <= offer.latest_s:
                key = (round(offer.value * offer.kept, _DECIMALS), offer.local, offer.rank)
                if best is None or key > best[0]:
                    best = key, device, offer
        if best is not None:
            best[1].begin(drawn, best[2], now_s)
        elif offers:
            self._waiting.append(_Waiting(drawn, offers, now_s))
            del self._waiting[:-_MOST_WAITING]

    def _offers(self, offers: Sequence[Offer]) -> Mapping[str, Offer]:
        """Return one offer by device: of the rung that it runs, or where that cannot serve it, of another."""
        found: dict[str, Offer] = {}
        for offer in offers:
            if offer.device not in found or offer.replica_id in self.runs:
                found[offer.device] = offer
        return found

    def _advance(self, now_s: float) -> None:
        """Let all happen until now, in the order of time."""
        while True:
            soonest_s, name, of = now_s, "", None
            for candidate, device in self._devices.items():
                if device.next_s <= soonest_s and device.next_of is not None:
                    soonest_s, name, of = device.next_s, candidate, device.next_of
            if of is None:
                return
            device = self._devices[name]
            if device.happen(of, soonest_s):
                self.gain += _gain(of, soonest_s)
            if of.over:
                self._fill(name, device, soonest_s)

    def _fill(self, name: str, device: _Device, now_s: float) -> None:
        """Give free slots to who stands first."""
        while device.held < device.slots and self._waiting:
            begins_s, lost = now_s + device.backlog_s, False
            first: _Waiting | None = None
            foremost: _Place | None = None
            for waiting in self._waiting:
                if waiting.until_s < now_s:
                    lost = True
                    continue
                place = waiting.places.get(name)
                if place is None or begins_s > place.until_s:
                    continue
                if foremost is None or place.goes_before(foremost):
                    first, foremost = waiting, place
            if lost:
                self._waiting = [waiting for waiting in self._waiting if waiting.until_s >= now_s]
            if first is None or foremost is None:
                return
            self._waiting.remove(first)
            device.begin(first.drawn, foremost.offer, now_s)


def _gain(sequence: _Sequence, now_s: float) -> float:
    """Value of an answer whose last token came now."""
    drawn, offer = sequence.drawn, sequence.offer
    ask = drawn.ask
    if sequence.first_s + offer.network_s - drawn.at_s > ask.ttft_s:
        return 0.0
    if now_s - sequence.first_s > ask.tpot_s * (drawn.tokens - 1.0):
        return 0.0
    late_s = now_s + offer.network_s - drawn.at_s - ask.deadline_s
    if late_s <= 0.0:
        return offer.value
    return offer.value * (1.0 - late_s / ask.late_s) if late_s < ask.late_s else 0.0
