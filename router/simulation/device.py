"""A simulated device with continuous batching, shared by its rungs; event-driven, O(log n) an event.

    round  = Σ over rungs with b > 0 running sequences of step · (1 + slope · (b − 1))   seconds of decode for everyone
    dτ/dt  = speed / round while no prefill runs, else decode_share · that                the token clock of the device
    a sequence has its k-th token at τ_first + (k − 1) · noise

Prefills run one after the other: at full speed where nobody decodes, else at `prefill_share` of it. By default a
prefill has the device for itself and pauses all decode. A request holds a slot from its prefill to its end; beyond the
slots, requests wait inside the device, first come, first served. While another device of its machine computes, all that
a device does takes 1 / beside as long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Final

from router.simulation.loop import VirtualLoop, VirtualTimer
from router.simulation.world import DeviceSpec

CHUNK_RATIO: Final = 1.5
"""Ratio of the token counts at which two chunks of an answer follow each other, after the first token by itself."""
_LEAST_CHUNK_TOKENS: Final = 8


class Work:
    """One request on a device.

    Attributes:
        rung: position among the device's rungs.
        prefill_s: seconds of prefill at full speed, its noise included.
        tokens: how many it generates here.
        noise: factor on its decode pace.
        deliver: called with the tokens that are new; the last call brings the count to `tokens`.
        out: how many it has generated; due: how many it will have with the next chunk.
    """

    __slots__ = ("deliver", "due", "left", "noise", "out", "prefill_s", "rung", "started", "tau_first", "tokens")

    def __init__(self, rung: int, prefill_s: float, tokens: int, noise: float, deliver: Callable[[int], None]) -> None:
        self.rung = rung
        self.prefill_s = prefill_s
        self.tokens = tokens
        self.noise = noise
        self.deliver = deliver
        self.out = self.due = 0
        self.tau_first = 0.0
        self.started = False
        self.left = False

    def next_count(self) -> int:
        """Return the count of tokens at which the next chunk ends."""
        return min(max(self.out + _LEAST_CHUNK_TOKENS, math.ceil(self.out * CHUNK_RATIO)), self.tokens)


class Device:
    """Runs the work of all its rungs. Call it on the event loop whose time it keeps.

    Attributes:
        busy_s: seconds in which it computed.
        most_running: the most slots that were ever held.
        loop: the event loop that it runs on.
    """

    def __init__(self, spec: DeviceSpec, loop: VirtualLoop) -> None:
        self.spec = spec
        self.busy_s = 0.0
        self.most_running = 0
        self.loop = loop
        self._speed = 1.0
        self._computing = False
        self._held = 0
        self._waiting: deque[Work] = deque()
        self._prefills: deque[Work] = deque()
        self._prefill_left_s = 0.0
        self._decoding = [0] * len(spec.rungs)
        self._events: list[tuple[float, int, Work]] = []
        self._order = count()
        self._tau = 0.0
        self._round_s = 0.0  # 0: nobody decodes
        self._at_s = loop.now_s
        self._timer: VirtualTimer | None = None
        self._due_s = math.inf
        self._prefill_due = False  # what the timer is set to
        self._prefill_rate = 0.0
        self._decode_rate = 0.0
        self._neighbours: Sequence[Device] = ()

    @property
    def held(self) -> int:
        """Slots that are taken."""
        return self._held

    @property
    def waiting(self) -> int:
        """Requests that wait inside for a slot."""
        return len(self._waiting)

    @property
    def computing(self) -> bool:
        return self._computing

    @property
    def decoding(self) -> Sequence[int]:
        """Sequences that decode, by rung."""
        return self._decoding

    def enter(self, work: Work) -> None:
        """Take a request in."""
        if work.left:  # its caller went while it was on its way
            return
        self._settle()
        if self._held < self.spec.slots:
            self._start(work)
        else:
            self._waiting.append(work)
        self._arrange()

    def leave(self, work: Work) -> None:
        """Take a request out, wherever it is; one that is over, or not here yet, is only marked."""
        if work.left:
            return
        work.left = True
        if work.started:
            self._settle()
            if work.out == 0:
                first = self._prefills[0] is work
                self._prefills.remove(work)
                if first:
                    self._next_prefill()
            else:
                self._stop_decoding(work)
            self._release()
            self._arrange()
        elif work in self._waiting:
            self._waiting.remove(work)

    def set_speed(self, speed: float) -> None:
        """Run at `speed` times the speed of the specification from now on; 0 stands still."""
        self._settle()
        self._speed = speed
        self._arrange()

    def share_machine(self, neighbours: Sequence[Device]) -> None:
        """Be slowed down by other devices while they compute; each of them has to be told of this one too."""
        self._neighbours = neighbours

    def _neighbour_turned(self) -> None:
        self._settle()
        self._arrange()

    def _start(self, work: Work) -> None:
        work.started = True
        self._held += 1
        self.most_running = max(self.most_running, self._held)
        self._prefills.append(work)
        if len(self._prefills) == 1:
            self._next_prefill()

    def _next_prefill(self) -> None:
        self._prefill_left_s = self._prefills[0].prefill_s if self._prefills else 0.0

    def _release(self) -> None:
        self._held -= 1
        while self._waiting and self._held < self.spec.slots:
            self._start(self._waiting.popleft())

    def _stop_decoding(self, work: Work) -> None:
        self._decoding[work.rung] -= 1
        self._set_round()

    def _set_round(self) -> None:
        rungs = self.spec.rungs
        self._round_s = sum([rungs[i].step_s(batch) for i, batch in enumerate(self._decoding) if batch])

    def _settle(self) -> None:
        """Bring prefill and token clock to the present."""
        now_s = self.loop.now_s
        passed_s = now_s - self._at_s
        self._at_s = now_s
        if passed_s <= 0.0:
            return
        if self._computing:
            self.busy_s += passed_s
            self._prefill_left_s -= passed_s * self._prefill_rate
            if self._decode_rate:
                self._tau += passed_s * self._decode_rate / self._round_s

    def _set_rates(self) -> bool:
        """Set how fast prefills and decode go from now on; return whether it began or ceased to compute."""
        before, spec, speed = self._computing, self.spec, self._speed
        if self._neighbours and any(neighbour.computing for neighbour in self._neighbours):
            speed *= spec.beside
        if not self._prefills:
            self._prefill_rate, self._decode_rate = 0.0, speed if self._round_s else 0.0
        elif not self._round_s:
            self._prefill_rate, self._decode_rate = speed, 0.0
        else:
            self._prefill_rate, self._decode_rate = speed * spec.prefill_share, speed * spec.decode_share
        self._computing = self._prefill_rate > 0.0 or self._decode_rate > 0.0
        return self._computing is not before

    def _arrange(self) -> None:
        """Set the one timer to the next event."""
        events = self._events
        while events and events[0][2].left:
            heappop(events)
        turned = self._set_rates()
        prefill_s = chunk_s = math.inf
        if self._prefill_rate > 0:
            prefill_s = self._at_s + max(self._prefill_left_s, 0.0) / self._prefill_rate
        if self._decode_rate > 0 and events:
            chunk_s = self._at_s + max(events[0][0] - self._tau, 0.0) * self._round_s / self._decode_rate
        self._prefill_due = prefill_s <= chunk_s
        due_s = min(prefill_s, chunk_s)
        if due_s != self._due_s:
            if self._timer is not None:
                self._timer.cancel()
            self._due_s = due_s
            self._timer = self.loop.call_at(due_s, self._happen) if due_s < math.inf else None
        if turned:
            for neighbour in self._neighbours:
                neighbour._neighbour_turned()  # noqa: SLF001 (of the same class)

    def _happen(self) -> None:
        self._timer, self._due_s = None, math.inf
        self._settle()
        if self._prefill_due:
            self._end_prefill()
        else:
            self._emit_due()
        self._arrange()

    def _end_prefill(self) -> None:
        work = self._prefills.popleft()
        self._next_prefill()
        work.tau_first = self._tau
        work.out = 1
        self._decoding[work.rung] += 1
        if work.tokens == 1:
            self._finish(work)
        else:
            self._set_round()
            self._schedule(work)
        work.deliver(1)

    def _emit_due(self) -> None:
        """Hand out the chunks whose time has come; the first is due by the timer, whatever the rounding says."""
        events = self._events
        tau = self._tau = max(self._tau, events[0][0])
        while events and events[0][0] <= tau:
            work = heappop(events)[2]
            if work.left:
                continue
            before, work.out = work.out, work.due
            if work.out == work.tokens:
                self._finish(work)
            else:
                self._schedule(work)
            work.deliver(work.out - before)

    def _schedule(self, work: Work) -> None:
        work.due = work.next_count()
        due_tau = work.tau_first + (work.due - 1) * work.noise
        heappush(self._events, (due_tau, next(self._order), work))

    def _finish(self, work: Work) -> None:
        work.left = True
        self._stop_decoding(work)
        self._release()
