"""Rerank, score and audio over two tiers and a server of another maker, by real clients."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import wave
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web

from router.gateway.app import GatewayLimits
from router.upstream.settings import BackendModel, BackendSettings
from tests.support.foreign_server import ForeignServer
from tests.support.passed_chain import passing
from tests.support.tiers import Tier
from tests.support.waiting import until

ALL = ("rerank", "score", "transcribe", "translate", "speak")
RANKED = {
    "id": "r-1",
    "model": "m",
    "usage": {"prompt_tokens": 23, "total_tokens": 23},
    "results": [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}],
}
SCORED = {"id": "s-1", "object": "list", "model": "m", "data": [{"index": 0, "object": "score", "score": 0.7}]}
ASK = {"model": "m", "query": "Where?", "documents": ["here", "there"]}


def entry(*servers: ForeignServer, tasks: tuple[str, ...] = ALL, **changes: Any) -> BackendSettings:
    return BackendSettings(
        name="b",
        urls=tuple(server.url for server in servers),
        poll_interval_s=0.05,
        models=(BackendModel(served="m", tasks=tasks),),  # type: ignore[arg-type]
        **changes,
    )


@contextlib.asynccontextmanager
async def world(*servers: ForeignServer, **options: Any) -> AsyncIterator[list[Tier]]:
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        yield list(await stack.enter_async_context(passing(entry(*servers), **options)))


def silence() -> bytes:
    sound = io.BytesIO()
    with wave.open(sound, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(8000)
        written.writeframes(bytes(1600))
    return sound.getvalue()


def sdk(tier: Tier) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{tier.url}/v1", api_key="none", max_retries=0)


async def spoken(request: web.Request) -> web.StreamResponse:
    """A sound in three pieces; the `voice` may ask for a break, or for patience."""
    told = json.loads(await request.read())
    reply = web.StreamResponse(headers={"content-type": "audio/mpeg"})
    await reply.prepare(request)
    for index, piece in enumerate((b"one", b"two", b"three")):
        if index == 1 and told["voice"] == "breaks" and request.transport is not None:
            request.transport.abort()
        if index == 1 and told["voice"] == "waits":
            request.app["waits"].append(request)
            await asyncio.sleep(60)
        await reply.write(piece)
        await asyncio.sleep(0.05)
    return reply


async def heard(request: web.Request) -> web.StreamResponse:
    """What is said, in the form that was asked for."""
    form = await request.post()
    file = form["file"]
    assert isinstance(file, web.FileField)
    told = f"{form['model']!s} {file.filename} {len(file.file.read())} {form.get('language', '-')}"
    if form.get("stream") == "true":
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for word in told.split():
            event = {"type": "transcript.text.delta", "delta": word}
            await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        done = {"type": "transcript.text.done", "text": told}
        await reply.write(b"data: " + json.dumps(done).encode() + b"\n\n")
        return reply
    if form.get("response_format") == "text":
        return web.Response(text=told)
    return web.json_response({"text": told, "usage": {"type": "tokens", "input_tokens": 14, "total_tokens": 20}})


async def test_what_is_ranked_comes_back_over_every_path_and_is_counted() -> None:
    server = ForeignServer()
    server.pages |= {"/v1/rerank": RANKED, "/v1/score": SCORED}
    async with world(server) as tiers:
        for tier in tiers:
            async with httpx.AsyncClient(base_url=tier.url) as http:
                for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
                    reply = await http.post(path, json=ASK, headers={"x-request-id": f"mine{path}"})
                    assert reply.status_code == 200, reply.text
                    assert reply.json()["results"] == RANKED["results"]
                    assert reply.json()["model"] == reply.headers["x-overspill-model"] == "m"
                    assert reply.headers["x-request-id"] == f"mine{path}"
                    decision = (await http.get(f"/v1/decisions/mine{path}")).json()
                    assert decision["outcome"] == "completed"
                for path in ("/v1/score", "/score"):
                    reply = await http.post(path, json={"model": "m", "text_1": "a", "text_2": ["b"]})
                    assert reply.json()["data"] == SCORED["data"]


async def test_bodies_arrive_as_they_were_written() -> None:
    server = ForeignServer()
    bodies: list[Any] = []

    async def keep(request: web.Request) -> web.Response:
        bodies.append((json.loads(await request.read()), request.headers["x-request-id"]))
        return web.json_response(RANKED)

    server.pages["/v1/rerank"] = keep
    async with world(server) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
        asked = {**ASK, "top_n": 2, "return_documents": True, "activation": "softmax", "priority": 3}
        await http.post("/v1/rerank", json=asked, headers={"x-request-id": "r7"})
    del asked["priority"]  # goes as a header: vLLM's counts the other way
    assert bodies == [(asked, "r7")]


async def test_a_sound_comes_piece_by_piece() -> None:
    server = ForeignServer()
    server.pages["/v1/audio/speech"] = spoken
    async with world(server) as tiers:
        for tier in tiers:
            async with (
                sdk(tier) as client,
                client.audio.speech.with_streaming_response.create(model="m", input="hi", voice="v") as reply,
            ):
                assert reply.headers["content-type"] == "audio/mpeg"
                pieces = [piece async for piece in reply.iter_bytes()]
            assert b"".join(pieces) == b"onetwothree"
            assert len(pieces) > 1


async def test_a_sound_that_breaks_off_is_no_short_sound() -> None:
    server = ForeignServer()
    server.pages["/v1/audio/speech"] = spoken
    asked = {"model": "m", "input": "hi", "voice": "breaks"}
    async with world(server) as tiers:
        for tier in tiers:
            async with httpx.AsyncClient(base_url=tier.url) as http:
                with pytest.raises(httpx.RemoteProtocolError):
                    await http.post("/v1/audio/speech", json=asked)


async def test_what_fails_before_its_first_byte_is_asked_elsewhere() -> None:
    servers = ForeignServer(), ForeignServer()
    failed: list[str] = []

    async def first_fails(request: web.Request) -> web.StreamResponse:
        if request.path not in failed:
            failed.append(request.path)
            return web.Response(status=500)
        return await spoken(request) if request.path.endswith("speech") else web.json_response(RANKED)

    for server in servers:
        server.pages |= dict.fromkeys(("/v1/audio/speech", "/v1/rerank"), first_fails)
    async with world(*servers) as (edge, _), sdk(edge) as client:
        sound = await client.audio.speech.create(model="m", input="hi", voice="v")
        assert sound.content == b"onetwothree"
        ranked = await client.post("/rerank", body=ASK, cast_to=object)
        assert ranked["results"] == RANKED["results"]  # type: ignore[index]
    assert failed == ["/v1/audio/speech", "/v1/rerank"]


async def test_who_leaves_cancels_the_work() -> None:
    server = ForeignServer()
    left = asyncio.Event()

    async def waits(request: web.Request) -> web.Response:
        try:
            await asyncio.sleep(60)
        finally:
            left.set()
        return web.Response()

    server.pages["/v1/rerank"] = waits
    async with world(server) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
        asking = asyncio.create_task(http.post("/v1/rerank", json=ASK))
        await until(lambda: "/v1/rerank" in server.asked)
        asking.cancel()
        await asyncio.wait_for(left.wait(), 60)


async def test_a_deadline_holds() -> None:
    server = ForeignServer()

    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    server.pages["/v1/rerank"] = slow
    async with world(server) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
        reply = await http.post("/v1/rerank", json=ASK, headers={"x-overspill-deadline-ms": "300"})
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "deadline_lost"


async def test_what_is_said_is_written_down() -> None:
    server = ForeignServer()
    server.pages |= dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), heard)
    async with world(server) as tiers:
        for tier in tiers:
            async with sdk(tier) as client:
                file = ("talk.wav", silence(), "audio/wav")
                told = await client.audio.transcriptions.create(model="m", file=file, language="en")
                assert told.text == f"m talk.wav {len(silence())} en"
                form = {"data": {"model": "m", "response_format": "text"}, "files": {"file": file}}
                async with httpx.AsyncClient(base_url=tier.url) as http:
                    plain = await http.post("/v1/audio/translations", **form)  # type: ignore[arg-type]
                assert plain.text == f"m talk.wav {len(silence())} -"
                assert plain.headers["content-type"].startswith("text/plain")
                events = await client.audio.transcriptions.create(model="m", file=file, stream=True)
                texts = [event.text async for event in events if event.type == "transcript.text.done"]
                assert texts == [f"m talk.wav {len(silence())} -"]


async def test_a_reply_that_is_none_is_the_server_s_fault() -> None:
    server = ForeignServer()
    async with world(server) as (edge, cloud):
        for page in ({"results": []}, b"<html>", {"results": [{"index": 2, "relevance_score": 1.0}]}):
            server.pages["/v1/rerank"] = page
            for tier in (edge, cloud):
                async with httpx.AsyncClient(base_url=tier.url) as http:
                    reply = await http.post("/v1/rerank", json=ASK)
                    assert reply.status_code == 503
                    assert reply.json()["error"]["code"] == "replicas_failed"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"model": "m", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"model": "m", "query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"model": "m", "query": "a", "documents": ["x"] * 4097}, "documents"),
        ("/v1/rerank", {"model": "m", "query": "a", "documents": [3]}, "documents[0]"),
        ("/v1/score", {"model": "m", "text_1": "a"}, "text_2"),
        ("/v1/score", {"model": "m", "text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/v1/audio/speech", {"model": "m", "input": "", "voice": "v"}, "input"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "model"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str) -> None:
    server = ForeignServer()
    async with world(server) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
        reply = await http.post(path, json=body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param
    assert path not in server.asked


async def test_forms_are_checked() -> None:
    server = ForeignServer()
    path = "/v1/audio/transcriptions"
    async with world(server) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
        file = {"file": ("a.wav", silence())}
        for told, param in (
            (await http.post(path, data={"model": "m"}, files={"other": ("a.wav", b"x")}), "file"),
            (await http.post(path, files=file), "model"),
            (await http.post(path, json={"model": "m"}), "content-type"),
            (await http.post(path, content=b"--x", headers={"content-type": "multipart/form-data; boundary=x"}), None),
        ):
            assert told.status_code == 400, told.text
            assert told.json()["error"]["param"] == param
    assert path not in server.asked


async def test_a_model_that_does_something_else_is_refused_with_those_that_can() -> None:
    async with ForeignServer() as server, passing(entry(server, tasks=("score",))) as tiers:
        for tier in tiers:
            async with httpx.AsyncClient(base_url=tier.url) as http:
                reply = await http.post("/v1/rerank", json=ASK)
                assert reply.status_code == 404
                assert "not to rerank" in reply.json()["error"]["message"]
                assert 'tasks = ["rerank"]' in reply.json()["error"]["message"]


async def test_what_is_too_large_is_refused_before_it_is_read() -> None:
    server = ForeignServer()
    limits = GatewayLimits(max_body_bytes=1000)
    async with world(server, limits=limits) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
        asked = http.build_request("POST", "/v1/rerank", json={**ASK, "query": "long " * 300})
        reply = await http.send(asked)
        assert reply.status_code == 413


async def test_bodies_of_calls_keep_their_room_until_they_are_answered() -> None:
    server = ForeignServer()
    gate = asyncio.Event()

    async def waits(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return await heard(request)

    server.pages["/v1/audio/transcriptions"] = waits
    limits = GatewayLimits(max_body_bytes=1_000_000, max_bodies_bytes=1_000_000)
    asked = {"data": {"model": "m"}, "files": {"file": ("a.wav", bytes(700_000))}}
    async with world(server, limits=limits) as (_, cloud), httpx.AsyncClient(base_url=cloud.url) as http:
        first = asyncio.create_task(http.post("/v1/audio/transcriptions", **asked))  # type: ignore[arg-type]
        await until(lambda: "/v1/audio/transcriptions" in server.asked)
        refused = await http.post("/v1/audio/transcriptions", **asked)  # type: ignore[arg-type]
        assert refused.status_code == 429
        gate.set()
        assert (await first).status_code == 200
        assert (await http.post("/v1/audio/transcriptions", **asked)).status_code == 200  # type: ignore[arg-type]


async def test_who_counts_on_an_answer_later_is_told_that_there_is_none() -> None:
    server = ForeignServer()
    form: dict[str, Any] = {"model": (None, "m"), "file": ("a.wav", silence())}
    async with world(server) as tiers:
        for tier in tiers:
            async with httpx.AsyncClient(base_url=tier.url, headers={"x-overspill-defer": "allow"}) as http:
                replies = [
                    await http.post("/v1/rerank", json=ASK),
                    await http.post("/v1/score", json={"model": "m", "text_1": "a", "text_2": "b"}),
                    await http.post("/v1/audio/speech", json={"model": "m", "input": "a", "voice": "alloy"}),
                    await http.post("/v1/audio/transcriptions", files=form),
                ]
                for reply in replies:
                    error = reply.json()["error"]
                    assert (reply.status_code, error["param"]) == (400, "x-overspill-defer")
                    assert "/v1/messages" in error["message"]
                    assert "it is served on /v1/chat/completions" in error["message"]
    assert not server.bodies
