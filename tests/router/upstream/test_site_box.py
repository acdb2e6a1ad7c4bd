"""Three tiers in a row, device → site box → region, over HTTP with real gateways and dispatchers in each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from router.base.errors import ReplicaBroken, ReplicaFailed
from router.values.chunk import TokenChunk
from router.values.request import InferenceRequest
from router.values.settings import RouterSettings
from tests.support.gateway_fakes import FAMILY, replica_info
from tests.support.tiers import WORDS, Reciter, Tier, linked
from tests.support.waiting import until

ASK: dict[str, Any] = {"model": FAMILY, "messages": [{"role": "user", "content": "recite"}]}
BEST = {**ASK, "model": "tiny-fp32"}


@dataclass
class Row:
    """The tiers, and the one replica that each of them has: the better, the farther."""

    device: Tier
    site: Tier
    region: Tier
    small: Reciter
    middle: Reciter
    best: Reciter

    def sdk(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.device.url}/v1", api_key="none", max_retries=0, timeout=20)


@contextlib.asynccontextmanager
async def row(settings: RouterSettings | None = None) -> AsyncIterator[Row]:
    best = Reciter(replica_info("tiny-fp32", 0, tier="cloud"))
    middle = Reciter(replica_info("tiny-int8", 1, tier="edge", quality=0.8))
    small = Reciter(replica_info("tiny-pruned-int8", 2, tier="edge", quality=0.5))
    region, site = Tier("cloud", [best], settings), Tier("edge", [middle], settings)
    device = Tier("edge", [small], settings)
    async with region, site, device, linked(site, region, [middle]), linked(device, site, [small]):
        await until(lambda: len(device.dispatcher.replicas) == 3)
        yield Row(device, site, region, small, middle, best)


async def read(stream: Any, after: dict[int, Any] | None = None) -> str:
    """Read a stream; `after` so many words something happens."""
    texts: list[str] = []
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            texts.append(chunk.choices[0].delta.content)
            happens = (after or {}).pop(len(texts), None)
            if happens is not None:
                happens()
    return "".join(texts)


async def test_the_device_knows_the_rungs_of_both_tiers_above_and_each_answers() -> None:
    async with row() as r, r.sdk() as client:
        served = {}
        for model in ("tiny-fp32", "tiny-int8", "tiny-pruned-int8"):
            raw = await client.chat.completions.with_raw_response.create(**{**ASK, "model": model})
            assert raw.parse().choices[0].message.content == " ".join(WORDS)
            served[model] = raw.headers["x-overspill-tier"]
        assert served == {"tiny-fp32": "cloud", "tiny-int8": "edge", "tiny-pruned-int8": "edge"}
        assert [len(replica.requests) for replica in (r.best, r.middle, r.small)] == [1, 1, 1]


async def test_each_tier_counts_itself_in_hops_and_leaves_the_record_of_its_own_part() -> None:
    async with row() as r, r.sdk() as client, httpx.AsyncClient() as http:
        await client.chat.completions.create(**BEST, extra_headers={"x-request-id": "through"})
        (asked,) = r.best.requests
        assert dict(asked.headers)["x-overspill-hops"] == "2"
        chosen = {}
        for name, tier in (("device", r.device), ("site", r.site), ("region", r.region)):
            record = (await http.get(f"{tier.url}/v1/decisions/through")).json()
            chosen[name] = (record["chosen"]["variant"], record["outcome"])
        assert set(chosen.values()) == {("tiny-fp32", "completed")}


async def test_a_request_that_has_passed_too_many_tiers_is_refused() -> None:
    async with row() as r, httpx.AsyncClient() as http:
        for hops, status in (("5", 200), ("99", 400)):
            reply = await http.post(
                f"{r.device.url}/v1/chat/completions", json=BEST, headers={"x-overspill-hops": hops}
            )
            assert reply.status_code == status, reply.text
        assert "tiers" in reply.json()["error"]["message"]


async def test_an_answer_of_the_region_is_finished_on_the_device_when_the_site_box_is_killed() -> None:
    async with row() as r, r.sdk() as client:
        r.small.available = r.middle.available = False
        r.best.pause = asyncio.Event()
        stream = await client.chat.completions.create(**ASK, stream=True)
        r.small.available = True
        text = await read(stream, {3: r.site.cut})
        r.best.pause.set()
        assert text == " ".join(WORDS), "nothing doubled, nothing lost"
        assert [q.continuation for q in r.small.requests] == ["one two three"]
        assert len(r.best.requests) == 1


async def test_an_answer_of_the_region_is_finished_by_the_site_box_when_the_region_is_killed() -> None:
    async with row() as r, r.sdk() as client:
        r.small.available = r.middle.available = False
        r.best.pause = asyncio.Event()
        stream = await client.chat.completions.create(**ASK, stream=True)
        r.middle.available = True
        (of_site,) = [replica for replica in r.device.dispatcher.replicas if replica.info.variant == "tiny-int8"]
        await until(lambda: of_site.snapshot().available)
        text = await read(stream, {3: r.region.cut})
        r.best.pause.set()
        assert text == " ".join(WORDS)
        assert [q.continuation for q in r.middle.requests] == ["one two three"]
        assert not r.small.requests


async def test_a_caller_who_leaves_is_heard_in_the_region() -> None:
    async with row() as r, r.sdk() as client:
        r.best.pause = asyncio.Event()
        left = asyncio.Event()
        recite = r.best.generate

        async def noticed(request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
            try:
                async for chunk in recite(request):
                    yield chunk
            finally:
                left.set()

        r.best.generate = noticed  # type: ignore[method-assign]
        stream = await client.chat.completions.create(**BEST, stream=True)
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await stream.close()
        await asyncio.wait_for(left.wait(), 60)


@pytest.mark.parametrize("budget", [2, 4])
async def test_one_budget_of_attempts_holds_over_all_three_tiers(budget: int) -> None:
    async with row(RouterSettings(max_attempts=budget)) as r, httpx.AsyncClient() as http:
        tried: list[str] = []
        told: dict[str, int | None] = {}

        def fail(replica: Reciter, name: str) -> None:
            async def fails(request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
                tried.append(name)
                told.setdefault(name, request.attempts_left)
                raise ReplicaFailed("HTTP 500")
                yield  # a generator

            replica.generate = fails  # type: ignore[method-assign]

        for replica, name in ((r.small, "device"), (r.middle, "site"), (r.best, "region")):
            fail(replica, name)
        reply = await http.post(f"{r.device.url}/v1/chat/completions", json=ASK)
        assert reply.status_code >= 500
        assert 2 <= len(tried) <= budget
        left = [told[name] for name in ("site", "region") if told.get(name) is not None]
        assert all(number is not None and 1 <= number < budget for number in left)


async def test_local_only_leaves_neither_the_device_nor_the_site_box_it_was_asked_of() -> None:
    async with row() as r, httpx.AsyncClient() as http:
        for tier, replica in ((r.device, r.small), (r.site, r.middle)):
            reply = await http.post(
                f"{tier.url}/v1/chat/completions", json=ASK, headers={"x-overspill-locality": "local-only"}
            )
            assert reply.status_code == 200
            assert len(replica.requests) == 1
        assert not r.best.requests


async def test_an_answer_that_breaks_in_the_region_and_on_the_site_box_ends_on_the_device() -> None:
    async with row() as r, r.sdk() as client:

        def breaks(replica: Reciter, after: int) -> None:
            async def generate(request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
                replica.requests.append(request)
                said = len(request.continuation.split())
                for index, word in enumerate(WORDS[said : said + after], said):
                    yield TokenChunk(f"{' ' if index else ''}{word}")
                raise ReplicaBroken("power cut")

            replica.generate = generate  # type: ignore[method-assign]

        breaks(r.best, 4)
        breaks(r.middle, 3)
        r.small.available = False
        stream = await client.chat.completions.create(**ASK, stream=True)
        r.small.available = True
        assert await read(stream) == " ".join(WORDS)
