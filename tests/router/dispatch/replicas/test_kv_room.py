"""Capacity in room of the KV cache as well as in slots."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch.dispatcher import Dispatcher
from router.policy.registry import POLICIES
from router.values.replica import SpeedPrior
from router.values.settings import RouterSettings
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import FakeReplica, info, request

LONG, SHORT, ANSWER = 4000, 100, 24
FOUR_LONG = 4 * (LONG + ANSWER) + 100
PATIENT = {"max_queue": 500, "max_wait_ms": 600_000.0, "overload_enter": 1.0, "ttft_slo_ms": 600_000.0}


class Line:
    """Replicas with 16 slots each, and whose answers began in which order."""

    def __init__(self, *kv_tokens: int | None, **changes: Any) -> None:
        self.clock = VirtualClock()
        prior = SpeedPrior(20_000.0, 50.0, 0.05, "test")
        described = [
            info(prior=prior, context_tokens=1 << 20, replica_id=f"r{n}", device=f"d{n}") for n in range(len(kv_tokens))
        ]
        self.replicas = [
            FakeReplica(about, self.clock, slots=16, kv_tokens=tokens)
            for about, tokens in zip(described, kv_tokens, strict=True)
        ]
        asked = RouterSettings(**{**PATIENT, **changes})
        self.dispatcher = Dispatcher(self.replicas, asked, clock=self.clock)
        self.began: list[str] = []

    async def ask(self, name: str, prompt_tokens: int, after_s: float = 0.0, **changes: Any) -> None:
        await self.clock.sleep(after_s)
        changes = {"max_tokens": ANSWER, "request_id": name, **changes}
        running = await self.dispatcher.start(request(self.clock, prompt_tokens, **changes))
        async with contextlib.aclosing(running.chunks) as chunks:
            first = True
            async for _ in chunks:
                if first:
                    self.began.append(name)
                first = False


@contextlib.asynccontextmanager
async def line(*kv_tokens: int | None, **changes: Any) -> AsyncIterator[Line]:
    made = Line(*kv_tokens, **changes)
    async with made.dispatcher:
        yield made
        assert not made.dispatcher._binder.pool.kv._kept, "room is kept for nobody who has left"


async def played(here: Line, *asks: Coroutine[Any, Any, None]) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*asks)

    await here.clock.run(all_of_them())


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("kv_tokens", [None, FOUR_LONG])
async def test_a_fifth_long_prompt_is_not_bound_where_four_fit(policy: str, kv_tokens: int | None) -> None:
    if policy == "cloud-only":
        pytest.skip("its replicas are all remote")
    async with line(kv_tokens, policy=policy) as here:
        await played(here, *(here.ask(f"long-{n}", LONG) for n in range(5)))
        assert here.replicas[0].most == (5 if kv_tokens is None else 4)
        assert len(here.began) == 5


async def test_it_goes_where_there_is_room() -> None:
    async with line(FOUR_LONG, FOUR_LONG) as here:
        await played(here, *(here.ask(f"long-{n}", LONG) for n in range(8)))
        assert [replica.most for replica in here.replicas] == [4, 4]


async def test_short_ones_take_the_slots_that_a_long_one_has_no_room_for() -> None:
    async with line(FOUR_LONG + 1000) as here:
        longs = [here.ask(f"long-{n}", LONG) for n in range(5)]
        await played(here, *longs, *(here.ask(f"short-{n}", SHORT, after_s=0.1) for n in range(4)))
        assert here.replicas[0].most == 8
        assert here.began[-1].startswith("long")


async def test_a_prompt_that_never_fits_is_sent_to_an_idle_replica_which_says_so_itself() -> None:
    async with line(1000) as here:
        await played(here, here.ask("too-long", LONG))
        assert here.began == ["too-long"]


async def test_short_prompts_do_not_keep_a_long_one_out_for_ever() -> None:
    """Short ones never cease to come: without room being kept for it, the long one would wait for their end."""
    async with line(FOUR_LONG) as here:
        shorts = [here.ask(f"short-{n}", LONG // 2, after_s=0.08 * n) for n in range(200)]
        await played(here, here.ask("long", 4 * LONG, after_s=1.0), *shorts)
        record = here.dispatcher.explain("long")
        assert record is not None
        sent = next(event for event in record.to_json()["events"] if event["event"] == "sent")
        assert 1_000 <= sent["at_ms"] <= 4_000
        assert len(here.began) == 201


async def test_room_that_is_kept_holds_up_neither_higher_priorities_nor_begun_answers() -> None:
    async with line(FOUR_LONG) as here:
        shorts = [here.ask(f"short-{n}", LONG // 2, after_s=0.08 * n) for n in range(60)]
        asks = [here.ask("long", 4 * LONG, after_s=1.0, max_tokens=ANSWER)]
        asks += [here.ask("urgent", SHORT, after_s=2.4, priority=1), here.ask("begun", SHORT, 2.4, **BEGUN)]
        await played(here, *asks, *shorts)
        urgent, begun, long = (here.began.index(name) for name in ("urgent", "begun", "long"))
        assert max(urgent, begun) < long
        assert any(name.startswith("short") for name in here.began[long:])


BEGUN = {"continuation": "w0 ", "continuation_tokens": 1}


@settings(max_examples=25, deadline=None)
@given(
    asks=st.lists(
        st.tuples(
            st.sampled_from([50, 700, 2000, 3900]),
            st.floats(0.0, 3.0),
            st.integers(-1, 1),
            st.sampled_from([4, 24, 80]),
        ),
        min_size=1,
        max_size=40,
    ),
    devices=st.integers(1, 3),
)
def test_everybody_is_served_and_no_cache_overflows(asks: list[tuple[int, float, int, int]], devices: int) -> None:
    async def play() -> None:
        async with line(*[6000] * devices, max_sheddable_queue=500) as here:
            sent = [
                here.ask(f"r{n}", prompt, after_s, priority=priority, max_tokens=tokens)
                for n, (prompt, after_s, priority, tokens) in enumerate(asks)
            ]
            await played(here, *sent)
            assert len(here.began) == len(asks)
            assert all(replica.most_kv_tokens <= 6000 for replica in here.replicas)
            assert all(replica.open == 0 for replica in here.replicas)

    asyncio.run(play())


async def test_the_doubt_about_an_estimated_length_counts_once() -> None:
    """Four prompts of 4,000 tokens fit, also where as many as 1,500 of each may be a mistake of the estimate."""
    async with line(FOUR_LONG) as here:
        await played(here, *(here.ask(f"long-{n}", LONG, prompt_slack=1500) for n in range(4)))
        assert here.replicas[0].most == 4
