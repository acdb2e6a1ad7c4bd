"""A slot that was taken for a caller who left in that very moment is given back with all that was noted about it."""

from __future__ import annotations

import asyncio

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
