"""Credits between real gateways: a device holds back what it may not send, and its own rungs serve meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import msgspec
import pytest

from router.base.clock import MonotonicClock
from router.base.errors import ReplicaUnreachable
from router.dispatch.records.telemetry import Telemetry
from router.gateway.app import create_app
from router.signals.link import Link
from router.upstream.servers.polled import ServerOptions
from router.upstream.servers.tier import UpstreamTier
from router.upstream.source import SourceHooks
from router.values.credits import Want
from router.values.prompt import TextPrompt
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import CreditSettings, RouterSettings
from router.wire.load import HEADER, decode_orca
from tests.router.upstream.test_chain import ASK
from tests.support.gateway_fakes import replica_info, tenancy_of
from tests.support.tiers import WORDS, Reciter, Tier
from tests.support.waiting import until

CLOCK = MonotonicClock()
KEY = "a key of more than sixteen"
ASKING = {"x-overspill-instance": "0123456789abcdef", "x-overspill-demand": "3"}
PINNED = {**ASK, "model": "tiny-fp32"}
LIFETIME_S = 3.0  # longer than a busy machine holds up a request that is on its way with a credit


class OneSlot(Reciter):
    """A reciter that has one slot, unless it is told another number, and says how many are taken."""

    running = 0
    slots = 1

    def snapshot(self):
        return msgspec.structs.replace(super().snapshot(), slots=self.slots, running=self.running)

    async def generate(self, request):
        self.running += 1
        try:
            async for chunk in super().generate(request):
                yield chunk
        finally:
            self.running -= 1


class Rig:
    """An edge with a small rung, its client to a cloud of one slot, and both tiers."""

    def __init__(self, edge: Tier, cloud: Tier, small: Reciter, best: OneSlot, upstream: UpstreamTier) -> None:
        self.edge, self.cloud, self.small, self.best, self.upstream = edge, cloud, small, best, upstream

    def counted(self, event: str) -> float:
        return self.cloud.telemetry.registry.get_sample_value("overspill_credits", {"event": event}) or 0.0


@contextlib.asynccontextmanager
async def rig(issuing: CreditSettings | None = None) -> AsyncIterator[Rig]:
    best = OneSlot(replica_info("tiny-fp32", 0, tier="cloud"))
    small = Reciter(replica_info("tiny-int8", 1, tier="edge", quality=0.5))
    async with Tier("cloud", [best]) as cloud, Tier("edge", [small]) as edge:
        cloud.dispatcher.reconfigure(RouterSettings(credits=issuing or CreditSettings(lifetime_ms=LIFETIME_S * 1e3)))
        upstream = UpstreamTier(
            cloud.url,
            link=Link(cloud.url),
            clock=CLOCK,
            options=ServerOptions(poll_interval_s=0.1, connect_timeout_s=5.0, probe_timeout_s=5.0),
            hooks=SourceHooks(
                on_change=lambda: edge.dispatcher.set_replicas([small, *upstream.replicas]),
                probe_succeeded=edge.dispatcher.probe_succeeded,
                probe_failed=edge.dispatcher.probe_failed,
                want=edge.dispatcher.admission.want,
            ),
        )
        edge.dispatcher.tell_of_waiting(upstream.wanted)
        async with upstream:
            await until(lambda: all(r.snapshot().available for r in edge.dispatcher.replicas) and upstream.replicas)
            yield Rig(edge, cloud, small, best, upstream)


def client(tier: Tier) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"{tier.url}/v1", timeout=20)


async def ask(http: httpx.AsyncClient, body: dict) -> httpx.Response:
    return await http.post("/chat/completions", json=body)


async def test_a_device_holds_back_what_it_may_not_send_and_serves_the_rest_itself() -> None:
    async with rig() as it, client(it.edge) as http:
        it.best.pause = asyncio.Event()
        first = asyncio.create_task(ask(http, PINNED))
        await until(lambda: it.best.running == 1)
        await asyncio.sleep(LIFETIME_S)  # what was handed out before expires
        await until(lambda: it.upstream.credits.available() == 0)
        second = asyncio.create_task(ask(http, PINNED))
        await until(lambda: it.edge.dispatcher.waiting == 1 and it.upstream.credits.in_line)
        mine = await ask(http, ASK)
        assert (mine.status_code, mine.headers["x-overspill-tier"]) == (200, "edge")
        assert len(it.best.requests) == 1, "the cloud has not seen the second one"
        assert it.edge.dispatcher.waiting == 1
        it.best.pause.set()
        for reply in (await first, await second):
            assert reply.json()["choices"][0]["message"]["content"] == " ".join(WORDS)
            assert reply.headers["x-overspill-tier"] == "cloud"
        assert it.counted("spent") == 2
        assert it.counted("unbacked") == 0
        record = (await http.get(f"/decisions/{second.result().headers['x-request-id']}")).json()
        assert [event["event"] for event in record["events"]][:2] == ["queued", "sent"]


async def test_an_idle_device_sends_at_once() -> None:
    async with rig() as it, client(it.edge) as http:
        for _ in range(5):
            assert (await ask(http, PINNED)).status_code == 200
        assert (it.counted("spent"), it.counted("unbacked")) == (5, 0)


async def test_a_cloud_that_issues_none_sets_no_limit_and_is_not_told_who_asks() -> None:
    async with rig(CreditSettings(enabled=False)) as it, client(it.edge) as http:
        await until(lambda: not it.upstream.credits.limited)
        seen = []
        app = it.cloud.server.config.loaded_app

        async def watched(scope, receive, send) -> None:
            seen.extend(name for name, _ in scope.get("headers", []) if scope["method"] == "POST")
            await app(scope, receive, send)

        it.cloud.server.config.loaded_app = watched
        async with client(it.edge) as other:
            assert (await ask(other, PINNED)).status_code == 200
        assert it.upstream.credits.available() is None
        assert (await ask(http, PINNED)).status_code == 200
        assert b"x-overspill-instance" not in seen


async def test_credits_that_cannot_be_read_change_nothing_and_are_counted() -> None:
    async with rig() as it:
        await until(lambda: it.upstream.credits.limited)
        report = decode_orca('JSON {"named_metrics":{"credits":-3}}')
        assert report is not None
        it.upstream._take_grant(report, CLOCK.now_s(), Want())
        assert (it.upstream.credits.limited, it.upstream.credits.unreadable) == (True, 1)


async def test_a_request_that_could_not_be_sent_keeps_its_credit() -> None:
    async with rig(CreditSettings(lifetime_ms=60_000.0)) as it:
        it.best.slots = 4
        await until(it.upstream.credits.available)
        it.cloud.cut()
        replica = it.upstream.replicas[0]
        before = it.upstream.credits.available()
        request = InferenceRequest(
            request_id="r",
            model="tiny-fp32",
            prompt=TextPrompt("recite"),
            sampling=SamplingParams(),
            objective=Objective(),
            prompt_tokens=1,
            accepted_at_s=CLOCK.now_s(),
        )
        with pytest.raises(ReplicaUnreachable):
            await anext(replica.generate(request))
        assert it.upstream.credits.available() == before
        assert it.counted("spent") == 0


async def test_only_who_may_send_requests_is_granted_credits() -> None:
    best = OneSlot(replica_info("tiny-fp32", 0, tier="cloud"))
    async with Tier("cloud", [best]) as cloud, httpx.AsyncClient(base_url=cloud.url) as http:

        async def granted(**headers: str):
            reply = await http.get("/health/ready", headers={**ASKING, **headers})
            assert reply.status_code == 200
            return decode_orca(reply.headers[HEADER]).grant

        assert (await granted()).credits == 1
        plain = await http.get("/health/ready")
        assert decode_orca(plain.headers[HEADER]).grant is None, "a probe that does not ask"
        page = await granted(origin="https://elsewhere.example")
        assert page is None, "a web page of another site"
    async with keyed(best) as cloud, httpx.AsyncClient(base_url=cloud.url) as http:
        assert await granted() is None
        assert await granted(authorization="Bearer another key of sixteen") is None
        assert (await granted(authorization=f"Bearer {KEY}")).credits == 1


@contextlib.asynccontextmanager
async def keyed(best: Reciter) -> AsyncIterator[Tier]:
    """A tier that knows one key."""
    tier = Tier("cloud", [best])
    tier.deps = replace(tier.deps, tenancy=tenancy_of({KEY: 0}), telemetry=Telemetry())
    tier.server.config.app = create_app(tier.deps)
    async with tier:
        yield tier


@pytest.mark.parametrize("wrong", [{"x-overspill-demand": "many"}, {"x-overspill-instance": "!"}])
async def test_headers_that_cannot_be_read_are_ignored_and_counted(wrong: dict[str, str]) -> None:
    best = OneSlot(replica_info("tiny-fp32", 0, tier="cloud"))
    async with Tier("cloud", [best]) as cloud, httpx.AsyncClient(base_url=cloud.url) as http:
        reply = await http.get("/health/ready", headers={**ASKING, **wrong})
        assert reply.status_code == 200
        count = cloud.telemetry.registry.get_sample_value("overspill_gateway_credit_headers_unreadable_total")
        assert count == 1
        reply = await http.post("/v1/chat/completions", json=PINNED, headers={**ASKING, **wrong})
        assert reply.status_code == 200
