"""A slot that was taken is given back with all that was noted of it; nobody waits for what is counted after that."""

from __future__ import annotations

import asyncio

import pytest

from router.values.request import Outcome
from tests.support.router_fakes import answer, request, world


async def test_who_leaves_between_being_bound_and_being_sent_leaves_nothing() -> None:
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        w.local.others = w.local.slots
        asking = asyncio.ensure_future(w.read(request(w.clock, max_tokens=4)))
        await w.clock.settle()
        assert w.dispatcher.waiting == 1
        w.local.others = 0
        w.dispatcher.capacity_changed()
        while not len(w.dispatcher._signals.in_flight):  # noqa: ASYNC110 - one turn of the loop at a time
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await w.clock.settle()
        w.nothing_is_held()
        assert (await w.clock.run(w.ask(max_tokens=4)))[1] == answer(4)
        w.nothing_is_held()


async def test_the_last_chunk_waits_for_nothing_that_is_only_counted() -> None:
    async with world(remote=False) as w:
        asked = request(w.clock, max_tokens=4)
        chunks = (await w.clock.run(w.dispatcher.start(asked))).chunks

        async def to_the_last() -> None:
            while (await anext(chunks)).finish_reason is None:
                pass

        await w.clock.run(to_the_last())
        record = w.dispatcher.decision(asked.request_id)
        assert record is not None
        assert record.outcome is None
        assert len(w.dispatcher._signals.in_flight) == 0
        whole_s = w.clock.now_s() - asked.accepted_at_s
        w.clock.pass_s(5.0)  # its caller is slow to take it
        await chunks.aclose()
        assert record.outcome is Outcome.COMPLETED
        assert record.finish_s == pytest.approx(whole_s)
        w.nothing_is_held()
