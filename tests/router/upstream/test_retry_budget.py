"""One budget of attempts for all tiers, and a caller who leaves is heard at the last of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from msgspec.structs import replace

from router.base.errors import ReplicaBroken, ReplicaFailed
from router.values.chunk import TokenChunk
from router.values.request import InferenceRequest
from router.values.settings import BreakerSettings, RouterSettings
from tests.support.gateway_fakes import FAMILY, replica_info
from tests.support.tiers import Reciter, Tier, linked
from tests.support.waiting import until

NEVER = BreakerSettings(failures=1000, window=1000, failure_ratio=1.0)
BUDGET = RouterSettings(max_attempts=4, breaker=NEVER)
VARIANTS = ("tiny-fp32", "tiny-int8")
ASK = {"model": FAMILY, "messages": [{"role": "user", "content": "recite"}]}


class Failing(Reciter):
    """Counts what it is asked, and fails before its first word or after its second."""

    after = 0

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        said = len(request.continuation.split())
        for index in range(self.after):
            yield TokenChunk(f"{' ' if said + index else ''}w{said + index}")
        raise ReplicaBroken("power cut") if self.after else ReplicaFailed("HTTP 500")


def engines(tier: str, after: int = 0, quality: float = 1.0) -> list[Failing]:
    """Four of each variant: more than any budget of this file."""
    found = [
        Failing(replica_info(name, rung, tier=tier, replica_id=f"{tier} {copy}/{name}", quality=quality))
        for rung, name in enumerate(VARIANTS)
        for copy in range(4)
    ]
    for engine in found:
        engine.after = after
    return found


@asynccontextmanager
async def storm(after: int, settings: RouterSettings = BUDGET) -> AsyncIterator[tuple[Tier, Tier, list, list]]:
    there, here = engines("cloud", after), engines("edge", after, quality=0.5)
    cloud, edge = Tier("cloud", there, settings), Tier("edge", here, settings)
    async with cloud, edge, linked(edge, cloud, here):
        yield edge, cloud, here, there


def asked(*engines: Failing) -> int:
    return sum(len(engine.requests) for engine in engines)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2], ids=["before the first token", "in the middle"])
async def test_a_request_that_fails_everywhere_costs_one_budget_over_both_tiers(after: int, stream: bool) -> None:
    async with storm(after) as (edge, _, here, there), httpx.AsyncClient(base_url=edge.url, timeout=20) as http:
        for locality, expected in (("cloud-only", 4), ("any", 4)):
            before = asked(*here, *there)
            reply = await http.post(
                "/v1/chat/completions",
                json={**ASK, "stream": stream, "messages": [{"role": "user", "content": locality}]},
                headers={"x-overspill-locality": locality},
            )
            assert reply.status_code >= 500 or "error" in reply.text
            spent = asked(*here, *there) - before
            assert 2 <= spent <= expected, f"{spent} engines worked on one request"


async def test_the_cloud_leaves_one_attempt_to_the_device() -> None:
    """Its own engines are another way, so the budget is not spent on one endpoint alone."""
    async with storm(0) as (edge, _, here, there), httpx.AsyncClient(base_url=edge.url, timeout=20) as http:
        edge.dispatcher.reconfigure(RouterSettings(max_attempts=4, breaker=NEVER, policy="cloud-first"))
        reply = await http.post("/v1/chat/completions", json=ASK)
        assert reply.status_code >= 500
        assert (asked(*there), asked(*here)) == (3, 1)
        assert reply.json()["error"]["attempts"] == 4


async def test_a_tier_takes_the_smaller_of_its_own_budget_and_what_is_left() -> None:
    async with storm(0) as (_, cloud, _, there), httpx.AsyncClient(base_url=cloud.url, timeout=20) as http:
        for left, expected in (("2", 2), ("1", 1), ("900", 4)):
            before = asked(*there)
            body = {**ASK, "messages": [{"role": "user", "content": left}]}
            reply = await http.post("/v1/chat/completions", json=body, headers={"x-overspill-attempts-left": left})
            assert asked(*there) - before == expected
            assert reply.json()["error"]["attempts"] == expected
        for wrong in ("0", "-1", "x", ""):
            reply = await http.post("/v1/chat/completions", json=ASK, headers={"x-overspill-attempts-left": wrong})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-overspill-attempts-left")


async def test_a_refusal_costs_one_attempt() -> None:
    """A cloud that turns a request away has tried nothing: the device goes on with all but one."""
    async with storm(0) as (edge, cloud, here, there), httpx.AsyncClient(base_url=edge.url, timeout=20) as http:
        edge.dispatcher.reconfigure(RouterSettings(max_attempts=4, breaker=NEVER, policy="cloud-first"))
        cloud.dispatcher.close()
        await http.post("/v1/chat/completions", json=ASK)
        assert asked(*there) == 0
        assert 1 <= asked(*here) <= 3


class Endless(Reciter):
    """Talks for ever, or never begins; says when it was let go."""

    silent = False
    open = False

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        self.open = True
        try:
            if self.silent:
                await asyncio.sleep(600)
            while True:
                yield TokenChunk(" word")
                await asyncio.sleep(0.005)
        finally:
            self.open = False


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("silent", [False, True], ids=["running", "before the first token"])
async def test_a_caller_who_leaves_is_heard_at_the_last_hop(stream: bool, silent: bool) -> None:
    engine = Endless(replica_info("tiny-fp32", 0, tier="cloud"))
    engine.silent = silent
    async with Tier("cloud", [engine]) as cloud, Tier("edge", []) as edge, linked(edge, cloud, []):
        async with httpx.AsyncClient(base_url=edge.url, timeout=20) as http:
            body = {**ASK, "stream": stream}
            calling = asyncio.ensure_future(http.post("/v1/chat/completions", json=body))
            await until(lambda: bool(engine.requests) and engine.open)
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
        await until(lambda: not engine.open)
        await until(lambda: not len(cloud.dispatcher._signals.in_flight))
        await until(lambda: not len(edge.dispatcher._signals.in_flight))


async def test_a_caller_who_leaves_a_queue_of_the_cloud_never_reaches_an_engine() -> None:
    engine = Endless(replica_info("tiny-fp32", 0, tier="cloud"))
    real = engine.snapshot
    async with Tier("cloud", [engine]) as cloud, Tier("edge", []) as edge, linked(edge, cloud, []):
        async with httpx.AsyncClient(base_url=edge.url, timeout=20) as http:
            engine.snapshot = lambda: replace(real(), running=4)
            calling = asyncio.ensure_future(http.post("/v1/chat/completions", json=ASK))
            await until(lambda: cloud.dispatcher.waiting == 1)
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            await until(lambda: cloud.dispatcher.waiting == 0)
        assert engine.requests == []
