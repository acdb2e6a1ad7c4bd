"""Servers of other makers: what they are, what they serve and how they are, also where they say it badly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import structlog
from aiohttp import web

from router.base.clock import MonotonicClock
from router.base.errors import InvalidRequest, ReplicaFailed
from router.upstream.servers.foreign import Surroundings
from router.upstream.servers.openai import OpenAIServer
from router.upstream.servers.polled import ServerOptions
from router.upstream.settings import BackendModel, BackendSettings
from router.upstream.source import SourceHooks
from router.values.chunk import FinishReason
from router.values.feature import Feature
from router.values.prompt import ChatPrompt, Message, TextPrompt, TokenPrompt
from router.values.replica import Place
from router.values.request import InferenceRequest, Locality, Objective
from router.values.sampling import SamplingParams
from tests.support.few_files import few_files
from tests.support.foreign_server import LLAMA_METRICS, VLLM_METRICS, ForeignServer, endless, status
from tests.support.waiting import until

CLOCK = MonotonicClock()
FAST = ServerOptions(poll_interval_s=0.02, connect_timeout_s=1.0, probe_timeout_s=2.0)
PLACES = {"known": Place("family", 2, 0.7)}.get


@contextlib.asynccontextmanager
async def behind(
    at: ForeignServer, options: ServerOptions = FAST, hooks: SourceHooks | None = None, **settings: Any
) -> AsyncIterator[OpenAIServer]:
    """The client of a server, that has not yet found anything."""
    entry = BackendSettings(**{"name": "b", "urls": (at.url,), "warm_up": False, **settings})
    surroundings = Surroundings(CLOCK, hooks or SourceHooks(), PLACES)
    async with OpenAIServer(at.url, "b", entry, surroundings, options) as made:
        yield made


async def found(server: OpenAIServer) -> Any:
    await until(lambda: server.replicas and server.replicas[0].snapshot().available)
    return server.replicas[0]


def ask(prompt: Any = None, **changes: Any) -> InferenceRequest:
    fields = {
        "request_id": "r-1",
        "model": "m",
        "prompt": prompt or ChatPrompt((Message("user", "count"),)),
        "sampling": SamplingParams(max_tokens=3, temperature=0.0),
        "objective": Objective(),
        "prompt_tokens": 40,
        "accepted_at_s": CLOCK.now_s(),
    }
    return InferenceRequest(**{**fields, **changes})


async def text_of(replica: Any, request: InferenceRequest) -> str:
    return "".join([chunk.text async for chunk in replica.generate(request)])


@pytest.mark.parametrize(
    ("owner", "name"),
    [("vllm", "vllm"), ("llamacpp", "llama.cpp"), ("sglang", "sglang"), ("library", "ollama"), ("openai", "plain")],
)
async def test_a_server_says_what_it_is(owner: str, name: str) -> None:
    async with ForeignServer(owner) as server, behind(server) as client:
        server.pages["/api/version"] = {"version": "0.9"}
        replica = await found(client)
        assert client.call(ask(), replica.info).dialect.name == name
        assert await text_of(replica, ask()) == "one two three"
        vllm_only = {"continuous_usage_stats"} <= set(server.bodies[0]["stream_options"])
        assert vllm_only == (name in {"vllm", "sglang"})


async def test_the_configuration_may_say_what_it_is() -> None:
    async with ForeignServer("who-knows") as server, behind(server, server="llama.cpp") as client:
        assert Feature.PENALTIES not in (await found(client)).info.lacks


async def test_a_model_has_the_place_that_is_configured_or_known_or_its_own() -> None:
    named = BackendModel(served="c", variant="known", quality=0.6, context_tokens=99, slots=5)
    async with ForeignServer(models=("known", "/m/x.gguf", "c"), max_model_len=2048) as server:
        async with behind(server) as client:
            await found(client)
            infos = {replica.info.variant: replica.info for replica in client.replicas}
            assert infos.keys() == {"known", "x.gguf", "c"}
            known = infos["known"]
            assert (known.family, known.rung, known.quality, known.context_tokens) == ("family", 2, 0.7, 2048)
            assert (infos["c"].family, infos["c"].rung, infos["c"].quality) == ("c", 0, 1.0)
            assert {info.replica_id for info in infos.values()} == {"b/known", "b/x.gguf", "b/c"}
            assert {info.device for info in infos.values()} == {server.url}, "they share what they run on"
            by_path = next(replica for replica in client.replicas if replica.info.variant == "x.gguf")
            await text_of(by_path, ask())
            assert server.bodies[-1]["model"] == "/m/x.gguf"
        async with behind(server, models=(named,), local=True) as client:
            replica = await found(client)
            info = replica.info
            assert [r.info.variant for r in client.replicas] == ["known"]
            assert (info.family, info.rung, info.quality, info.context_tokens) == ("family", 2, 0.6, 99)
            assert (info.tier, info.remote, replica.link) == ("edge", False, None)
            assert replica.snapshot().slots == 5
            asked = ask(objective=Objective(locality=Locality.LOCAL_ONLY))
            assert await text_of(replica, asked) == "one two three"
            assert server.bodies[-1]["model"] == "c"


async def test_a_model_that_is_not_there_is_waited_for() -> None:
    wanted = (BackendModel(served="later"),)
    async with ForeignServer(models=("now",)) as server, behind(server, models=wanted) as client:
        await until(lambda: not client.unreached)
        assert client.replicas == []
        server.pages["/v1/models"] = {"data": [{"id": "later", "owned_by": "vllm"}]}
        assert (await found(client)).info.replica_id == "b/later"


async def test_a_hosted_api_of_hundreds_of_models_wants_them_named() -> None:
    many = tuple(f"m{n}" for n in range(300))
    async with ForeignServer("openai", models=many) as server:
        async with behind(server) as client:
            await until(lambda: "300 models" in client.unreached)
            assert client.replicas == []
        async with behind(server, models=(BackendModel(served="m7"),)) as client:
            assert (await found(client)).info.variant == "m7"


async def test_llama_cpp_tells_its_window_and_slots() -> None:
    async with ForeignServer("llamacpp") as server:
        server.pages |= {
            "/props": {"default_generation_settings": {"n_ctx": 1024}, "total_slots": 3},
            "/metrics": LLAMA_METRICS,
        }
        async with behind(server) as client:
            replica = await found(client)
            await until(lambda: replica.snapshot().running == 2)
            assert replica.info.context_tokens == 1024
            assert (replica.snapshot().slots, replica.snapshot().queued) == (3, 5)


async def test_the_window_of_ollama_is_the_one_that_it_runs() -> None:
    long = {"model_info": {"llama.context_length": 131_072, "general.architecture": "llama"}}
    cases = [
        ({}, long, 4096),
        ({}, {**long, "parameters": "stop x\nnum_ctx    8192\n"}, 8192),
        ({"models": [{"name": "m", "context_length": 16384}]}, long, 16384),
        ({"models": [{"name": "other", "context_length": 16384}]}, {"model_info": {"x.context_length": 2048}}, 2048),
        ({"models": [{"name": "m", "context_length": "much"}]}, {"parameters": "num_ctx -4"}, 4096),
    ]
    for running, show, window in cases:
        async with ForeignServer("library") as server:
            server.pages |= {"/api/version": {}, "/api/ps": running, "/api/show": show}
            async with behind(server) as client:
                assert (await found(client)).info.context_tokens == window


async def test_the_load_that_is_exported_is_the_replicas() -> None:
    async with ForeignServer(max_model_len=2048) as server:
        server.pages["/metrics"] = VLLM_METRICS
        async with behind(server) as client:
            replica = await found(client)
            await until(lambda: replica.snapshot().running == 3)
            snapshot = replica.snapshot()
            assert (snapshot.queued, snapshot.kv_free_tokens) == (1, 34_944)
            server.pages["/metrics"] = VLLM_METRICS.replace(" 3.0", " 90.0").replace(" 1.0\nvllm:num", " 0.0\nvllm:num")
            await until(lambda: replica.snapshot().slots == 90)


async def test_more_slots_are_declared_than_there_are() -> None:
    model = BackendModel(served="m", slots=32)
    async with ForeignServer("m", max_model_len=2048) as server:
        server.pages["/metrics"] = VLLM_METRICS.replace(" 1.0\nvllm:num", " 0.0\nvllm:num")
        with structlog.testing.capture_logs() as told:
            async with behind(server, models=(model,)) as client:
                replica = await found(client)
                await until(lambda: replica.snapshot().running == 3)
                assert replica.snapshot().slots == 32, "nothing waits there"
                server.pages["/metrics"] = VLLM_METRICS
                await until(lambda: replica.snapshot().slots == 3)
                await until(lambda: any("lower `slots`" in line["event"] for line in told))
    assert sum("lower `slots`" in line["event"] for line in told) == 1
    (line,) = [line for line in told if "lower `slots`" in line["event"]]
    assert (line["backend"], line["slots"], line["seen"], line["waiting"]) == ("b", 32, 3, 1)


async def test_room_shrinks_by_what_was_sent_and_grows_by_what_has_ended() -> None:
    async with ForeignServer(max_model_len=4096) as server:
        server.pages["/metrics"] = VLLM_METRICS
        server.gate = asyncio.Event()
        async with behind(server, replace(FAST, poll_interval_s=30.0)) as client:
            replica = await found(client)
            await until(lambda: replica.snapshot().kv_free_tokens == 34_944)
            answers = [asyncio.ensure_future(text_of(replica, ask(prompt_tokens=1000))) for _ in range(3)]
            await until(lambda: replica.snapshot().kv_free_tokens == 34_944 - 3 * 1002)
            client.doubt()  # a report that knows of them
            server.pages["/metrics"] = VLLM_METRICS.replace(" 0.25", " 0.5")
            await until(lambda: replica.snapshot().kv_free_tokens == 23_296)
            server.gate.set()
            await asyncio.gather(*answers)
            assert replica.snapshot().kv_free_tokens == 23_296 + 3 * 1002


async def test_a_server_without_metrics_is_not_asked_again_and_again() -> None:
    async with ForeignServer() as server, behind(server) as client:
        await found(client)
        await until(lambda: server.asked.count("/health") > 8)
        assert server.asked.count("/metrics") == 1
        assert client.replicas[0].snapshot().kv_free_tokens is None


async def test_a_model_that_is_being_loaded_is_a_time_and_no_error() -> None:
    async with ForeignServer("llamacpp") as server, behind(server) as client:
        replica = await found(client)
        server.pages["/health"] = status(503, b'{"error":{"message":"Loading model"}}', retry_after="7")
        await until(lambda: not replica.snapshot().available)
        assert replica.snapshot().why == "its model is being loaded"
        assert replica.snapshot().back_in_s == 7.0
        server.pages["/health"] = 503
        await until(lambda: replica.snapshot().back_in_s != 7.0)
        assert 1.0 <= replica.snapshot().back_in_s <= 5.0
        server.pages["/health"] = {}
        await until(lambda: replica.snapshot().available)


async def test_a_wrong_key_is_told_and_a_right_one_is_sent() -> None:
    async with ForeignServer() as server:
        server.key = "right"
        async with behind(server, replace(FAST, api_key="wrong")) as client:
            await until(lambda: "does not accept this tier's API key (HTTP 401)" in client.unreached)
        async with behind(server, replace(FAST, api_key="right")) as client:
            assert await text_of(await found(client), ask()) == "one two three"


async def test_what_a_server_cannot_do_is_lacking_and_what_it_can_is_sent() -> None:
    async with ForeignServer("vllm") as server, behind(server) as client:
        replica = await found(client)
        continued = {Feature.CONTINUED_IDS, Feature.CONTINUED_CONSTRAINT, Feature.CONTINUED_TOOLS}
        assert replica.info.lacks == continued
        await text_of(replica, ask(TokenPrompt((5, 6)), sampling=SamplingParams(max_tokens=2, top_k=4, seed=3)))
        assert server.bodies[-1]["prompt"] == [5, 6]
        assert (server.bodies[-1]["top_k"], server.bodies[-1]["seed"]) == (4, 3)
        begun = ask(continuation="one two", continuation_tokens=2, sampling=SamplingParams(max_tokens=4))
        assert await text_of(replica, begun)
        sent = server.bodies[-1]
        assert sent["messages"][-1] == {"role": "assistant", "content": "one two"}
        assert (sent["continue_final_message"], sent["add_generation_prompt"], sent["max_tokens"]) == (True, False, 2)
        await text_of(replica, ask(TextPrompt("a b"), continuation=" c", continuation_tokens=1))
        assert server.bodies[-1]["prompt"] == "a b c"
        assert not any(name.startswith("overspill") for name in sent)
    async with ForeignServer("openai") as server, behind(server) as client:
        lacks = (await found(client)).info.lacks
        assert {Feature.CONTINUED_CHAT, Feature.TOP_K, Feature.PROMPT_IDS, Feature.CONTINUED_IDS} <= lacks


async def test_its_speed_is_measured_before_it_serves() -> None:
    changes = []
    async with ForeignServer() as server:
        server.words = [f" {n}" for n in range(16)]
        async with behind(server, hooks=SourceHooks(on_change=lambda: changes.append(1)), warm_up=True) as client:
            replica = await found(client)
            prior = replica.info.prior
            assert prior.source.startswith("measured: a prompt of 40 tokens")
            assert prior.decode_tokens_per_s > 0 < prior.prefill_tokens_per_s
            assert 0 <= prior.decode_batch_slope <= 1
            assert len(server.bodies) == 7
            prompts = {str(body["messages"]) for body in server.bodies}
            assert len(prompts) == 7, "no cache holds any of them"
            assert changes == [1]


async def test_where_measuring_fails_a_speed_is_assumed_and_a_configured_one_is_believed() -> None:
    async with ForeignServer() as server:
        server.pages["/v1/chat/completions"] = 500
        async with behind(server, warm_up=True) as client:
            assert (await found(client)).info.prior.source.startswith("assumed")
        named = BackendModel(served="m", prefill_tokens_per_s=900.0, decode_tokens_per_s=30.0)
        async with behind(server, warm_up=True, models=(named,)) as client:
            prior = (await found(client)).info.prior
            assert (prior.prefill_tokens_per_s, prior.source) == (900.0, "configured")
            assert server.bodies == []


async def test_leaving_in_the_middle_of_the_warm_up_leaves_nothing_behind() -> None:
    async with ForeignServer() as server:
        server.gate = asyncio.Event()
        async with behind(server, warm_up=True):
            await until(lambda: server.open)
        await until(lambda: not server.open)


@pytest.mark.parametrize("status_code", [404, 400, 500])
async def test_its_refusals_are_of_the_tree(status_code: int) -> None:
    async with ForeignServer() as server, behind(server) as client:
        replica = await found(client)
        body = {"error": {"message": "The model does not exist", "type": "NotFoundError", "code": status_code}}

        async def refuse(_: web.Request) -> web.Response:
            return web.json_response(body, status=status_code)

        server.pages["/v1/chat/completions"] = refuse
        kind = InvalidRequest if status_code == 400 else ReplicaFailed
        with pytest.raises(kind, match=r"backend b: .*does not exist"):
            await text_of(replica, ask())


async def test_a_killed_server_is_unreachable_and_comes_back_where_it_was() -> None:
    failures: list[str] = []
    hooks = SourceHooks(probe_failed=lambda endpoint, why: failures.append(why), misses_to_be_lost=lambda: 2)
    async with ForeignServer() as server, behind(server, hooks=hooks) as client:
        replica = await found(client)
        server.pages["/health"] = status(500)
        await until(lambda: not replica.snapshot().available)
        assert "GET /health: HTTP 500" in replica.snapshot().why
        assert failures
        server.pages["/health"] = {}
        await until(lambda: replica.snapshot().available)
        assert client.replicas == [replica], "it is the same one: what was learnt of it stays"


GARBAGE: list[tuple[str, Any]] = [
    ("/v1/models", b"<html>"),
    ("/v1/models", b""),
    ("/v1/models", {"data": None}),
    ("/v1/models", {"data": {"id": "m"}}),
    ("/v1/models", [1]),
    ("/v1/models", b'{"data":[' + b"[" * 100_000),
    ("/v1/models", b"\xff\xfe"),
    ("/v1/models", endless),
    ("/v1/models", {"data": [{"id": "m" * 70_000}] * 130}),
    ("/v1/models", status(302, location="http://127.0.0.1:1/")),
]


@pytest.mark.parametrize(("path", "page"), GARBAGE)
async def test_a_list_of_models_that_is_none_is_told_and_read_again(path: str, page: Any) -> None:
    async with ForeignServer(max_model_len=512) as server:
        good, server.pages[path] = server.pages[path], page
        async with behind(server, replace(FAST, probe_timeout_s=10.0)) as client:
            await until(lambda: client.condition.why != "not reached yet" or not client.unreached)
            assert client.replicas == []
            server.pages[path] = good
            assert (await found(client)).info.context_tokens == 512


@pytest.mark.parametrize(
    "card",
    [
        {"id": "m", "owned_by": ["vllm"], "max_model_len": "long"},
        {"id": "m", "owned_by": None, "max_model_len": -5},
        {"id": "m", "owned_by": {"a": 1}, "max_model_len": 1e30},
        {"id": "m", "max_model_len": True},
        {"id": "m", "max_model_len": 2**70},
    ],
)
async def test_figures_that_cannot_be_are_none(card: dict[str, Any]) -> None:
    async with ForeignServer() as server:
        others = [{"id": "line\nbreak"}, {"id": ""}, {"id": 5}, {}, "m", None, {"id": "ü"}]
        server.pages["/v1/models"] = {"data": [*others, card]}
        async with behind(server) as client:
            assert (await found(client)).info.context_tokens == 4096
            assert len(client.replicas) == 1


@pytest.mark.parametrize("page", [b"\x00\xff", endless, 500, b"vllm:num_requests_running NaN\n", "x" * 100_000])
async def test_metrics_that_are_none_cost_no_replica_its_health(page: Any) -> None:
    async with ForeignServer() as server:
        server.pages["/metrics"] = page
        async with behind(server, replace(FAST, probe_timeout_s=20.0)) as client:
            replica = await found(client)
            seen = server.asked.count("/health")
            await until(lambda: server.asked.count("/health") > seen + 3)
            assert replica.snapshot().available
            assert replica.snapshot().kv_free_tokens is None


@pytest.mark.parametrize("packed", ["gzip", "deflate", "br", "GZIP, gzip"])
async def test_a_probes_reply_is_never_unpacked(packed: str) -> None:
    """A few kilobytes of it may be gigabytes."""
    asked: list[str] = []

    async def page(request: web.Request) -> web.Response:
        asked.append(request.headers.get("accept-encoding", ""))
        return web.Response(body=b"packed", headers={"content-encoding": packed})

    async with ForeignServer(max_model_len=512) as server:
        good, server.pages["/v1/models"] = server.pages["/v1/models"], page
        async with behind(server) as client:
            await until(lambda: "compressed" in client.condition.why)
            server.pages["/v1/models"] = good
            assert (await found(client)).info.context_tokens == 512
    assert set(asked) == {"identity"}


async def test_a_tier_that_may_open_no_more_files_takes_no_server_for_lost() -> None:
    failures: list[str] = []
    hooks = SourceHooks(probe_failed=lambda _, why: failures.append(why))
    async with ForeignServer() as server, behind(server, replace(FAST, keepalive_expiry_s=0.01), hooks) as client:
        replica = await found(client)
        with structlog.testing.capture_logs() as logs, few_files(-8):  # nor those that are closed meanwhile
            await until(lambda: any(entry["event"] == "upstream not probed" for entry in logs))
            seen = len(server.asked)
            await asyncio.sleep(0.2)
        assert replica.snapshot().available
        assert failures == []
        await until(lambda: len(server.asked) > seen)
        assert len([entry for entry in logs if entry["event"] == "upstream not probed"]) == 1


def _answers(*events: bytes) -> Callable[[web.Request], Any]:
    async def page(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for event in events:
            await reply.write(b"data: " + event + b"\n\n")
        return reply

    return page


@pytest.mark.parametrize(
    "events",
    [
        (b'{"choices":[{"delta":{"role":"assistant","content":null}}]}', b"[DONE]"),
        (b'{"choices":[{"delta":{"content":5}}]}',),
        (b"not json",),
        (b'{"error":{"message":"out of memory","code":500}}',),
        (),
    ],
)
async def test_an_answer_that_is_none_has_failed(events: tuple[bytes, ...]) -> None:
    async with ForeignServer() as server, behind(server) as client:
        replica = await found(client)
        server.pages["/v1/chat/completions"] = _answers(*events)
        with pytest.raises(ReplicaFailed, match="backend b"):
            await text_of(replica, ask())


@pytest.mark.parametrize("event", [b"data: {}\n", b":\n", b'data: {"choices":[{"delta":{"content":""}}]}\n\n'])
async def test_who_sends_without_end_and_says_nothing_has_failed(event: bytes) -> None:
    sent = 0

    async def page(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        with contextlib.suppress(ConnectionError):
            while sent < 256 * 1024 * 1024:
                await reply.write(event * (65536 // len(event)))
                sent += 65536
        return reply

    async with ForeignServer() as server, behind(server) as client:
        replica = await found(client)
        server.pages["/v1/chat/completions"] = page
        with pytest.raises(ReplicaFailed, match="8 MiB that say nothing"):
            await text_of(replica, ask())
    assert sent < 64 * 1024 * 1024


async def test_counts_that_cannot_be_are_not_believed() -> None:
    async with ForeignServer() as server, behind(server) as client:
        replica = await found(client)
        server.pages["/v1/chat/completions"] = _answers(
            b'{"choices":[{"delta":{"content":"a"}}],"usage":{"completion_tokens":1e300,"prompt_tokens":"x"}}',
            b'{"choices":[{"delta":{"content":"b"},"finish_reason":"length"}],"usage":{"completion_tokens":-3}}',
            b"[DONE]",
        )
        chunks = [chunk async for chunk in replica.generate(ask())]
        assert "".join(chunk.text for chunk in chunks) == "ab"
        assert sum(chunk.tokens for chunk in chunks) == 2
        assert chunks[-1].finish_reason is FinishReason.LENGTH
