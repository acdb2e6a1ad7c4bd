"""The cache of answers: only the very same, one's own, whole and repeatable ones, and never more than it may hold."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cache.exact import AnswerCache
from router.cache.meaning import Meaning
from router.cache.settings import CacheSettings
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.records.telemetry import Telemetry
from router.gateway.app import create_app
from router.values.answer import Answer, Route
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import TextPrompt
from router.values.replica import ReplicaInfo
from router.values.request import CacheUse, InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import RouterSettings
from router.values.usage import Usage
from tests.support.clocks import VirtualClock
from tests.support.gateway_fakes import FAMILY, gateway_deps, replica_info, tenancy_of
from tests.support.tiers import WORDS, Reciter
from tests.support.waiting import until

CHAT: dict[str, Any] = {"model": FAMILY, "messages": [{"role": "user", "content": "recite now"}], "temperature": 0}
INFER = {
    "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["recite"]}],
    "parameters": {"temperature": 0},
}
KEYS = {"alice-0123456789": 0, "bob-0123456789": 0}


class House:
    """A gateway with a cache over a real dispatcher."""

    def __init__(self, **settings: Any) -> None:
        self.clock = VirtualClock()
        self.reciter = Reciter(replica_info("tiny-int8"))
        self.infos = [self.reciter.info]
        self.cache = AnswerCache(CacheSettings(**{"max_mbytes": 1, **settings}), self.clock, lambda: self.infos)
        self.dispatcher = Dispatcher([self.reciter], RouterSettings(), telemetry=Telemetry())

    @contextlib.asynccontextmanager
    async def open(self, **more: Any) -> AsyncIterator[House]:
        deps = gateway_deps(
            self.dispatcher,
            cache=self.cache,
            tenancy=tenancy_of(KEYS),
            models=lambda: self.infos,
            clock=self.clock,
            **more,
        )
        transport = httpx.ASGITransport(create_app(deps))
        async with self.dispatcher, httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            self.http = http
            yield self

    async def ask(self, body: dict[str, Any], key: str = "alice-0123456789", **headers: str) -> httpx.Response:
        path = "/v1/chat/completions" if "messages" in body else f"/v2/models/{FAMILY}/infer"
        reply = await self.http.post(path, json=body, headers={"authorization": f"Bearer {key}", **headers})
        assert reply.status_code == 200, reply.text
        return reply


def hit(reply: httpx.Response) -> str | None:
    return reply.headers.get("x-overspill-cache")


async def test_the_very_same_is_answered_again_without_a_replica_over_every_api() -> None:
    async with House().open() as house:
        first, second = [await house.ask(CHAT) for _ in range(2)]
        assert (hit(first), hit(second), len(house.reciter.requests)) == ("miss", "hit", 1)
        assert second.json()["choices"] == first.json()["choices"]
        assert second.headers["x-overspill-reason"] == "cache"
        one, two = first.json()["usage"], second.json()["usage"]
        assert [one[name] == two[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")] == [True] * 3
        assert two["prompt_tokens_details"]["cached_tokens"] == two["prompt_tokens"], "none of it was computed"
        third, fourth = [await house.ask(INFER) for _ in range(2)]
        assert (hit(third), hit(fourth)) == ("miss", "hit")
        assert third.json()["outputs"] == fourth.json()["outputs"]


async def test_a_stream_is_replayed_as_a_stream_also_where_it_was_asked_for_whole() -> None:
    async with House().open() as house:
        await house.ask(CHAT)
        own: Any = house.http  # newer SDKs name another httpx
        sdk = openai.AsyncOpenAI(api_key="alice-0123456789", base_url="http://localhost/v1", http_client=own)
        options: Any = {"include_usage": True}
        stream = await sdk.chat.completions.create(**CHAT, stream=True, stream_options=options)
        events = [event async for event in stream]
    assert len(house.reciter.requests) == 1
    texts = [event.choices[0].delta.content for event in events if event.choices and event.choices[0].delta.content]
    assert "".join(texts) == " ".join(WORDS)
    assert len(texts) == 10, "event for event"
    assert (events[-1].usage.completion_tokens, events[-2].choices[0].finish_reason) == (10, "stop")


@pytest.mark.parametrize(
    ("change", "headers", "key"),
    [
        ({}, {}, "bob-0123456789"),
        ({}, {"x-overspill-cache-salt": "user 7"}, "alice-0123456789"),
        ({}, {"x-overspill-locality": "local-only"}, "alice-0123456789"),
        ({}, {"x-overspill-min-quality": "0.1"}, "alice-0123456789"),
        ({"max_tokens": 3}, {}, "alice-0123456789"),
        ({"stop": "nine"}, {}, "alice-0123456789"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {}, "alice-0123456789"),
        ({"model": "tiny-int8"}, {}, "alice-0123456789"),
        ({"messages": [{"role": "system", "content": "recite now"}]}, {}, "alice-0123456789"),
    ],
)
async def test_what_is_not_the_very_same_is_asked(change: dict[str, Any], headers: dict[str, str], key: str) -> None:
    async with House().open() as house:
        await house.ask(CHAT)
        assert hit(await house.ask({**CHAT, **change}, key, **headers)) == "miss"
        assert len(house.reciter.requests) == 2


async def test_only_repeatable_requests_have_answers_to_keep() -> None:
    async with House().open() as house:
        for _ in range(2):
            assert hit(await house.ask({**CHAT, "temperature": 1})) is None
        seeded = [hit(await house.ask({**CHAT, "temperature": 1, "seed": seed})) for seed in (7, 7, 8)]
    assert seeded == ["miss", "hit", "miss"]


async def test_a_caller_may_opt_out_of_giving_of_keeping_and_a_wrong_wish_is_refused() -> None:
    async with House().open() as house:
        assert hit(await house.ask(CHAT, **{"x-overspill-cache": "no-store"})) is None
        assert (hit(await house.ask(CHAT)), hit(await house.ask(CHAT))) == ("miss", "hit")
        assert hit(await house.ask(CHAT, **{"x-overspill-cache": "no-cache"})) == "miss"
        assert (len(house.reciter.requests), len(house.cache)) == (3, 1)
        wrong = await house.http.post(
            "/v1/chat/completions",
            json=CHAT,
            headers={"authorization": "Bearer alice-0123456789", "x-overspill-cache": "maybe"},
        )
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-overspill-cache")


async def test_answers_age_and_go_with_what_made_them() -> None:
    async with House(max_age_s=60.0).open() as house:
        await house.ask(CHAT)
        await house.clock.advance(59.0)
        assert hit(await house.ask(CHAT)) == "hit"
        await house.clock.advance(2.0)
        assert hit(await house.ask(CHAT)) == "miss"
        house.infos = [dataclasses.replace(house.reciter.info, version="2")]
        assert hit(await house.ask(CHAT)) == "miss", "another version answers otherwise"
        house.infos = []
        assert house.cache.find(house.reciter.requests[-1]) is None


async def test_what_breaks_off_or_loses_its_reader_is_not_kept() -> None:
    async with House().open() as house:
        house.reciter.pause = asyncio.Event()
        running = asyncio.create_task(house.ask(CHAT))
        await until(lambda: house.reciter.requests)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        house.reciter.pause.set()
        assert len(house.cache) == 0
        assert hit(await house.ask(CHAT)) == "miss"


# ── what means nearly the same ──────────────────────────────────────────────────────────────────────────────────────

AXES = {"france": 0, "capital": 1, "paris": 2, "spain": 3, "recite": 4, "please": 5}


async def embed(_: InferenceRequest, text: str) -> np.ndarray | None:
    """A model whose vectors count a few words; `please` hardly weighs."""
    vector = np.zeros(8, np.float32)
    for word in text.lower().replace("?", " ").split():
        vector[AXES.get(word, 7)] += 0.1 if word == "please" else 1.0
    return vector / np.linalg.norm(vector) if "silence" not in text else None


def says(text: str, **more: Any) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", "content": text}], **more}


async def test_what_means_nearly_the_same_is_answered_again_and_nothing_else() -> None:
    async with House(similar_above=0.98, embedding_model="m").open(embed=embed) as house:
        assert hit(await house.ask(says("capital France 2026"))) == "miss"
        for text in ("capital France please 2026", "France capital 2026"):
            assert hit(await house.ask(says(text))) == "hit"
        for other in (
            says("capital Spain 2026"),
            says("capital France 2027"),
            says("capital France please 2026", max_tokens=4),
            says("capital France please 2026", temperature=1),
            says("capital France please 2026 silence"),
            says("capital France please 2026 " + "x" * 700),
        ):
            assert hit(await house.ask(other)) != "hit", other
        assert hit(await house.ask(says("France please capital 2026"), "bob-0123456789")) == "miss"
        kept = {"x-overspill-cache": "no-store"}
        assert hit(await house.ask(says("please please capital France 2026"), **kept)) is None
    assert house.cache.similar == 2


async def test_the_messages_before_the_last_one_have_to_be_the_very_same() -> None:
    async with House(similar_above=0.5, embedding_model="m").open(embed=embed) as house:
        before = [{"role": "user", "content": "capital"}, {"role": "assistant", "content": "paris"}]
        last = {"role": "user", "content": "recite"}
        assert hit(await house.ask({**CHAT, "messages": [*before, last]})) == "miss"
        assert (
            hit(await house.ask({**CHAT, "messages": [before[0], {**before[1], "content": "Paris"}, last]})) == "miss"
        )
        assert hit(await house.ask({**CHAT, "messages": [*before, {**last, "content": "recite please"}]})) == "hit"


def test_a_threshold_without_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match="go together"):
        CacheSettings(max_mbytes=1, similar_above=0.9)


# ── the cache alone ─────────────────────────────────────────────────────────────────────────────────────────────────


def request(text: str, caller: str = "a", **changes: Any) -> InferenceRequest:
    fields: dict[str, Any] = {
        "request_id": "r",
        "model": FAMILY,
        "prompt": TextPrompt(text),
        "sampling": SamplingParams(temperature=0.0),
        "objective": Objective(),
        "prompt_tokens": 3,
        "accepted_at_s": 0.0,
        "caller": caller,
    }
    return InferenceRequest(**{**fields, **changes})


async def _chunks(text: str) -> Any:
    yield TokenChunk(text)
    yield TokenChunk("", 0, FinishReason.STOP)


def answer(text: str, *, degraded: bool = False, seamless: bool = True) -> Answer:
    route = Route("cloud", "tiny-int8", 1, "best-quality", degraded, 0.1)
    return Answer(route, _chunks(text), used=lambda: Usage(3, 1), seamless=lambda: seamless)


async def read(told: Answer) -> str:
    return "".join([chunk.text async for chunk in told.chunks])


def cache_of(max_mbytes: int = 1) -> AnswerCache:
    infos = [replica_info("tiny-int8")]
    return AnswerCache(CacheSettings(max_mbytes=max_mbytes), VirtualClock(), lambda: infos)


@pytest.mark.parametrize("wrong", [{"degraded": True}, {"seamless": False}])
async def test_a_degraded_answer_and_one_of_two_replicas_are_not_kept(wrong: dict[str, bool]) -> None:
    cache = cache_of()
    assert await read(cache.keep(request("x"), answer("said", **wrong))) == "said"
    assert cache.find(request("x")) is None


async def test_an_answer_that_was_cut_at_its_end_is_not_kept() -> None:
    cache = cache_of()
    cut = answer("said")
    kept = cache.keep(request("x"), cut)
    first = await anext(kept.chunks)
    cut.route = msgspec.structs.replace(cut.route, degraded=True)  # as a journey says it of a cut answer
    assert first.text + await read(kept) == "said"
    assert cache.find(request("x")) is None


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(0, 300_000), st.booleans()), max_size=40)
)
async def test_it_never_holds_more_than_it_may_and_gives_everybody_its_own(
    steps: list[tuple[str, int, int, bool]],
) -> None:
    cache = cache_of()
    for caller, number, size, again in steps:
        asked = request(f"{number}", caller)
        said = f"{caller}{number}" + "x" * size
        if not again:
            assert await read(cache.keep(asked, answer(said))) == said
        found = cache.find(asked)
        if found is not None:
            text = await read(found)
            assert text.startswith(f"{caller}{number}")
            assert found.cache == "hit"
        assert cache.size_bytes <= 1_000_000
        assert cache.size_bytes == sum(kept.size_bytes for own in cache._answers.values() for kept in own.values())
        assert set(cache._answers) == set(cache._bytes)


async def test_what_is_no_ascii_counts_as_what_it_takes() -> None:
    """A text with one character beyond the first plane takes four bytes for each of its characters."""
    for text in ("x" * 100_000, "x" * 50_000 + "\N{GRINNING FACE}"):
        cache = cache_of()
        await read(cache.keep(request("q"), answer(text)))
        assert len(cache) == 1
        assert cache.size_bytes >= sys.getsizeof(text) - 100


async def test_a_look_for_what_means_the_same_asks_once_what_serves() -> None:
    """A tier may have a thousand replicas, and a caller thousands of answers."""
    infos, asked = [replica_info("tiny-int8")], list[int]()

    def models() -> list[ReplicaInfo]:
        asked.append(1)
        return infos

    cache = AnswerCache(CacheSettings(max_mbytes=1, similar_above=0.9, embedding_model="m"), VirtualClock(), models)
    meaning = Meaning(b"rest", np.array([1.0, 0.0], np.float32))
    for index in range(100):
        await read(cache.keep(request(f"text {index}"), answer("said"), meaning))
    asked.clear()
    assert cache.find_like(request("another"), meaning) is not None
    assert len(asked) == 1


async def test_who_holds_most_gives_way_first() -> None:
    cache = cache_of()
    await read(cache.keep(request("mine", "small"), answer("said")))
    for number in range(40):
        await read(cache.keep(request(f"{number}", "flood"), answer("x" * 100_000)))
    assert cache.find(request("mine", "small")) is not None
    assert cache.evicted > 0


def test_what_a_tier_behind_is_told_of_the_wish() -> None:
    from router.wire.headers import cache_use, cache_use_headers

    for wish in CacheUse:
        assert cache_use(dict(cache_use_headers(wish))) is wish
