"""Two tiers in a row, with the real dispatcher in both: what an edge and its cloud do to each other."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest

from router.base.errors import ReplicaBroken
from router.gateway.sse import EventStream
from router.values.chunk import FinishReason, TokenChunk
from router.values.request import InferenceRequest
from router.values.tool_calls import call_text
from tests.support.gateway_fakes import FAMILY, replica_info
from tests.support.tiers import WORDS, Reciter, Tier, chain, linked
from tests.support.waiting import until


def sdk(tier: Tier) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{tier.url}/v1", api_key="none", max_retries=0, timeout=20)


ASK: dict[str, Any] = {"model": FAMILY, "messages": [{"role": "user", "content": "recite"}]}
IN_TIME = {"x-overspill-ttft-slo-ms": "60000", "x-overspill-tpot-slo-ms": "60000"}  # on a busy machine too


async def test_a_request_for_the_best_rung_goes_through_both_tiers() -> None:
    async with chain() as (edge, _, _, best), sdk(edge) as client:
        raw = await client.chat.completions.with_raw_response.create(
            **{**ASK, "model": "tiny-fp32"}, extra_headers={"x-request-id": "both"}
        )
        async with httpx.AsyncClient() as http:
            record = (await http.get(f"{edge.url}/v1/decisions/both")).json()
    reply = raw.parse()
    assert reply.choices[0].message.content == " ".join(WORDS)
    assert reply.usage.completion_tokens == 10
    assert (raw.headers["x-overspill-tier"], raw.headers["x-overspill-model"]) == ("cloud", "tiny-fp32")
    assert best.requests[0].request_id == "both"
    assert record["request_id"] == "both"


async def test_local_only_stays() -> None:
    async with chain() as (edge, _, small, best), sdk(edge) as client:
        raw = await client.chat.completions.with_raw_response.create(
            **ASK, extra_headers={"x-overspill-locality": "local-only"}
        )
    assert raw.headers["x-overspill-tier"] == "edge"
    assert (len(small.requests), len(best.requests)) == (1, 0)


async def test_an_answer_that_the_cloud_began_is_finished_on_the_edge() -> None:
    async with chain() as (edge, cloud, small, best), sdk(edge) as client:
        small.available, small.cached_told_late = False, 5
        best.pause = asyncio.Event()
        stream = await client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
        small.available = True
        texts, usage = [], None
        async for chunk in stream:
            usage = chunk.usage
            if chunk.choices and chunk.choices[0].delta.content:
                texts.append(chunk.choices[0].delta.content)
                if texts == ["one", " two", " three"]:
                    cloud.cut()
        best.pause.set()
    assert "".join(texts) == " ".join(WORDS), "nothing doubled, nothing lost"
    assert usage.completion_tokens == 10
    assert usage.prompt_tokens == 2, "text of the answer is no part of the prompt"
    assert usage.prompt_tokens_details is None, "nor is what a cache held of it"
    assert small.requests[0].continuation == "one two three"


async def test_an_answer_that_the_edge_began_is_continued_in_the_cloud() -> None:
    async with chain() as (edge, _, small, best), sdk(edge) as client:

        async def breaks(request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
            yield TokenChunk("one")
            yield TokenChunk(" two")
            raise ReplicaBroken("the board went dark")

        small.generate = breaks
        reply = await client.chat.completions.create(
            **ASK, extra_headers={"x-overspill-ttft-slo-ms": "5000"}, extra_body={"priority": 3}
        )
        if small.requests or best.requests[0].continuation:
            assert best.requests[0].continuation == "one two"
    assert reply.choices[0].message.content == " ".join(WORDS)


@pytest.mark.parametrize("model", ["tiny-fp32", "tiny-int8"], ids=["through both tiers", "on the edge"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("cut", [14, 24, 30, 45, 60])
async def test_a_call_that_a_client_began_is_told_it_whole(model: str, cut: int, *, stream: bool) -> None:
    """Unlike one that a tier began: its client was told of the call, and the rest alone is news."""
    text = call_text("weather", '{"city": "Ulm"}')
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    begun = [*ASK["messages"], {"role": "assistant", "content": text[:cut]}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}

    async def ends(request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        for at in range(len(request.continuation), len(text), 4):
            yield TokenChunk(text[at : at + 4])
        yield TokenChunk("", finish_reason=FinishReason.STOP)

    async with chain() as (edge, _, small, best), sdk(edge) as client:
        small.generate = best.generate = ends
        asked: dict[str, Any] = {"model": model, "messages": begun, "tools": [tool], "stream": stream}
        reply = await client.chat.completions.create(**asked, extra_body=continued)
        if stream:
            choices = [chunk.choices[0] async for chunk in reply if chunk.choices]
            calls = [call for choice in choices for call in choice.delta.tool_calls or []]
            assert [bool(call.id and call.function.name) for call in calls] == [True] + [False] * (len(calls) - 1)
            told, reason = "".join(call.function.arguments or "" for call in calls), choices[-1].finish_reason
            assert (calls[0].index, calls[0].function.name) == (0, "weather")
        else:
            (call,) = reply.choices[0].message.tool_calls
            assert (bool(call.id), call.function.name) == (True, "weather")
            told, reason = call.function.arguments, reply.choices[0].finish_reason
        assert (json.loads(told), reason) == ({"city": "Ulm"}, "tool_calls")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-fp32", "tiny-int8"], ids=["through both tiers", "on the edge"])
async def test_a_whole_reply_that_its_deadline_cut_says_so_in_its_head(model: str) -> None:
    async with chain() as (edge, _, small, best), sdk(edge) as client:
        small.pause, best.pause = asyncio.Event(), asyncio.Event()  # nobody ever says a fourth word
        raw = await client.chat.completions.with_raw_response.create(
            **{**ASK, "model": model}, extra_headers={"x-overspill-deadline-ms": "1500", "x-request-id": "cut"}
        )
        async with httpx.AsyncClient() as http:
            record = (await http.get(f"{edge.url}/v1/decisions/cut")).json()
        choice = raw.parse().choices[0]
        assert (choice.message.content, choice.finish_reason) == ("one two three", "length")
        assert raw.headers["x-overspill-degraded"] == "true"
        assert raw.headers["x-overspill-reason"] == "shorter-answer"
        assert (record["outcome"], record["error"], record["kept"]) == ("degraded", None, {"deadline": True})
        stream = await client.chat.completions.create(
            **{**ASK, "model": model}, stream=True, extra_headers={"x-overspill-deadline-ms": "1500"}
        )
        chunks = [chunk.choices[0] async for chunk in stream if chunk.choices]
        assert "".join(choice.delta.content or "" for choice in chunks) == "one two three"
        assert chunks[-1].finish_reason == "length"


async def test_a_token_of_the_cloud_goes_to_the_client_past_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is written where it was read: no task of the edge wakes for it, and none of its events are late."""
    reads: Counter[EventStream] = Counter()
    read = EventStream.next

    async def counted(stream: EventStream) -> bytes:
        reads[stream] += 1
        return await read(stream)

    monkeypatch.setattr(EventStream, "next", counted)
    async with chain() as (edge, _, small, best), sdk(edge) as client:
        small.available = False
        received = asyncio.Semaphore(0)

        async def in_step(request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
            for word in WORDS:
                yield TokenChunk(f"{word} ")
                await received.acquire()
            yield TokenChunk("", 0, finish_reason=FinishReason.STOP)

        best.generate = in_step
        texts, usage = [], None
        stream = await client.chat.completions.create(
            **ASK, stream=True, stream_options={"include_usage": True}, extra_headers=IN_TIME
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].delta.content:
                texts.append(chunk.choices[0].delta.content)
                received.release()
    assert texts == [f"{word} " for word in WORDS]
    assert usage.completion_tokens == 10
    assert min(reads.values()) <= 2 < max(reads.values()), "the edge's, and the cloud's, whose replica is its own"


async def test_a_client_that_never_reads_holds_the_cloud_up_and_no_memory() -> None:
    made, most = 0, 20_000

    async def floods(request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        nonlocal made
        for _word in range(most):
            await asyncio.sleep(0)
            made += 1
            yield TokenChunk("x" * 2048, 8)

    best = Reciter(replica_info("tiny-fp32", 0, tier="cloud", context_tokens=1_000_000))
    best.generate = floods
    body = json.dumps({**ASK, "stream": True, "max_tokens": 500_000}).encode()
    async with Tier("cloud", [best]) as cloud, Tier("edge", []) as edge, linked(edge, cloud, []):
        address = httpx.URL(edge.url)
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        writer.write(b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in IN_TIME.items()))
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await until(lambda: any(connection.flow.write_paused for connection in edge.server.server_state.connections))
        seen = -1
        while seen < made:  # until nothing is made any more
            seen = made
            await asyncio.sleep(0.5)
        assert made < most
        writer.transport.abort()


async def test_a_mistyped_promise_is_refused_by_name() -> None:
    async with chain() as (edge, _, small, best), sdk(edge) as client:
        with pytest.raises(openai.BadRequestError, match="did you mean `x-overspill-locality`") as raised:
            await client.chat.completions.create(**ASK, extra_headers={"x-overspill-location": "local-only"})
        assert raised.value.param == "x-overspill-location"
        assert not small.requests
        assert not best.requests
        await client.chat.completions.create(**ASK, extra_headers={"x-overspill-tier": "edge"})


async def test_a_tier_without_any_free_replica_says_when_to_come_back() -> None:
    async with Tier("edge", []) as edge, sdk(edge) as client:
        with pytest.raises(openai.InternalServerError, match="no model is known here yet") as raised:
            await client.chat.completions.create(**ASK)
    assert raised.value.response.headers["retry-after"] == "1"
    off = Reciter(replica_info())
    off.available = False
    async with Tier("edge", [off]) as edge, sdk(edge) as client:
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(**{**ASK, "extra_headers": {"x-overspill-deadline-ms": "300"}})
    assert raised.value.status_code == 503
    assert int(raised.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("name", ["traceparent", "tracestate"])
@pytest.mark.parametrize("value", ["ключ=1".encode(), b"a=\xe9", b"00-\xff"])
async def test_a_trace_that_is_not_ascii_closes_the_cloud_for_nobody(name: str, value: bytes) -> None:
    trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = [(b"traceparent", trace), (b"tracestate", b"a=1")]
    headers = [(key, value if key == name.encode() else told) for key, told in headers]
    async with chain() as (edge, _, _, best), httpx.AsyncClient(base_url=edge.url, timeout=20) as http:
        for _ in range(4):
            reply = await http.post("/v1/chat/completions", json={**ASK, "model": "tiny-fp32"}, headers=headers)
            assert reply.status_code == 200, reply.text
        assert set(edge.dispatcher.breaker_states().values()) == {"closed"}
        sent = dict(best.requests[-1].headers)
        assert "tracestate" not in sent
        assert sent.get("traceparent") == (None if name == "traceparent" else trace.decode())


async def test_a_prompt_that_the_cloud_always_fails_on_closes_it_for_nobody() -> None:
    async with chain() as (edge, cloud, _, best), httpx.AsyncClient(base_url=edge.url, timeout=20) as http:
        real = best.generate

        async def generate(request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
            if "poison" in str(request.prompt):
                raise ZeroDivisionError("a bug")
            async for chunk in real(request):
                yield chunk

        best.generate = generate
        poison = {**ASK, "model": "tiny-fp32", "messages": [{"role": "user", "content": "poison"}]}
        for index in range(6):
            reply = await http.post("/v1/chat/completions", json={**poison, "seed": index})
            assert reply.status_code in {500, 503}, reply.text
            reply = await http.post("/v1/chat/completions", json={**ASK, "model": "tiny-fp32"})
            assert (reply.status_code, reply.headers["x-overspill-tier"]) == (200, "cloud")
        for tier in (edge, cloud):
            assert set(tier.dispatcher.breaker_states().values()) == {"closed"}


async def test_a_callers_400_is_counted_as_invalid() -> None:
    async with chain() as (edge, _, _, _), httpx.AsyncClient(base_url=edge.url, timeout=20) as http:
        words = " ".join(["word"] * 3000)
        long = {**ASK, "messages": [{"role": "user", "content": words}]}
        reply = await http.post("/v1/chat/completions", json=long, headers={"x-request-id": "long"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        record = (await http.get("/v1/decisions/long")).json()
        assert (record["outcome"], record["kept"]) == ("invalid", {})


async def test_what_an_upstream_calls_itself_breaks_no_reply() -> None:
    async with chain() as (edge, cloud, _, best), httpx.AsyncClient(base_url=edge.url, timeout=20) as http:
        app = cloud.server.config.app

        async def odd(scope, receive, send) -> None:
            async def sent(message) -> None:
                if message["type"] == "http.response.start" and scope["method"] == "POST":
                    odd_lines = {b"x-overspill-model": "ключ".encode(), b"x-overspill-reason": b"\xff\xfe" * 900}
                    kept = [line for line in message["headers"] if line[0] not in odd_lines]
                    message = {**message, "headers": [*kept, (b"x-overspill-degraded", b"true"), *odd_lines.items()]}
                await send(message)

            await app(scope, receive, sent)  # type: ignore[call-arg]  # uvicorn has three kinds of applications

        cloud.server.config.loaded_app = odd
        for stream in (False, True):
            body = {**ASK, "model": "tiny-fp32", "stream": stream}
            reply = await http.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert best.requests
            assert "?" in reply.headers["x-overspill-model"]
            assert len(reply.headers["x-overspill-reason"]) <= 128


async def test_what_was_cached_is_told_down_the_chain_with_the_first_token_and_in_the_usage() -> None:
    async with chain() as (edge, _, _, best), sdk(edge) as client:
        best.cached_tokens = 1
        replica = next(r for r in edge.dispatcher.replicas if r.info.remote)
        reply = await client.chat.completions.create(**ASK)
        assert reply.usage.prompt_tokens_details.cached_tokens == 1
        stream = await client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
        usage = [chunk.usage async for chunk in stream]
        assert usage[:-1] == [None] * (len(usage) - 1)
        assert usage[-1].prompt_tokens_details.cached_tokens == 1
        chunks = [chunk async for chunk in replica.generate(best.requests[-1])]
        assert [chunk.cached_tokens for chunk in chunks] == [1] + [None] * (len(chunks) - 1)
        best.cached_tokens = None
        reply = await client.chat.completions.create(**ASK)
        assert reply.usage.prompt_tokens_details is None
        chunks = [chunk async for chunk in replica.generate(best.requests[-1])]
        assert {chunk.cached_tokens for chunk in chunks} == {None}


async def test_caches_are_shared_by_nobody_beyond_the_salt_whichever_tier_holds_them() -> None:
    async with chain() as (edge, _, _, best), sdk(edge) as client:
        asked = {**ASK, "model": "tiny-fp32"}
        for salt in ("ann", "ben", "ann"):
            await client.chat.completions.create(**asked, extra_headers={**IN_TIME, "x-overspill-cache-salt": salt})
        await client.chat.completions.create(**asked, extra_headers=IN_TIME)
        owners = [request.cache_owner for request in best.requests]
        assert owners[0] == owners[2] != owners[1]
        assert owners[3] == ""
        assert "ann" not in owners[0]
        with pytest.raises(openai.BadRequestError, match="cache-salt"):
            await client.chat.completions.create(**ASK, extra_headers={"x-overspill-cache-salt": "x" * 200})
        with pytest.raises(openai.BadRequestError, match="cache-salt"):
            await client.chat.completions.create(**ASK, extra_headers={"x-overspill-cache_salt": "ann"})
