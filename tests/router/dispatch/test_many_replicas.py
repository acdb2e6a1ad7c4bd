"""Beyond 64 replicas a decision looks at a few, and still nobody waits while any has room, nor loses their turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.replicas.pool import MANY
from router.values.prompt import EncodedPrompt
from router.values.replica import ReplicaSnapshot
from router.values.settings import RouterSettings
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import FakeReplica, answer, info, request

NUMBER = 200


class Counted(FakeReplica):
    """Counts how often its load is read."""

    looks = 0

    def snapshot(self) -> ReplicaSnapshot:
        self.looks += 1
        return super().snapshot()


class Many:
    def __init__(self, seed: int, slots: int, **settings: Any) -> None:
        self.clock = VirtualClock()
        self.replicas = [
            Counted(
                info("fp32", replica_id=f"gpu-{n}/tiny-fp32", endpoint=f"http://gpu-{n}", device=f"gpu-{n}"),
                self.clock,
                slots,
            )
            for n in range(NUMBER)
        ]
        self.dispatcher = Dispatcher(
            self.replicas, RouterSettings(max_queue=2_000, **settings), clock=self.clock, seed=seed
        )

    @property
    def looks(self) -> int:
        return sum(replica.looks for replica in self.replicas)

    async def ask(self, name: str, **changes: Any) -> str:
        running = await self.dispatcher.start(request(self.clock, request_id=name, **changes))
        return "".join([chunk.text async for chunk in running.chunks])

    def served(self) -> list[str]:
        return [replica.info.replica_id for replica in self.replicas for _ in replica.sent]


@contextlib.asynccontextmanager
async def many(seed: int = 1, slots: int = 1, **settings: Any) -> AsyncIterator[Many]:
    made = Many(seed, slots, **settings)
    async with made.dispatcher:
        yield made


async def test_a_decision_reads_a_few_replicas_and_its_record_names_those() -> None:
    assert NUMBER > MANY
    async with many(slots=8) as m:
        await m.clock.run(m.ask("first"))
        before = m.looks
        for number in range(20):
            await m.clock.run(m.ask(f"r{number}"))
        assert m.looks - before < 20 * 30, "sending and ending read a replica again each, and some are read in turn"
        record = m.dispatcher.explain("r19")
        assert record is not None
        assert 1 <= len([row for row in record.candidates if row.ttft_ms is not None]) <= 4
        assert all(row.slots == 8 for row in record.candidates)


async def test_nobody_waits_while_any_replica_has_room() -> None:
    async with many() as m:
        asks = [asyncio.ensure_future(m.ask(f"r{n}")) for n in range(NUMBER)]
        await m.clock.settle()
        assert m.dispatcher.waiting == 0
        assert set(Counter(m.served()).values()) == {1}
        assert set(await m.clock.run(_all(asks))) == {answer(24)}


async def test_who_waits_is_taken_by_whichever_is_free_first_in_order_of_priority() -> None:
    async with many() as m:
        m.replicas[137].answer_tokens = 4
        running = [asyncio.ensure_future(m.ask(f"r{n}")) for n in range(NUMBER)]
        await m.clock.settle()
        waiting = [asyncio.ensure_future(m.ask(f"w{n}", priority=n)) for n in range(3)]
        await m.clock.settle()
        assert m.dispatcher.waiting == 3
        while m.dispatcher.waiting == 3:
            assert await m.clock.step()
            await m.clock.settle()
        assert [sent.request_id for sent in m.replicas[137].sent][1:] == ["w2"]
        await m.clock.run(_all(running + waiting))


async def test_twice_as_many_requests_as_slots_all_end_and_are_spread_evenly() -> None:
    async with many(slots=2) as m:
        for replica in m.replicas:
            replica.answer_tokens = 4
        asks = [asyncio.ensure_future(m.ask(f"r{n}")) for n in range(4 * NUMBER)]
        assert set(await m.clock.run(_all(asks))) == {answer(4)}
        assert max(Counter(m.served()).values()) <= 6


async def test_a_session_and_a_prompt_find_their_replica_again_among_all() -> None:
    async with many(slots=4) as m:
        for replica in m.replicas:
            replica.held = []
        chat = EncodedPrompt(tuple(range(900)), "the tokenizer")
        await m.clock.run(m.ask("one", encoded=chat, prompt_tokens=900))
        longer = EncodedPrompt((*range(900), *range(5_000, 5_100)), "the tokenizer")
        await m.clock.run(m.ask("two", encoded=longer, prompt_tokens=1_000))
        assert len(set(m.served())) == 1
        await m.clock.run(m.ask("three", session="s"))
        await m.clock.run(m.ask("four", session="s"))
        (third,) = [r for r in m.replicas if any(sent.request_id == "three" for sent in r.sent)]
        assert third.sent[-1].request_id == "four"


async def test_one_seed_chooses_alike() -> None:
    served = []
    for _ in range(2):
        async with many(seed=3, slots=2) as m:
            await m.clock.run(_all([asyncio.ensure_future(m.ask(f"r{n}")) for n in range(100)]))
            served.append(m.served())
    assert served[0] == served[1]


async def test_those_that_cannot_be_asked_are_passed_over_and_found_again() -> None:
    async with many() as m:
        for replica in m.replicas[1:]:
            replica.available = False
        m.dispatcher.capacity_changed()
        for number in range(5):
            assert await m.clock.run(m.ask(f"r{number}")) == answer(24)
        assert len(m.replicas[0].sent) == 5
        m.replicas[0].available = False
        m.replicas[77].available = True
        m.dispatcher.capacity_changed()
        m.dispatcher._binder.pool.read_all()
        assert await m.clock.run(m.ask("again")) == answer(24)
        assert len(m.replicas[77].sent) == 1


async def test_one_that_fails_is_replaced_and_the_failure_is_in_the_record() -> None:
    async with many() as m:
        faults = [("break", 3), ("break", 3)]  # of whoever is asked first and second
        for replica in m.replicas:
            replica.faults = faults
        assert await m.clock.run(m.ask("broken")) == answer(24)
        assert len(set(m.served())) == 3
        record = m.dispatcher.explain("broken")
        assert record is not None
        assert [row.rejected for row in record.candidates if row.rejected] == ["already-failed"] * 2


async def _all(asks: Sequence[asyncio.Future[str]]) -> list[str]:
    return list(await asyncio.gather(*asks))
