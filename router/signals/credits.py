"""Credits of admission: how many requests each instance of the tiers below may send here, and until when.

Thousands of devices whose link comes back at once all have work waiting, and each of them sees the same free slots. So
a tier hands its room out instead of showing it (the idea of Breakwater, Cho et al., OSDI 2020; the rules are our own):

    room = (free slots + target wait · slots / mean service time) · min(1, target wait / mean wait)
           − requests waiting − credits out

A credit is one request, and void after a while. Who wants some and finds no room gets a place in a line (`CreditLine`)
and a time to ask again; who stands so far in front that the room reaches it gets its credits, one being owed to each of
those ahead. What is left while nobody waits is handed out unasked, so that a small fleet need not ask first.

The target allows a backlog; while a line stands ready to refill it, half of that is enough. Of the room, a reserve is
for those that have requests of a priority above 0 waiting, once there are any; which of its requests a device sends
with a credit is its own queue's to say, and that puts these first.

Nothing here is enforced: the tier's own queue keeps its bounds, whatever devices do. All of it is arithmetic on the
tier's clock; nothing is drawn at random.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from itertools import count

from router.base.clock import Clock
from router.signals.credit_line import CreditLine
from router.values.credits import Asker, Grant, Room, Want
from router.values.settings import CreditSettings

_GAIN = 0.05  # of the moving means
_PRIOR_SERVICE_S = 1.0
_STALE_S = 1.0  # a mean wait that nobody has added to for so long halves, and again each time
_AGAIN_SHARE = 0.7  # of the expected wait: those in front may give up, and then it is shorter
_AGAIN_S = (0.1, 5.0)  # least; and most, where the fleet is small
_PATIENCE_S = 2.0  # who asks so much later than told has lost its place
_LINE_SHARE = 0.5  # of the backlog that the target allows, while a line stands ready to refill it
_URGENT_S = 60.0  # the reserve is kept for so long after the last that asked for it
_IDLE_SHARE = 0.5  # of the room, handed out before anybody wants it
_FORGET_S = 60.0  # an instance that is silent for so long shares the room no more


@dataclass(slots=True)
class CreditCounts:
    """What became of credits since the start; `unbacked` are requests of an instance that held none."""

    issued: int = 0
    spent: int = 0
    expired: int = 0
    returned: int = 0
    unbacked: int = 0


@dataclass(slots=True, eq=False)
class CreditBatch:
    """Credits that one asker got at once: how many are unused, and until when they hold."""

    until_s: float
    left: int


@dataclass(slots=True)
class _Instance:
    """What is known of one asker.

    Attributes:
        batches: what it may still use, the oldest first.
        due_s: it was told to ask again by then; watched: `_due` looks after that.
        turn: of its last credits, to come back with if they were lost on the way; returned: it has done so once.
    """

    seen_s: float
    batches: deque[CreditBatch] = field(default_factory=deque)
    due_s: float = math.inf
    watched: bool = False
    turn: int | None = None
    returned: bool = False

    @property
    def credits(self) -> int:
        return sum(batch.left for batch in self.batches)


class CreditIssuer:
    """One tier's pool of credits. Its dispatcher tells of waits and answers, its gateway of polls and requests.

    Attributes:
        outstanding: credits that were issued, and neither used nor void.
    """

    def __init__(self, settings: CreditSettings, clock: Clock) -> None:
        self.settings = settings
        self.counts = CreditCounts()
        self.outstanding = 0
        self._clock = clock
        self._clock_s = clock.now_s()
        self._set_back_s = 0.0
        self._instances: OrderedDict[Asker, _Instance] = OrderedDict()
        self._line = CreditLine()
        self._urgent_line = CreditLine()
        self._expiries: list[tuple[float, int, Asker, CreditBatch]] = []
        self._due: list[tuple[float, int, Asker]] = []
        self._numbers = count()
        self._service_s = _PRIOR_SERVICE_S
        self._served = 0
        self._wait_s = 0.0
        self._waited_at_s = self._clock_s
        self._urgent_at_s = -math.inf

    @property
    def instances(self) -> int:
        return len(self._instances)

    @property
    def in_line(self) -> int:
        return len(self._line) + len(self._urgent_line)

    def waited(self, wait_s: float) -> None:
        """A request left the tier's queue for a replica after so long."""
        now_s = self._now_s()
        mean_s = self._mean_wait_s(now_s)
        self._wait_s = mean_s + _GAIN * (max(wait_s, 0.0) - mean_s)
        self._waited_at_s = now_s

    def served(self, took_s: float) -> None:
        """A request gave its slot back after so long."""
        self._served += 1
        self._service_s += max(_GAIN, 1.0 / (self._served + 1)) * (max(took_s, 1e-3) - self._service_s)

    def ask(self, asker: Asker, want: Want, room: Room) -> Grant:
        """Say what an instance may send from now on, besides what it was granted before."""
        now_s = self._now_s()
        self._void(now_s)
        self._forget_silent(now_s)
        instance = self._seen(asker, now_s)
        if room.slots <= 0:
            return Grant(for_s=self._lifetime_s, again_s=self._most_again_s(), wait_s=self._most_again_s())
        missing = want.waiting - instance.credits
        if want.waiting <= 0:
            self._leave(asker)
            return self._unasked(asker, instance, room, now_s)
        if missing <= 0:  # what it was granted may have been lost on the way: then it is void before long
            void_s = max(instance.batches[0].until_s - now_s, _AGAIN_S[0])
            return Grant(for_s=self._lifetime_s, again_s=void_s, wait_s=0.0)
        urgent = min(missing, want.urgent) if asker.may_hurry else 0
        if urgent:
            self._urgent_at_s = now_s
        grant = self._in_turn(asker, instance, urgent or missing, room, now_s, urgent=urgent > 0)
        rest_waits = 0 < urgent == grant.credits < missing
        return replace(grant, again_s=_AGAIN_S[0]) if rest_waits else grant

    def used(self, asker: Asker) -> CreditBatch | None:
        """A request of an instance has arrived. Returns what its credit came from, None if it had none."""
        now_s = self._now_s()
        self._void(now_s)
        instance = self._instances.get(asker)
        if instance is None or not instance.batches:
            self.counts.unbacked += 1
            return None
        batch = instance.batches[0]
        batch.left -= 1
        if batch.left == 0:
            instance.batches.popleft()
        self.outstanding -= 1
        self.counts.spent += 1
        instance.turn = None
        return batch

    def returned(self, asker: Asker, batch: CreditBatch) -> None:
        """The request was refused before it cost anything: its credit is good again, for as long as it was to hold."""
        instance = self._instances.get(asker)
        if instance is None or batch.until_s <= self._now_s():
            return
        batch.left += 1
        if batch not in instance.batches:
            instance.batches.appendleft(batch)
        self.outstanding += 1
        self.counts.returned += 1

    # ── how much there is ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _lifetime_s(self) -> float:
        return self.settings.lifetime_ms / 1e3

    def _left(self, room: Room, *, urgent: bool) -> int:
        """Return how many more credits the room holds."""
        target_s = self.settings.queue_wait_target_ms / 1e3
        backlog = target_s * self._rate(room) * (_LINE_SHARE if self.in_line > 1 else 1.0)
        now_s = self._now_s()
        mean_s = self._mean_wait_s(now_s)
        pool = (room.free + backlog) * min(1.0, target_s / mean_s if mean_s > 0 else 1.0)
        if room.free > 0 and room.waiting == 0:
            pool = max(pool, 1.0)  # a tier that stands still learns nothing
        kept = 0
        if not urgent and now_s < self._urgent_at_s + _URGENT_S:
            kept = min(int(self.settings.reserve * room.slots), math.ceil(backlog / 2))
        return math.floor(pool) - kept - room.waiting - self.outstanding

    def _rate(self, room: Room) -> float:
        """Return how many requests a second the slots serve."""
        return room.slots / self._service_s

    def _mean_wait_s(self, now_s: float) -> float:
        return self._wait_s * float(0.5 ** max(0.0, (now_s - self._waited_at_s) / _STALE_S - 1.0))

    def _most_again_s(self) -> float:
        """Return the longest time between two polls of one instance: all of them together keep to `asks_per_s`."""
        return max(_AGAIN_S[1], len(self._instances) / self.settings.asks_per_s)

    # ── who gets it ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _unasked(self, asker: Asker, instance: _Instance, room: Room, now_s: float) -> Grant:
        """Top up an instance that wants nothing yet, while nobody stands in line."""
        instance.turn, instance.due_s = None, math.inf
        left = 0 if self.in_line else self._left(room, urgent=False)
        share = int(_IDLE_SHARE * (left + instance.credits) / len(self._instances))
        given = max(0, min(share - instance.credits, left))
        self._give(asker, instance, given, now_s)
        again_s = len(self._instances) / self.settings.asks_per_s
        wait_s = max(0.0, (1 - left) / self._rate(room))
        return Grant(credits=given, for_s=self._lifetime_s, again_s=again_s, wait_s=wait_s)

    def _in_turn(
        self, asker: Asker, instance: _Instance, wanted: int, room: Room, now_s: float, *, urgent: bool
    ) -> Grant:
        """Give what lies within the room, or a place in the line."""
        line, other = (self._urgent_line, self._line) if urgent else (self._line, self._urgent_line)
        other.leave(asker)
        if asker not in line:
            instance.returned = instance.turn is not None and not instance.returned
            line.join(asker, instance.turn if instance.returned else None)
        before = line.ahead(asker)
        left = self._left(room, urgent=urgent) - before - (0 if urgent else len(self._urgent_line))
        given = 0
        if left > 0:
            behind = len(line) - before - 1
            given = min(wanted, max(1, left // (behind + 1)))
            instance.turn = line.granted(asker, given)
            self._give(asker, instance, given, now_s)
            left -= given
            if given < wanted:
                line.join(asker)
                left -= len(line)
        again_s, wait_s = len(self._instances) / self.settings.asks_per_s, 0.0
        if given < wanted:
            wait_s = max(0.0, (1 - left) / self._rate(room))
            again_s = min(max(_AGAIN_SHARE * wait_s, _AGAIN_S[0]), self._most_again_s())
            self._expect(asker, instance, now_s + again_s + _PATIENCE_S + again_s / 2)
        return Grant(given, for_s=self._lifetime_s, again_s=again_s, wait_s=wait_s)

    def _give(self, asker: Asker, instance: _Instance, given: int, now_s: float) -> None:
        if given <= 0:
            return
        batch = CreditBatch(now_s + self._lifetime_s, given)
        instance.batches.append(batch)
        heapq.heappush(self._expiries, (batch.until_s, next(self._numbers), asker, batch))
        self.outstanding += given
        self.counts.issued += given

    def _leave(self, asker: Asker) -> None:
        self._line.leave(asker)
        self._urgent_line.leave(asker)

    # ── what passes with time ───────────────────────────────────────────────────────────────────────────────────────

    def _now_s(self) -> float:
        """Return a time that never goes back: where the clock does, it goes on from where it was."""
        clock_s = self._clock.now_s()
        if clock_s < self._clock_s:
            self._set_back_s += self._clock_s - clock_s
        self._clock_s = clock_s
        return clock_s + self._set_back_s

    def _void(self, now_s: float) -> None:
        """Take back what was not used in time, and the places of those that did not come."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, _, asker, batch = heapq.heappop(self._expiries)
            self.outstanding -= batch.left
            self.counts.expired += batch.left
            batch.left = 0
            instance = self._instances.get(asker)
            if instance is not None and batch in instance.batches:
                instance.batches.remove(batch)
        while self._due and self._due[0][0] <= now_s:
            _, _, asker = heapq.heappop(self._due)
            instance = self._instances.get(asker)
            if instance is None:
                continue
            instance.watched = False
            if instance.due_s <= now_s:
                self._leave(asker)
            elif instance.due_s < math.inf:
                self._expect(asker, instance, instance.due_s)

    def _expect(self, asker: Asker, instance: _Instance, due_s: float) -> None:
        instance.due_s = due_s
        if not instance.watched:  # one entry an instance, however often it asks
            instance.watched = True
            heapq.heappush(self._due, (due_s, next(self._numbers), asker))

    def _seen(self, asker: Asker, now_s: float) -> _Instance:
        instance = self._instances.get(asker)
        if instance is None:
            instance = self._instances[asker] = _Instance(now_s)
            if len(self._instances) > self.settings.max_instances:
                self._forget_oldest()
        instance.seen_s = now_s
        self._instances.move_to_end(asker)
        return instance

    def _forget_silent(self, now_s: float) -> None:
        silent_s = max(_FORGET_S, 4 * self._most_again_s())
        while self._instances and next(iter(self._instances.values())).seen_s < now_s - silent_s:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forget an instance; what it holds counts until it is void."""
        asker, _ = self._instances.popitem(last=False)
        self._leave(asker)
