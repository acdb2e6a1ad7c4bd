"""Credits in the dispatcher: what a tier can take, what it wants, and how it binds to an upstream that issues them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from router.base.errors import OverspillError
from router.values.credits import NOTHING_WANTED, Asker, Room, Want
from router.values.replica import ReplicaSnapshot
from router.values.settings import CreditSettings
from tests.support.router_fakes import FakeReplica, info, request, world


@dataclass(eq=False)
class Metered(FakeReplica):
    """An upstream's rung that may be sent to while there are credits; it says so wherever its slots stand."""

    credits: int = 0
    credit_in_s: float = 0.5

    def snapshot(self) -> ReplicaSnapshot:
        told = super().snapshot()
        return msgspec.structs.replace(told, credits=self.credits, credit_in_s=self.credit_in_s)

    async def generate(self, what):
        self.credits -= 1
        async for chunk in super().generate(what):
            yield chunk


async def metered(here, **changes) -> Metered:
    cloud = Metered(info("fp32", remote=True), here.clock, link=here.cloud.link, **changes)
    here.dispatcher.set_replicas([here.local, cloud])
    return cloud


async def test_room_counts_each_device_once_and_who_waits() -> None:
    async with world(remote=False) as here:
        admission = here.dispatcher.admission
        rungs = [FakeReplica(info(name, device="gpu"), here.clock) for name in ("int8", "pruned-int8")]
        here.dispatcher.set_replicas(rungs)
        assert admission.room() == Room(slots=4, free=4, waiting=0), "two rungs share the slots"
        tasks = [asyncio.ensure_future(here.ask(locality="local-only")) for _ in range(6)]
        await here.clock.settle()
        assert admission.room() == Room(slots=4, free=0, waiting=2)
        for rung in rungs:
            rung.available = False
        assert admission.room().slots == 0
        for rung in rungs:
            rung.available = True
        await here.clock.run(asyncio.wait(tasks))
        assert admission.room() == Room(slots=4, free=4, waiting=0)


async def test_what_waits_and_may_leave_is_wanted() -> None:
    async with world(remote=False) as here:
        told = []
        here.dispatcher.tell_of_waiting(lambda: told.append(here.dispatcher.admission.want()))
        asked: list[dict[str, Any]] = [{"priority": 2}, {"locality": "local-only"}, {}, {"priority": 1}] * 4
        tasks = [asyncio.ensure_future(here.ask(**one)) for one in asked]
        await here.clock.settle()
        waiting = [entry.request.objective for entry in here.dispatcher._binder.queue]
        leave = [objective for objective in waiting if objective.locality.value != "local-only"]
        assert here.dispatcher.admission.want() == Want(len(leave), sum(o.priority > 0 for o in leave))
        assert len(told) >= 3
        await here.clock.run(asyncio.wait(tasks))
        assert here.dispatcher.admission.want() == NOTHING_WANTED


async def test_a_policy_that_keeps_all_here_wants_nothing() -> None:
    async with world(remote=False, policy="local-only") as here:
        tasks = [asyncio.ensure_future(here.ask()) for _ in range(12)]
        await here.clock.settle()
        assert here.dispatcher.waiting
        assert here.dispatcher.admission.want() == NOTHING_WANTED
        await here.clock.run(asyncio.wait(tasks))


async def test_credits_can_be_switched_off() -> None:
    async with world(credits=CreditSettings(enabled=False)) as here:
        assert here.dispatcher.admission.grant(Asker("", "instance"), Want(1)) is None
        here.dispatcher.reconfigure(replace_credits(here, enabled=True))
        assert here.dispatcher.admission.grant(Asker("", "instance"), Want(1)).credits == 1


def replace_credits(here, **changes):
    settings = here.dispatcher.settings
    return msgspec.structs.replace(settings, credits=msgspec.structs.replace(settings.credits, **changes))


async def test_waits_and_service_times_size_the_pool() -> None:
    async with world(remote=False) as here:
        tasks = [asyncio.ensure_future(here.ask()) for _ in range(40)]
        await here.clock.run(asyncio.wait(tasks))
        issuer = here.dispatcher.admission._issuer
        assert issuer._service_s == pytest.approx(0.5, abs=0.3)
        assert issuer._wait_s > 0.25


async def test_no_more_is_bound_than_there_are_credits() -> None:
    async with world() as here:
        cloud = await metered(here, credits=2)
        pinned = {"model": "tiny-fp32"}
        tasks = [asyncio.ensure_future(here.ask(**pinned)) for _ in range(5)]
        await here.clock.settle()
        assert (cloud.open, cloud.credits, here.dispatcher.waiting) == (2, 0, 3)
        await here.clock.advance(2.0)
        assert (cloud.open, here.dispatcher.waiting) == (0, 3), "free slots are no credits"
        cloud.credits = 3
        here.dispatcher.capacity_changed()
        await here.clock.settle()
        assert (cloud.open, cloud.credits, here.dispatcher.waiting) == (3, 0, 0)
        await here.clock.run(asyncio.wait(tasks))


async def test_a_credit_counts_where_every_slot_is_taken() -> None:
    async with world() as here:
        cloud = await metered(here, credits=1, others=4)
        route, _ = await here.clock.run(here.ask(model="tiny-fp32"))
        assert (route.tier, cloud.credits) == ("cloud", 0)


async def test_its_own_rung_serves_what_has_no_credit() -> None:
    async with world(policy="cloud-first") as here:
        cloud = await metered(here, credits=1, credit_in_s=300.0)
        routes = [(await here.clock.run(here.ask(ttft_s=2.0)))[0] for _ in range(3)]
        assert [route.tier for route in routes] == ["cloud", "edge", "edge"]
        cloud.credits = 1
        here.dispatcher.capacity_changed()
        assert (await here.clock.run(here.ask(ttft_s=2.0)))[0].tier == "cloud"


async def test_who_can_only_be_served_there_waits_for_a_credit_no_longer_than_its_deadline() -> None:
    async with world() as here:
        await metered(here, credit_in_s=1.0)
        with pytest.raises(OverspillError, match="deadline"):
            await here.clock.run(here.ask(prompt_tokens=4000, deadline_s=3.0))
        here.nothing_is_held()


async def test_a_request_bound_twice_in_one_turn_takes_two_credits() -> None:
    """Rungs of one upstream share its credits, also before the first of them is sent."""
    async with world() as here:
        best = await metered(here, credits=1)
        other = Metered(info("pruned-fp32", remote=True), here.clock, link=best.link, credits=1)
        here.dispatcher.set_replicas([best, other])
        one = asyncio.ensure_future(here.read(request(here.clock, model="tiny-fp32")))
        two = asyncio.ensure_future(here.read(request(here.clock, model="tiny-pruned-fp32")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(here.dispatcher._signals.in_flight) <= 1
        other.credits = best.credits = 1
        here.dispatcher.capacity_changed()
        await here.clock.run(asyncio.wait([one, two]))
