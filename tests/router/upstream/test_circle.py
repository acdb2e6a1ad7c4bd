"""Tiers that are each other's upstream: none counts what leads back to who asks, and nobody waits in a circle."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from router.base.clock import MonotonicClock
from router.signals.link import Link
from router.upstream.servers.polled import ServerOptions
from router.upstream.servers.tier import UpstreamTier
from router.values.credits import NOTHING_WANTED, Want
from router.values.replica import ReplicaSnapshot
from router.wire.load import HEADER, LoadReport, decode_orca
from router.wire.names import INSTANCE
from tests.support.gateway_fakes import FAMILY, replica_info
from tests.support.tiers import Reciter, Tier
from tests.support.waiting import until, until_answered

ASK: dict[str, Any] = {"model": FAMILY, "messages": [{"role": "user", "content": "recite"}]}
SLOTS = 4
"""Of each tier's own replica."""
SELDOM_S = 60.0
SOON = {"x-overspill-ttft-slo-ms": "300"}

PAIR = [(0, 1), (1, 0)]
RING = [(0, 1), (1, 2), (2, 0)]
MESH = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


class Roomy(Reciter):
    """More slots than a request takes that goes round until its hops end it."""

    def snapshot(self) -> ReplicaSnapshot:
        return msgspec.structs.replace(super().snapshot(), slots=16)


class Joined:
    """Tiers with a replica of the same variant each (`own`), and beside it those of the tiers above (`above`)."""

    def __init__(self, number: int, kind: type[Reciter]) -> None:
        self.own = [kind(replica_info("tiny-fp32", 0, tier=f"tier{n}")) for n in range(number)]
        self.tiers = [Tier(replica.info.tier, [replica]) for replica in self.own]
        self.above: list[list[UpstreamTier]] = [[] for _ in self.own]
        self.polls: Counter[tuple[int, int]] = Counter()

    def link(self, below: int, above: int, poll_interval_s: float) -> UpstreamTier:
        """Return a client of one of them to another, not begun yet."""

        def publish() -> None:
            found = [replica for upstream in self.above[below] for replica in upstream.replicas]
            self.tiers[below].dispatcher.set_replicas([self.own[below], *found])

        def want() -> Want:
            self.polls[below, above] += 1
            return NOTHING_WANTED

        url, clock = self.tiers[above].url, MonotonicClock()
        client = UpstreamTier(
            url,
            link=Link(url),
            clock=clock,
            options=ServerOptions(poll_interval_s=poll_interval_s, connect_timeout_s=5.0, probe_timeout_s=5.0),
            hooks=replace(self.tiers[below].dispatcher.source_hooks(publish), want=want),
            name=self.own[above].info.tier,
        )
        self.above[below].append(client)
        return client

    def off(self) -> None:
        """Nobody of them has a replica of its own any more."""
        for replica in self.own:
            replica.available = False

    async def polled(self, times: int) -> None:
        """Wait until each tier has asked each above it so often again."""
        before = self.polls.copy()
        await until(lambda: all(self.polls[link] >= number + times for link, number in before.items()))


@contextlib.asynccontextmanager
async def joined(
    links: Sequence[tuple[int, int]], poll_interval_s: float = 0.02, kind: type[Reciter] = Reciter
) -> AsyncIterator[Joined]:
    made = Joined(1 + max(max(link) for link in links), kind)
    async with contextlib.AsyncExitStack() as stack:
        for tier in made.tiers:
            await stack.enter_async_context(tier)
        for below, above in links:
            client = await stack.enter_async_context(made.link(below, above, poll_interval_s))
            await until(lambda client=client: client.replicas and client.condition.ready)
        yield made


async def said(http: httpx.AsyncClient, tier: Tier, asker: Tier | None = None) -> tuple[int, LoadReport]:
    """Return what a tier says of itself, to anybody or to another tier."""
    headers = {} if asker is None else {INSTANCE: asker.dispatcher.instance}
    reply = await http.get(f"{tier.url}/health/ready", headers=headers)
    report = decode_orca(reply.headers[HEADER])
    assert report is not None
    return reply.status_code, report


@pytest.mark.parametrize(("links", "slots", "to_neighbours"), [(PAIR, 2, 1), (MESH, 3, 1)])
async def test_no_tier_counts_what_leads_back_to_who_asks(
    links: list[tuple[int, int]], slots: int, to_neighbours: int
) -> None:
    async with joined(links) as made, httpx.AsyncClient(timeout=60) as http:
        await made.polled(20)  # each would tell more than the one before
        for below, above in links:
            _, to_anybody = await said(http, made.tiers[above])
            _, to_below = await said(http, made.tiers[above], made.tiers[below])
            assert (to_anybody.slots, to_below.slots) == (slots * SLOTS, to_neighbours * SLOTS)


async def test_of_a_ring_each_tier_is_told_of_the_next_one() -> None:
    async with joined(RING) as made, httpx.AsyncClient(timeout=60) as http:
        await made.polled(20)
        for tier in made.tiers:
            assert (await said(http, tier))[1].slots == 2 * SLOTS


async def test_in_a_row_each_tier_counts_all_above_it() -> None:
    async with joined([(1, 2), (0, 1)]) as made, httpx.AsyncClient(timeout=60) as http:
        await made.polled(3)
        assert [(await said(http, tier))[1].slots for tier in made.tiers] == [3 * SLOTS, 2 * SLOTS, SLOTS]


@pytest.mark.parametrize("links", [PAIR, RING, MESH])
async def test_a_circle_in_which_nobody_serves_is_not_ready_until_somebody_does(links: list[tuple[int, int]]) -> None:
    async with joined(links) as made, httpx.AsyncClient(timeout=60) as http:
        made.off()

        async def ready() -> set[int]:
            return {(await said(http, tier))[0] for tier in made.tiers}

        async def nobody() -> bool:
            return await ready() == {503}

        async def everybody() -> bool:
            return await ready() == {200}

        await until_answered(nobody)
        await made.polled(3)
        assert await nobody()
        reply = await http.post(f"{made.tiers[0].url}/v1/chat/completions", json=ASK, headers=SOON)
        assert reply.status_code == 503, reply.text
        assert "circle" not in reply.json()["error"]["message"], "it is known here, and nobody is asked"
        assert reply.json()["error"]["code"] != "replicas_failed"
        made.own[-1].available = True
        below = [at for at, above in links if above == len(made.own) - 1]
        await until_answered(lambda: answers(http, made.tiers[below[0]]))


async def answers(http: httpx.AsyncClient, tier: Tier) -> bool:
    return (await http.post(f"{tier.url}/v1/chat/completions", json=ASK, headers=SOON)).status_code == 200


async def test_a_variant_that_nobody_has_any_more_is_no_longer_listed() -> None:
    async with joined(PAIR) as made, httpx.AsyncClient(timeout=60) as http:
        for asker, tier in zip(made.tiers, reversed(made.tiers), strict=True):
            tier.dispatcher.set_replicas([r for r in tier.dispatcher.replicas if r.info.remote])
            headers = {INSTANCE: asker.dispatcher.instance}
            cards = (await http.get(f"{tier.url}/v1/models", headers=headers)).json()["data"]
            assert cards == []


@pytest.mark.parametrize("stream", [False, True])
async def test_what_runs_in_a_circle_between_two_polls_is_refused_until_later_and_was_sent_round_once(
    stream: bool,
) -> None:
    async with joined(PAIR, SELDOM_S, Roomy) as made, httpx.AsyncClient(timeout=60) as http:
        one, two = made.tiers
        made.off()
        reply = await http.post(f"{one.url}/v1/chat/completions", json={**ASK, "stream": stream})
        assert reply.status_code == 503, reply.text
        assert reply.json()["error"]["code"] == "replicas_failed"
        assert "circle" in reply.json()["error"]["message"]
        assert float(reply.headers["retry-after"]) > 0
        assert "x-should-retry" not in reply.headers or reply.headers["x-should-retry"] == "true"
        failures = [tier.telemetry.replica_failures.collect()[0].samples for tier in (one, two)]
        assert sum(sample.value for told in failures for sample in told if sample.name.endswith("_total")) == 9
        assert {r.breaker for tier in (one, two) for r in tier.dispatcher.status().replicas} == {"closed"}
        made.own[1].available = True
        reply = await http.post(f"{one.url}/v1/chat/completions", json={**ASK, "stream": stream})
        assert reply.status_code == 200, "nobody stays away from a tier whose server is back"


async def test_who_counts_tiers_is_told_that_they_are_too_many() -> None:
    async with joined(PAIR, SELDOM_S, Roomy) as made, httpx.AsyncClient(timeout=60) as http:
        made.off()
        headers = {"x-overspill-hops": "3"}
        reply = await http.post(f"{made.tiers[0].url}/v1/chat/completions", json=ASK, headers=headers)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-overspill-hops")
