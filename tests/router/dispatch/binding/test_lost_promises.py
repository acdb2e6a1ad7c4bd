"""A promise that was given up for one of a higher priority is not kept for a lower one that asks for the same."""

from __future__ import annotations

from typing import Any

import pytest

from router.base.errors import PromiseLost
from router.dispatch.binding.lost_promises import LostPromises
from router.values.choice import Hopeless
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import request, world

CLOCK = VirtualClock()


def lost(**wish: Any) -> LostPromises:
    promises = LostPromises()
    promises.add(request(CLOCK, priority=2, ttft_s=1.0, accepted_at_s=10.0, **wish))
    return promises


@pytest.mark.parametrize(("priority", "holds"), [(1, True), (-1, True), (2, False), (3, False)])
def test_it_holds_for_those_of_a_lower_priority(priority: int, holds: bool) -> None:
    assert lost().hold_for(request(CLOCK, priority=priority, ttft_s=1.0, accepted_at_s=10.0)) == holds


@pytest.mark.parametrize(("came_s", "holds"), [(9.0, True), (10.0, True), (10.1, False)])
def test_it_holds_for_those_who_came_no_later(came_s: float, holds: bool) -> None:
    assert lost().hold_for(request(CLOCK, ttft_s=1.0, accepted_at_s=came_s)) == holds


@pytest.mark.parametrize("other", [{"max_tokens": 4}, {"prompt_tokens": 20}, {"ttft_s": 1.5}, {"session": "s"}])
def test_it_says_nothing_of_those_who_ask_for_something_else(other: dict[str, Any]) -> None:
    assert not lost().hold_for(request(CLOCK, accepted_at_s=10.0, **({"ttft_s": 1.0} | other)))


def test_each_priority_has_its_own_verdict() -> None:
    promises = lost()
    promises.add(request(CLOCK, priority=1, ttft_s=1.0, accepted_at_s=12.0))
    assert promises.hold_for(request(CLOCK, priority=1, ttft_s=1.0, accepted_at_s=10.0))
    assert promises.hold_for(request(CLOCK, priority=0, ttft_s=1.0, accepted_at_s=11.0))
    assert not promises.hold_for(request(CLOCK, priority=1, ttft_s=1.0, accepted_at_s=11.0))


async def test_what_is_learnt_between_two_decisions_turns_no_priorities_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict on the higher one falls, then the policy changes its mind."""
    async with world(remote=False) as w:
        policy = w.dispatcher._binder._policy
        wish = {"ttft_s": 1.0, "accepted_at_s": w.clock.now_s()}
        with monkeypatch.context() as patch:
            patch.setattr(type(policy), "decide", lambda *_: Hopeless("so it seems", 1.0))
            with pytest.raises(PromiseLost, match="so it seems"):
                await w.clock.run(w.ask(priority=1, **wish))
        with pytest.raises(PromiseLost, match="of a higher priority that asked for the same was turned away"):
            await w.clock.run(w.ask(priority=0, **wish))
        await w.clock.run(w.ask(priority=1, **wish))
        await w.clock.run(w.ask(priority=0, ttft_s=1.0))
        w.nothing_is_held()
