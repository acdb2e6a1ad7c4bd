"""A chat stays where its prompt is cached, since that is cheaper; nobody else's prediction is the better for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.base.errors import DeadlineLost
from router.values.prompt import EncodedPrompt
from tests.support.router_fakes import World, request, world

CHAT = tuple(range(3_000))


async def ask(w: World, tokens: int, **changes: Any) -> dict[str, Any]:
    """Ask with the first tokens of the chat; returns the decision record."""
    request_id = f"turn-{tokens}"
    await w.clock.run(
        w.ask(
            request_id=request_id,
            prompt_tokens=tokens,
            encoded=EncodedPrompt(CHAT[:tokens], "the tokenizer"),
            max_tokens=24,
            **changes,
        )
    )
    record = w.dispatcher.explain(request_id, str(changes.get("caller", "")))
    assert record is not None
    return record.to_json()


def predicted_ttft_ms(record: dict[str, Any], replica_id: str) -> float:
    (found,) = [c for c in record["candidates"] if c["replica"] == replica_id]
    return float(found["ttft_ms"])


async def test_a_chat_that_grows_stays_on_the_device_that_holds_it():
    async with world(policy="local-first") as w:
        w.local.held = []
        first = await ask(w, 600, ttft_s=1.3)
        assert first["chosen"]["replica"] == w.local.info.replica_id
        for tokens in (1_200, 1_800):  # computed as a whole, these miss the promise
            record = await ask(w, tokens, ttft_s=1.3)
            assert record["chosen"]["replica"] == w.local.info.replica_id
            assert record["kept"] == {"ttft": True}


async def test_another_caller_of_the_same_prompt_is_predicted_to_compute_all_of_it():
    async with world(policy="local-first") as w:
        w.local.held = []
        await ask(w, 1_000, ttft_s=2.0)
        name = w.local.info.replica_id
        mine = predicted_ttft_ms(await ask(w, 1_001, ttft_s=2.0), name)
        theirs = predicted_ttft_ms(await ask(w, 1_002, ttft_s=2.0, caller="ben"), name)
        assert mine < 0.3 * theirs


async def test_a_replica_that_tells_nothing_is_predicted_to_compute_everything():
    async with world(policy="local-first") as w:
        name = w.local.info.replica_id
        first = predicted_ttft_ms(await ask(w, 1_000, ttft_s=2.0), name)
        again = predicted_ttft_ms(await ask(w, 1_001, ttft_s=2.0), name)
        assert again > 0.8 * first


async def test_no_prompt_is_kept_of_a_request_that_is_cancelled_refused_or_broken():
    """Two thousand were, with all their token ids: of long prompts, hundreds of megabytes on a device."""
    async with world(policy="local-first") as w:
        w.local.held = []
        await ask(w, 1_000)
        long: dict[str, Any] = {"prompt_tokens": 1_000, "encoded": EncodedPrompt(CHAT[:1_000], "the tokenizer")}
        begun = await w.clock.run(w.dispatcher.start(request(w.clock, max_tokens=500, ignore_eos=True, **long)))
        waiting = [asyncio.ensure_future(w.ask(locality="local-only", max_tokens=99, **long)) for _ in range(12)]
        await w.clock.settle()
        assert w.dispatcher.waiting > 0
        with pytest.raises(DeadlineLost):
            await w.clock.run(w.ask(deadline_s=0.001, max_tokens=99, **long))
        for task in waiting:
            task.cancel()
        await w.clock.run(asyncio.gather(*waiting, return_exceptions=True))
        await w.clock.run(begun.chunks.aclose())
        w.nothing_is_held()
