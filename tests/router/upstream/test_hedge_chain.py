"""Hedges and slots given up over two real tiers: the last hop lets go, and the caller sees one whole stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator

import httpx

from router.values.chunk import TokenChunk
from router.values.replica import ReplicaInfo
from router.values.request import InferenceRequest
from router.values.settings import HedgeSettings, RouterSettings
from tests.support.gateway_fakes import FAMILY, replica_info
from tests.support.tiers import WORDS, Reciter, Tier, linked
from tests.support.waiting import until

ASK = {"model": FAMILY, "messages": [{"role": "user", "content": "recite"}]}
SETTINGS = RouterSettings(policy="cloud-first", hedge=HedgeSettings(budget=1.0))


class Stuck(Reciter):
    """Says so many words, and no more; knows whether it is still asked."""

    said = 0
    open = 0

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        self.open += 1
        try:
            for index, word in enumerate(WORDS[: self.said]):
                yield TokenChunk(f"{' ' if index else ''}{word}")
            await asyncio.sleep(600)
        finally:
            self.open -= 1


class After(Reciter):
    """Answers once another has been asked: however slow this machine is, nobody is overtaken before the start."""

    def __init__(self, info: ReplicaInfo, first: Reciter) -> None:
        super().__init__(info)
        self._first = first

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        await until(lambda: self._first.requests)
        async with contextlib.aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk


async def test_a_cloud_that_is_late_is_overtaken_by_the_device_and_lets_go_at_its_engine() -> None:
    engine = Stuck(replica_info("tiny-fp32", 0, tier="cloud"))
    small = After(replica_info("tiny-int8", 1, tier="edge", quality=0.99), engine)
    cloud, edge = Tier("cloud", [engine]), Tier("edge", [small], SETTINGS)
    async with cloud, edge, linked(edge, cloud, [small]), httpx.AsyncClient(base_url=edge.url, timeout=30) as http:
        edge.dispatcher._hedges.earn(60.0, 1.0)
        asked = {**ASK, "stream": True}
        reply = await http.post("/v1/chat/completions", json=asked, headers={"x-request-id": "late"})
        assert engine.requests[0].attempts_left == 3, "one attempt is kept, and pays for the hedge"
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
        assert text == " ".join(WORDS)
        assert (reply.headers["x-overspill-tier"], reply.headers["x-overspill-reason"]) == ("edge", "hedge")
        await until(lambda: engine.open == 0)
        record = (await http.get("/v1/decisions/late")).json()
        assert [event["event"] for event in record["events"]][:3] == ["sent", "hedged", "hedge_won"]
        assert set(edge.dispatcher.breaker_states().values()) <= {"closed"}


async def test_an_answer_that_gives_its_slot_up_ends_at_the_engine_and_says_so_to_the_caller() -> None:
    engine = Stuck(replica_info("tiny-fp32", 0, tier="cloud"))
    engine.said = 3
    cloud, edge = Tier("cloud", [engine]), Tier("edge", [])
    async with cloud, edge, linked(edge, cloud, []), httpx.AsyncClient(base_url=edge.url, timeout=30) as http:
        asking = asyncio.ensure_future(
            http.post("/v1/chat/completions", json=ASK, headers={"x-overspill-deadline-ms": "25000"})
        )
        await until(lambda: engine.open == 1)
        running = edge.dispatcher._signals.in_flight._by_replica
        await until(lambda: any(a.tokens == 3 for attempts in running.values() for a in attempts))
        (attempt,) = next(iter(running.values()))
        assert attempt.give_up is not None
        assert attempt.give_up()
        reply = await asking
        choice = reply.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one two three", "length")
        told = (reply.headers["x-overspill-degraded"], reply.headers["x-overspill-reason"])
        assert told == ("true", "given-up")
        await until(lambda: engine.open == 0)
