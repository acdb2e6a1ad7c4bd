"""Log probabilities over two tiers: read back from the upper one, and told once where an answer goes on elsewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import openai
import pytest

from router.base.errors import ReplicaBroken
from router.values.chunk import TokenChunk
from router.values.request import InferenceRequest
from tests.support.gateway_fakes import FAMILY
from tests.support.tiers import WORDS, Reciter, Tier, chain, scored, told

SAID = [f"{' ' if at else ''}{word}" for at, word in enumerate(WORDS)]
THERE = {"x-overspill-locality": "cloud-only"}


def sdk(tier: Tier) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{tier.url}/v1", api_key="none", max_retries=0, timeout=20)


def break_off(reciter: Reciter) -> None:
    """Have it go dark after two words, unless it goes on with what was said before."""
    recite = reciter.generate

    async def generate(request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        if request.continuation:
            async for chunk in recite(request):
                yield chunk
            return
        for at, word in enumerate(SAID[:2]):
            yield TokenChunk(word, logprobs=told(request, [word]), prompt_logprobs=scored(request, first=at == 0))
        raise ReplicaBroken("the board went dark")

    reciter.generate = generate


@pytest.mark.parametrize("broken", [False, True], ids=["in one go", "begun here and finished there"])
async def test_every_token_is_told_once(broken: bool) -> None:
    async with chain() as (edge, _, small, best), sdk(edge) as client:
        if broken:
            for replica in (small, best):
                break_off(replica)
        reply = await client.completions.create(
            model=FAMILY,
            prompt="count to ten",
            logprobs=0,
            echo=True,
            max_tokens=16,
            extra_headers={} if broken else THERE,
        )
    if broken:
        (finished,) = [*small.requests, *best.requests]
        assert finished.continuation == "one two"
        assert not finished.scores_prompt
    lines = reply.choices[0].logprobs
    assert reply.choices[0].text == "count to ten" + "".join(SAID)
    assert lines.tokens == ["count", " to", " ten", *SAID]
    assert lines.token_logprobs == [None, *(-float(len(word)) for word in (" to", " ten", *SAID))]
    assert lines.text_offset[3:5] == [12, 15]


async def test_a_chats_alternatives_and_bytes_come_through() -> None:
    async with chain() as (edge, _, _, _), sdk(edge) as client:
        stream = await client.chat.completions.create(
            model=FAMILY,
            messages=[{"role": "user", "content": "count"}],
            logprobs=True,
            stream=True,
            extra_headers=THERE,
        )
        entries = [entry async for event in stream for c in event.choices if c.logprobs for entry in c.logprobs.content]
    assert [(entry.token, entry.logprob, bytes(entry.bytes or ()).decode()) for entry in entries] == [
        (word, -float(len(word)), word) for word in SAID
    ]
