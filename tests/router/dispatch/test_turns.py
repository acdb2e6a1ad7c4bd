"""Decisions are made in turns, between which everything else on the event loop has its own."""

from __future__ import annotations

import asyncio

import pytest

from router.values.choice import Choice, Hopeless
from router.values.offer import Ask
from router.values.situation import Situation
from tests.support.router_fakes import World, request, world


class Slow:
    """The policy of a world, on a machine that takes so long for each decision."""

    def __init__(self, w: World, takes_s: float) -> None:
        self._w = w
        self._own = w.dispatcher._binder._policy
        self.locality = self._own.locality
        self.takes_s = takes_s
        self.decided = 0

    def decide(self, situation: Situation) -> Choice | Hopeless:
        self.decided += 1
        self._w.clock.pass_s(self.takes_s)
        return self._own.decide(situation)

    def ask(self, situation: Situation) -> Ask | None:
        return self._own.ask(situation)


@pytest.mark.parametrize(("takes_s", "a_turn"), [(0.0, 8), (0.0004, 3), (0.02, 1)])
async def test_a_turn_ends_when_its_time_is_over_and_everyone_is_decided_all_the_same(takes_s: float, a_turn: int):
    settings = {"max_queue": 100, "max_wait_ms": 600_000.0, "ttft_slo_ms": 80_000.0, "overload_enter": 1.0}
    async with world(remote=False, **settings) as w:
        asks = [asyncio.ensure_future(w.dispatcher.start(request(w.clock))) for _ in range(40)]
        await w.clock.settle()
        waiting = w.dispatcher.waiting
        assert waiting > 30
        binder = w.dispatcher._binder
        binder._policy = slow = Slow(w, takes_s)
        binder.reconsider()
        turns, before = [], 0
        while slow.decided < waiting:
            await asyncio.sleep(0)
            turns.append(slow.decided - before)
            before = slow.decided
            assert len(turns) < 1_000
        assert max(turns) <= a_turn
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)


@pytest.mark.parametrize(("takes_s", "a_turn"), [(0.0004, 3), (0.02, 1)])
async def test_a_free_slot_holds_up_the_loop_for_no_longer_than_a_turn(takes_s: float, a_turn: int):
    """However many would be looked at for it: the best of those who were takes it."""
    settings = {"max_queue": 100, "max_wait_ms": 600_000.0, "ttft_slo_ms": 80_000.0, "overload_enter": 1.0}
    async with world(remote=False, **settings) as w:
        asks = [asyncio.ensure_future(w.dispatcher.start(request(w.clock, 50 + i))) for i in range(60)]
        await w.clock.settle()
        waiting = w.dispatcher.waiting
        assert waiting > 30
        w.dispatcher._binder._policy = slow = Slow(w, takes_s)
        w.local.slots = w.small.slots = 40
        w.dispatcher.capacity_changed()
        turns, before, idle = [], 0, 0
        while idle < 10:
            await asyncio.sleep(0)
            turns.append(slow.decided - before)
            idle, before = (0 if turns[-1] else idle + 1), slow.decided
        assert max(turns) <= a_turn
        assert w.dispatcher.waiting < waiting - 20
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
