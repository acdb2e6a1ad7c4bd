"""Two tiers that are each other's upstream: what happens once nobody serves a model any more."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.gateway_fakes import FAMILY, replica_info
from tests.support.tiers import Reciter, Tier, linked
from tests.support.waiting import until

ASK: dict[str, Any] = {"model": FAMILY, "messages": [{"role": "user", "content": "recite"}]}


@contextlib.asynccontextmanager
async def circle() -> AsyncIterator[tuple[Tier, Tier, list[Reciter]]]:
    """Both tiers, each with a replica of the same variant, and in its view that of the other."""
    own = [Reciter(replica_info("tiny-fp32", 0, tier=name)) for name in ("cloud", "edge")]
    async with (
        Tier("cloud", [own[0]]) as one,
        Tier("edge", [own[1]]) as two,
        linked(one, two, [own[0]]),
        linked(two, one, [own[1]]),
    ):
        await until(lambda: len(one.dispatcher.replicas) == len(two.dispatcher.replicas) == 2)
        yield one, two, own


@pytest.mark.parametrize("stream", [False, True])
async def test_what_runs_in_a_circle_is_refused_until_later_and_was_sent_round_once(stream: bool) -> None:
    async with circle() as (one, two, own), httpx.AsyncClient(timeout=60) as http:
        for replica in own:
            replica.available = False
        reply = await http.post(f"{one.url}/v1/chat/completions", json={**ASK, "stream": stream})
        assert reply.status_code == 503, reply.text
        assert reply.json()["error"]["code"] == "replicas_failed"
        assert "circle" in reply.json()["error"]["message"]
        assert float(reply.headers["retry-after"]) > 0
        assert "x-should-retry" not in reply.headers or reply.headers["x-should-retry"] == "true"
        failures = [tier.telemetry.replica_failures.collect()[0].samples for tier in (one, two)]
        assert sum(sample.value for told in failures for sample in told if sample.name.endswith("_total")) == 9
        assert {r.breaker for tier in (one, two) for r in tier.dispatcher.status().replicas} == {"closed"}
        own[1].available = True
        reply = await http.post(f"{one.url}/v1/chat/completions", json={**ASK, "stream": stream})
        assert reply.status_code == 200, "nobody stays away from a tier whose server is back"


async def test_who_counts_tiers_is_told_that_they_are_too_many() -> None:
    async with circle() as (one, _, own), httpx.AsyncClient(timeout=60) as http:
        for replica in own:
            replica.available = False
        reply = await http.post(f"{one.url}/v1/chat/completions", json=ASK, headers={"x-overspill-hops": "3"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-overspill-hops")
