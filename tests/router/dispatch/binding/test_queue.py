"""The queue: who goes first at a replica, who is looked at again, who is turned away."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.base.errors import Unavailable
from router.dispatch.assessment.pending import PendingRequest
from router.dispatch.binding.queue import QueueEntry, RequestQueue
from router.dispatch.records.record import DecisionRecord
from router.signals.length import LengthWatch
from router.values.length import LengthCurve
from router.values.settings import Fairness, RouterSettings
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import request

A, B = "local/a", "local/b"


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def entry(
    clock: VirtualClock, age_s: float = 0.0, *, priority: int = 0, continuing: bool = False, caller: str = ""
) -> QueueEntry:
    tokens = 4 if continuing else 0
    asked = request(clock, accepted_at_s=1000.0 - age_s, priority=priority, continuation_tokens=tokens, caller=caller)
    watch = LengthWatch([], LengthCurve.exactly(10), None, math.inf)
    pending = PendingRequest(asked, {}, wait_until_s=math.inf, length=watch)
    return QueueEntry(pending, DecisionRecord.of(asked, "slo-utility"), clock.now_s())


def put(queue: RequestQueue, one: QueueEntry, rank: float = 0.0, look_again_s: float = math.inf) -> QueueEntry:
    queue.enter(one)
    queue.place(one, {A: rank}, look_again_s)
    return one


def drained(queue: RequestQueue, replica_id: str = A) -> list[QueueEntry]:
    """Take whoever stands first until nobody waits there."""
    order = []
    while (first := queue.first(replica_id)) is not None:
        order.append(first[1])
        queue.leave(first[1])
    return order


async def test_a_begun_answer_then_priority_then_rank_then_age(clock: VirtualClock) -> None:
    queue = RequestQueue()
    poor, old, rich = put(queue, entry(clock), 1.0), put(queue, entry(clock, 9.0), 2.0), put(queue, entry(clock), 3.0)
    young = put(queue, entry(clock), 2.0)
    important = put(queue, entry(clock, priority=2), -5.0)
    begun = put(queue, entry(clock, priority=-1, continuing=True), -9.0)
    assert drained(queue) == [begun, important, rich, old, young, poor]
    assert len(queue) == 0


async def test_a_newcomer_stands_in_the_same_order_as_everyone(clock: VirtualClock) -> None:
    queue = RequestQueue()
    for _ in range(60):
        put(queue, entry(clock, 5.0), 1.0)
    newcomer = put(queue, entry(clock), 1.5)
    first = queue.first(A)
    assert first is not None
    assert first[1] is newcomer


async def test_of_equals_nobody_loses_their_place_by_being_decided_again(clock: VirtualClock) -> None:
    queue = RequestQueue()
    one, other = put(queue, entry(clock), 1.0), put(queue, entry(clock), 1.0)
    queue.place(one, {A: 1.0}, math.inf)
    assert drained(queue) == [one, other]


async def test_each_replica_has_its_own_order(clock: VirtualClock) -> None:
    queue = RequestQueue()
    one, other = entry(clock), entry(clock)
    for waiting, ranks in ((one, {A: 1.0, B: 5.0}), (other, {A: 2.0, B: 4.0})):
        queue.enter(waiting)
        queue.place(waiting, ranks, math.inf)
    at_a, at_b = queue.first(A), queue.first(B)
    assert at_a is not None
    assert at_b is not None
    assert (at_a[1], at_b[1]) == (other, one)
    assert queue.first("local/nobody-waits-here") is None


async def test_only_the_newest_place_counts(clock: VirtualClock) -> None:
    queue = RequestQueue()
    one, other = put(queue, entry(clock), 9.0, look_again_s=3.0), put(queue, entry(clock), 5.0)
    queue.place(one, {B: 1.0}, 7.0)
    assert drained(queue, A) == [other], "its place at A is void"
    assert queue.next_due_s() == 7.0, "and so is the time of that place"
    first = queue.first(B)
    assert first is not None
    assert first[1] is one
    queue.displace(one)
    assert (queue.first(B), queue.next_due_s(), len(queue)) == (None, math.inf, 1), "it stays in the queue"


@pytest.mark.parametrize("end", ["bound", "cancelled"])
async def test_who_was_bound_or_left_stands_nowhere(clock: VirtualClock, end: str) -> None:
    queue = RequestQueue()
    one, other = put(queue, entry(clock), 9.0, look_again_s=1.0), put(queue, entry(clock), 5.0, look_again_s=2.0)
    if end == "bound":
        one.bound.set_exception(Unavailable("gone", retry_after_s=1.0))
        one.bound.exception()
    else:
        one.bound.cancel()
    first = queue.first(A)
    assert first is not None
    assert first[1] is other
    assert list(queue) == [other]
    assert queue.pop_due(5.0) is other


async def test_the_due_come_in_order_of_time_and_not_before(clock: VirtualClock) -> None:
    queue = RequestQueue()
    late, soon, never = (put(queue, entry(clock), look_again_s=due_s) for due_s in (7.0, 3.0, math.inf))
    assert queue.next_due_s() == 3.0
    assert queue.pop_due(2.9) is None
    assert queue.pop_due(3.0) is soon
    assert queue.pop_due(100.0) is late
    assert queue.pop_due(1e12) is None
    assert sorted(map(id, queue)) == sorted(map(id, (late, soon, never))), "all of them still wait"


async def test_those_ahead_are_counted_by_priority_and_replica(clock: VirtualClock) -> None:
    queue = RequestQueue()
    waiting = [put(queue, entry(clock, priority=priority)) for priority in (-1, 0, 0, 3)]
    assert [queue.ahead(A, priority) for priority in (4, 3, 1, 0, -1)] == [0, 1, 1, 3, 4]
    assert queue.ahead(B, -9) == 0
    queue.place(waiting[3], {B: 1.0}, math.inf)
    assert (queue.ahead(A, 0), queue.ahead(B, 0)) == (2, 1)
    for one in waiting:
        queue.leave(one)
        queue.leave(one)
    assert (queue.ahead(A, -9), queue.ahead(B, -9), len(queue)) == (0, 0, 0), "leaving twice is leaving once"


async def test_the_one_of_least_priority_and_rank_is_crowded_out(clock: VirtualClock) -> None:
    queue, bounds = RequestQueue(), RouterSettings(max_queue=3, max_sheddable_queue=3)
    low = put(queue, entry(clock, 9.0), 1.0)
    high, important = put(queue, entry(clock), 5.0), put(queue, entry(clock, priority=1), 0.1)
    assert queue.crowded_out(bounds) is None
    newcomer = put(queue, entry(clock), 3.0)
    assert queue.crowded_out(bounds) is low, "not the newcomer, and not the one of least rank but more priority"
    queue.leave(low)
    assert queue.crowded_out(bounds) is None
    worse = put(queue, entry(clock), 2.0)
    assert queue.crowded_out(bounds) is worse
    queue.leave(worse)
    assert sorted(map(id, queue)) == sorted(map(id, (high, important, newcomer)))


async def test_where_callers_share_one_who_holds_most_places_is_crowded_out(clock: VirtualClock) -> None:
    queue, shares = RequestQueue(), RouterSettings(max_queue=3, max_sheddable_queue=3)
    alone = msgspec.structs.replace(shares, fairness=Fairness(callers=0.0))
    flood = [put(queue, entry(clock, caller="flood"), 5.0 + number) for number in range(3)]
    small = put(queue, entry(clock, caller="small"), 1.0)
    assert queue.crowded_out(alone) is small
    assert queue.crowded_out(shares) is flood[0], "the least of those of who holds more than half of the places"
    queue.leave(flood[0])
    urgent = put(queue, entry(clock, caller="flood", priority=1), 1.0)
    assert queue.crowded_out(shares) is flood[1], "of the least priority"
    for one in (urgent, flood[1], flood[2]):
        queue.leave(one)
    assert queue.crowded_out(shares) is None


async def test_of_equals_the_newest_is_crowded_out(clock: VirtualClock) -> None:
    """Also of those that came in the same instant."""
    queue, bounds = RequestQueue(), RouterSettings(max_queue=3, max_sheddable_queue=3)
    waiting = [put(queue, entry(clock)) for _ in range(4)]
    assert queue.crowded_out(bounds) is waiting[-1]
    older = put(queue, entry(clock, 3.0))
    assert queue.crowded_out(bounds) is waiting[-1], "older, though it entered later"
    queue.leave(older)


async def test_its_best_rank_speaks_for_an_entry(clock: VirtualClock) -> None:
    queue, bounds = RequestQueue(), RouterSettings(max_queue=1, max_sheddable_queue=1)
    good_at_b, even = entry(clock), entry(clock)
    for one, ranks in ((good_at_b, {A: 1.0, B: 9.0}), (even, {A: 5.0, B: 5.0})):
        queue.enter(one)
        queue.place(one, ranks, math.inf)
    assert queue.crowded_out(bounds) is even


async def test_sheddable_work_has_a_bound_of_its_own(clock: VirtualClock) -> None:
    queue, bounds = RequestQueue(), RouterSettings(max_queue=3, max_sheddable_queue=1)
    first = put(queue, entry(clock, 2.0, priority=-1), 1.0)
    assert queue.crowded_out(bounds) is None
    second = put(queue, entry(clock, 1.0, priority=-1), 2.0)
    assert queue.crowded_out(bounds) is first
    queue.leave(first)
    for _ in range(3):
        put(queue, entry(clock))
    assert queue.crowded_out(bounds) is second, "before anybody of priority 0"


async def test_who_already_began_is_never_turned_away_for_a_newcomer(clock: VirtualClock) -> None:
    queue, bounds = RequestQueue(), RouterSettings(max_queue=1, max_sheddable_queue=1)
    put(queue, entry(clock, priority=-5, continuing=True))
    newcomer = put(queue, entry(clock, priority=5), 100.0)
    assert queue.crowded_out(bounds) is newcomer


async def test_no_void_places_are_left(clock: VirtualClock) -> None:
    queue, rng = RequestQueue(), random.Random(1)
    waiting = [put(queue, entry(clock), look_again_s=1.0) for _ in range(20)]
    for _ in range(5000):
        queue.place(rng.choice(waiting), {A: rng.random(), B: rng.random()}, rng.random())
    kept = [*queue._lines[A].places, *queue._lines[B].places, *queue._due.places]
    assert len(kept) <= 3 * 20


async def test_a_rank_that_is_no_number_disturbs_nobody(clock: VirtualClock) -> None:
    queue = RequestQueue()
    odd = [put(queue, entry(clock), rank) for rank in (1.0, math.nan, 3.0, math.nan, 2.0)]
    for one in odd:
        queue.leave(one)
    assert not queue._lines[A].places


@dataclass
class Listed:
    """What the queue does, as a list that is sorted at each question."""

    places: dict[QueueEntry, tuple[dict[str, float], float, int]] = field(default_factory=dict)

    def place(self, one: QueueEntry, ranks: dict[str, float], due_s: float) -> None:
        self.places[one] = (ranks, due_s, one.order)

    def first(self, replica_id: str) -> QueueEntry | None:
        at = [
            (one.key(ranks[replica_id]), order, one)
            for one, (ranks, _, order) in self.places.items()
            if replica_id in ranks
        ]
        return min(at, key=lambda place: place[:2])[2] if at else None

    def ahead(self, replica_id: str, priority: int) -> int:
        return sum(
            replica_id in ranks and one.request.objective.priority >= priority
            for one, (ranks, _, _) in self.places.items()
        )

    def due_s(self) -> float:
        return min((due_s for _, due_s, _ in self.places.values()), default=math.inf)


RANKS = st.dictionaries(st.sampled_from([A, B]), st.sampled_from([-1.0, 0.0, 0.5, 2.0]))
STEPS = st.one_of(
    st.tuples(st.just("enter"), st.integers(-1, 2), RANKS, st.sampled_from([1.0, 2.0, math.inf]), st.booleans()),
    st.tuples(st.just("place"), st.integers(0, 30), RANKS, st.sampled_from([0.5, 3.0, math.inf])),
    st.tuples(st.just("leave"), st.integers(0, 30)),
    st.tuples(st.just("bind"), st.integers(0, 30)),
    st.tuples(st.just("take"), st.sampled_from([A, B])),
)


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEPS, max_size=60))
def test_the_lines_are_sorted_at_each_question(steps: list[tuple[Any, ...]]) -> None:
    async def play() -> None:
        clock, queue, listed = VirtualClock(), RequestQueue(), Listed()
        for kind, *rest in steps:
            known = list(listed.places)
            if kind == "enter":
                priority, ranks, due_s, begun = rest
                one = entry(clock, priority=priority, continuing=begun)
                queue.enter(one)
            elif kind == "take":
                first = listed.first(rest[0])
                if first is not None:
                    queue.leave(first)
                    del listed.places[first]
                continue
            elif known:
                one = known[rest[0] % len(known)]
                if kind != "place":
                    if kind == "bind":
                        one.bound.cancel()
                    queue.leave(one)
                    del listed.places[one]
                    continue
                ranks, due_s = rest[1:]
            else:
                continue
            queue.place(one, ranks, due_s)
            listed.place(one, ranks, due_s)
            check(queue, listed)
        check(queue, listed)

    asyncio.run(play())


def check(queue: RequestQueue, listed: Listed) -> None:
    assert len(queue) == len(listed.places)
    assert set(queue) == set(listed.places)
    for name in (A, B):
        first = queue.first(name)
        assert (None if first is None else first[1]) is listed.first(name)
        for priority in (-1, 0, 1, 3):
            assert queue.ahead(name, priority) == listed.ahead(name, priority)
    assert queue.next_due_s() == listed.due_s()


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(-2, 2), st.sampled_from([0.1, 1.0, 5.0])), max_size=40),
    max_queue=st.integers(1, 10),
    sheddable=st.integers(1, 5),
)
def test_the_bounds_hold_and_the_best_stay(asked: list[tuple[int, float]], max_queue: int, sheddable: int) -> None:
    async def fill() -> None:
        clock, queue = VirtualClock(), RequestQueue()
        bounds = RouterSettings(max_queue=max_queue, max_sheddable_queue=sheddable)
        for priority, rank in asked:
            put(queue, entry(clock, priority=priority), rank)
            while (victim := queue.crowded_out(bounds)) is not None:
                queue.leave(victim)
        kept = [(one.request.objective.priority, one.waits_for[A]) for one in queue]
        assert len(kept) <= max_queue
        assert sum(priority < 0 for priority, _ in kept) <= sheddable
        best = sorted((one for one in asked if one[0] >= 0), reverse=True)[:max_queue]
        assert sorted((one for one in kept if one[0] >= 0), reverse=True) == best

    asyncio.run(fill())
