"""The queue: who goes first, who is turned away."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dispatch.candidates import PendingRequest
from router.dispatch.queue import QueueEntry, RequestQueue
from router.dispatch.record import DecisionRecord
from router.values.settings import RouterSettings
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import request


@pytest.fixture
def clock():
    return VirtualClock()


def entry(
    clock: VirtualClock, age_s: float = 0.0, work_s: float = 1.0, promise_s: float = 3.0, **changes
) -> QueueEntry:
    priority, begun = changes.pop("priority", 0), 4 if changes.pop("continuing", False) else 0
    asked = request(clock, accepted_at_s=1000.0 - age_s, priority=priority, continuation_tokens=begun)
    pending = PendingRequest(asked, frozenset(), wait_until_s=math.inf)
    record = DecisionRecord.of(asked, "quality-in-objective")
    return QueueEntry(pending, record, clock.now_s(), work_s=work_s, promise_s=promise_s, **changes)


async def test_priority_goes_before_slack_and_begun_answers_before_all(clock):
    queue = RequestQueue()
    late, urgent, important, begun = (
        entry(clock, promise_s=30.0),
        entry(clock, promise_s=1.0),
        entry(clock, promise_s=60.0, priority=2),
        entry(clock, promise_s=90.0, priority=-1, continuing=True),
    )
    for one in (late, urgent, important, begun):
        queue.enter(one)
    assert queue.in_order() == [begun, important, urgent, late]


async def test_scarce_capacity_goes_to_short_work_but_long_work_is_not_starved(clock):
    queue = RequestQueue()
    long, short = entry(clock, work_s=8.0), entry(clock, work_s=1.0)
    queue.enter(long)
    queue.enter(short)
    assert queue.in_order(scarce=True) == [short, long]
    old = entry(clock, age_s=7.5, work_s=8.0)
    queue.enter(old)
    assert queue.in_order(scarce=True) == [old, short, long]


async def test_equals_are_served_in_order_of_age(clock):
    queue = RequestQueue()
    ages = [3.0, 9.0, 1.0, 5.0]
    for age_s in ages:
        queue.enter(entry(clock, age_s))
    served = [1000.0 - p.request.accepted_at_s for p in queue.in_order()]
    assert served == sorted(ages, reverse=True)


async def test_a_full_class_turns_its_newest_least_away(clock):
    queue, settings = RequestQueue(), RouterSettings(max_queue=3, max_sheddable_queue=1)
    first, second = entry(clock, 2.0, priority=-1), entry(clock, 1.0, priority=-1)
    queue.enter(first)
    assert queue.crowded_out(settings) is None
    queue.enter(second)
    assert queue.crowded_out(settings) is second
    queue.leave(second)
    for _ in range(2):
        queue.enter(entry(clock))
    newest = entry(clock)
    queue.enter(newest)
    assert queue.crowded_out(settings) is first
    queue.leave(first)
    assert queue.crowded_out(settings) is None
    another = entry(clock)
    queue.enter(another)
    assert queue.crowded_out(settings) is another
    queue.leave(another)
    queue.leave(another)
    assert len(queue) == 3


async def test_who_already_began_is_never_turned_away_for_a_newcomer(clock):
    queue, settings = RequestQueue(), RouterSettings(max_queue=1, max_sheddable_queue=1)
    queue.enter(entry(clock, priority=-5, continuing=True))
    newcomer = entry(clock, priority=5)
    queue.enter(newcomer)
    assert queue.crowded_out(settings) is newcomer


@given(priorities=st.lists(st.integers(-2, 2), max_size=40), max_queue=st.integers(1, 10), sheddable=st.integers(1, 5))
def test_the_bounds_hold_and_the_best_stay(priorities, max_queue, sheddable):
    import asyncio

    async def fill() -> None:
        clock, queue = VirtualClock(), RequestQueue()
        settings = RouterSettings(max_queue=max_queue, max_sheddable_queue=sheddable)
        for priority in priorities:
            queue.enter(entry(clock, priority=priority))
            while (victim := queue.crowded_out(settings)) is not None:
                queue.leave(victim)
        kept = [p.request.objective.priority for p in queue.in_order()]
        assert len(kept) <= max_queue
        assert sum(p < 0 for p in kept) <= sheddable
        positive = sorted((p for p in priorities if p >= 0), reverse=True)[:max_queue]
        assert sorted((p for p in kept if p >= 0), reverse=True) == positive

    asyncio.run(fill())
