"""Replicas come, drain and go at random while requests run: each request has its whole answer, and nothing is held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.replicas import pool
from router.values.chunk import TokenChunk
from router.values.replica import ReplicaSnapshot
from router.values.request import InferenceRequest
from router.values.settings import HedgeSettings, RouterSettings
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import FakeReplica, answer, info, request


class Draining(FakeReplica):
    """Its source may mark it: what runs there ends, nobody new comes."""

    marked = False
    after_the_mark = 0

    def snapshot(self) -> ReplicaSnapshot:
        found = super().snapshot()
        if not self.marked:
            return found
        return ReplicaSnapshot(found.info, available=False, slots=found.slots, running=found.running, why="draining")

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        self.after_the_mark += self.marked
        async for chunk in super().generate(request):
            yield chunk


class Changing:
    """A dispatcher whose replicas change; at least one serves at any time."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.made: list[Draining] = []
        self.there: list[Draining] = []
        unhedged = HedgeSettings(enabled=False)  # a second copy of a late one is meant, and tested elsewhere
        settings = RouterSettings(max_queue=1_000, max_wait_ms=3_600_000.0, hedge=unhedged)
        self.dispatcher = Dispatcher([], settings, clock=self.clock, seed=0)
        self.asked: list[asyncio.Future[str]] = []

    @property
    def serving(self) -> list[Draining]:
        return [replica for replica in self.there if not replica.marked]

    def come(self) -> None:
        name = f"gpu-{len(self.made)}"
        found = info("fp32", replica_id=f"{name}/tiny-fp32", endpoint=f"http://{name}", device=name)
        self.made.append(Draining(found, self.clock, slots=2, answer_tokens=6))
        self.there.append(self.made[-1])
        self.dispatcher.set_replicas(self.there)

    def drain(self, which: int) -> None:
        if len(self.serving) > 1:
            self.serving[which % len(self.serving)].marked = True
            self.dispatcher.capacity_changed()

    def go(self, which: int) -> None:
        """Leave the set, as a source does with what it no longer finds: what runs there ends there."""
        gone = self.there[which % len(self.there)]
        if gone.marked or len(self.serving) > 1:
            self.there.remove(gone)
            self.dispatcher.set_replicas(self.there)

    def ask(self) -> None:
        self.asked.append(asyncio.ensure_future(self._ask(f"r{len(self.asked)}")))

    async def _ask(self, name: str) -> str:
        running = await self.dispatcher.start(request(self.clock, request_id=name))
        return "".join([chunk.text async for chunk in running.chunks])

    async def run(self, steps: list[tuple[str, int]]) -> None:
        async with self.dispatcher:
            self.come()
            for what, which in steps:
                if what == "ask":
                    for _ in range(1 + which % 4):
                        self.ask()
                elif what == "come":
                    self.come()
                elif what == "pass":
                    await self.clock.advance(which / 40)
                else:
                    getattr(self, what)(which)
                await self.clock.settle()
            texts = await self.clock.run(_all(self.asked))
            assert texts == [answer(6)] * len(texts)
            assert sum(len(replica.sent) for replica in self.made) == len(texts), "and none was computed twice"
            assert not any(replica.after_the_mark for replica in self.made)
            assert not any(replica.open for replica in self.made)
            assert self.dispatcher.waiting == 0
            assert len(self.dispatcher._signals.in_flight) == 0


async def _all(asked: list[asyncio.Future[str]]) -> list[str]:
    return list(await asyncio.gather(*asked))


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "ask", "come", "drain", "go", "pass", "pass"]), st.integers(0, 20)),
    max_size=40,
)


@pytest.mark.parametrize("many", [64, 2], ids=["all are looked at", "a few are looked at"])
def test_no_request_is_lost_while_replicas_come_drain_and_go(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MANY", many)

    @given(STEPS)
    @settings(max_examples=40, deadline=None)
    def come_and_go(steps: list[tuple[str, int]]) -> None:
        asyncio.run(Changing().run(steps))

    come_and_go()


async def test_a_replica_that_drains_ends_what_it_has_and_gets_nothing_new() -> None:
    world: Any = Changing()
    async with world.dispatcher:
        world.come()
        world.come()
        for _ in range(4):
            world.ask()
        await world.clock.settle()
        assert [replica.open for replica in world.made] == [2, 2]
        world.drain(0)
        for _ in range(3):
            world.ask()
        assert await world.clock.run(_all(world.asked)) == [answer(6)] * 7
        assert [len(replica.sent) for replica in world.made] == [2, 5]
        record = world.dispatcher.explain("r6")
        (row,) = [row for row in record.candidates if row.rejected]
        assert (row.rejected, row.why) == ("unhealthy", "draining")
