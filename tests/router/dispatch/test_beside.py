"""A long prompt does not begin beside answers that it would hold up beyond their promise."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from router.decisions.explain import five_lines
from router.values.length import LengthCurve
from tests.support.router_fakes import World, request, world


async def beside(w: World, deadline_s: float, *, prompt_tokens: int) -> dict[str, Any]:
    """Ask for an answer of 2 s with that deadline, then for another one; returns what is told of the second."""
    w.local.answer_tokens = w.small.answer_tokens = 100
    first = asyncio.ensure_future(w.ask(prompt_tokens=100, deadline_s=deadline_s))
    await w.clock.advance(0.5)
    (attempt,) = list(w.dispatcher._signals.in_flight)
    attempt.length = LengthCurve.exactly(100)
    ask = request(w.clock, prompt_tokens=prompt_tokens, deadline_s=30.0)
    await w.clock.run(asyncio.gather(first, w.read(ask)))
    w.nothing_is_held()
    return w.record(ask.request_id)


def waited_ms(record: dict[str, Any]) -> float:
    return next(float(event["at_ms"]) for event in record["events"] if event["event"] == "sent")


async def test_it_waits_until_they_have_ended() -> None:
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        record = await beside(w, 2.6, prompt_tokens=1000)
        assert waited_ms(record) == pytest.approx(1600, abs=100), "1 s of prompt, and the first has half a second"


async def test_nor_does_it_begin_on_another_rung_of_their_device() -> None:
    async with world(remote=False) as w:
        w.local.info, w.small.info = (replace(replica.info, device="one") for replica in (w.local, w.small))
        w.dispatcher.set_replicas([w.local, w.small])
        record = await beside(w, 1.4, prompt_tokens=1000)
        assert waited_ms(record) == pytest.approx(560, abs=50), "of the quick rung, which ends at 1.06 s"


async def test_it_begins_at_once_where_they_can_wait_or_it_is_short() -> None:
    for deadline_s, prompt_tokens in ((20.0, 1000), (2.6, 50)):
        async with world(remote=False) as w:
            w.dispatcher.set_replicas([w.local])
            assert waited_ms(await beside(w, deadline_s, prompt_tokens=prompt_tokens)) == 0.0


async def test_of_many_engines_behind_one_replica_it_holds_up_one() -> None:
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        w.local.engines = 8
        record = await beside(w, 2.6, prompt_tokens=1000)
        assert waited_ms(record) == 0.0
        (row,) = record["candidates"]
        assert 0.0 < row["at_stake"] <= 1 / 8, "one in eight is on that engine"


async def test_the_rest_of_a_broken_answer_does_not_wait() -> None:
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        w.local.answer_tokens = 100
        first = asyncio.ensure_future(w.ask(prompt_tokens=100, deadline_s=2.6))
        await w.clock.advance(0.5)
        (attempt,) = list(w.dispatcher._signals.in_flight)
        attempt.length = LengthCurve.exactly(100)
        ask = request(w.clock, prompt_tokens=1000, deadline_s=30.0)
        rest = msgspec.structs.replace(ask, continuation="w0 ", continuation_tokens=1)
        await w.clock.run(asyncio.gather(first, w.read(rest)))
        assert waited_ms(w.record(rest.request_id)) == 0.0


async def test_what_was_put_at_stake_is_told() -> None:
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        w.local.answer_tokens = 100
        first = asyncio.ensure_future(w.ask(prompt_tokens=100, deadline_s=2.6))
        await w.clock.advance(0.5)
        (attempt,) = list(w.dispatcher._signals.in_flight)
        attempt.length = LengthCurve.of([max(0.0, 1.0 - k / 111) for k in range(112)])
        ask = request(w.clock, prompt_tokens=1000, deadline_s=30.0)
        await w.clock.run(asyncio.gather(first, w.read(ask)))
        (row,) = [row for row in w.record(ask.request_id)["candidates"] if row.get("chosen")]
        assert 0.0 < row["at_stake"] < 0.5
        assert f"its prompt put {row['at_stake']:.2f} of the answers that ran there at stake" in "".join(
            five_lines(w.dispatcher.explain(ask.request_id))
        )
