"""Crack 13: a request whose own content makes a replica crash is not replayed over every replica of the tier."""

from __future__ import annotations

import pytest

from router.base.errors import ReplicaCrashed
from tests.support.router_fakes import answer, world


async def test_a_request_that_crashes_two_replicas_is_not_sent_to_a_third() -> None:
    async with world(max_attempts=4) as w:
        for replica in w.all:
            replica.faults = ["crash"]
        with pytest.raises(ReplicaCrashed) as raised:
            await w.clock.run(w.ask(max_tokens=8))
        assert raised.value.status == 500
        assert sum(len(replica.sent) for replica in w.all) == 2
        w.nothing_is_held()


async def test_a_request_that_crashes_the_only_replica_that_may_serve_it_fails() -> None:
    async with world(remote=False) as w:
        w.local.faults = ["crash"]
        with pytest.raises(ReplicaCrashed):
            await w.clock.run(w.ask(max_tokens=8, model="tiny-int8"))
        assert len(w.local.sent) == 1
        _, text = await w.clock.run(w.ask(max_tokens=8, model="tiny-int8"))
        assert text == answer(8), "the next request is served"


async def test_a_crash_of_one_replica_is_made_good_by_another() -> None:
    async with world() as w:
        w.local.faults = ["crash"]
        _, text = await w.clock.run(w.ask(max_tokens=8))
        assert text == answer(8)


async def test_poisonous_requests_close_no_replica_to_others() -> None:
    async with world(remote=False) as w:
        w.local.faults = ["crash", "crash"]
        for _ in range(2):
            with pytest.raises(ReplicaCrashed):
                await w.clock.run(w.ask(max_tokens=8, model="tiny-int8"))
        assert w.dispatcher.breaker_states()["local/tiny-int8"] == "closed"
