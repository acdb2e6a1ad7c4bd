"""Images and sounds in chats, token calls and `bad_words`: to servers that take them, and to no other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web

from router.cache.exact import AnswerCache
from router.cache.settings import CacheSettings
from router.gateway.links import MediaSettings
from router.upstream.settings import BackendModel, BackendSettings
from tests.support.foreign_server import ForeignServer
from tests.support.passed_chain import passing
from tests.support.tiers import CLOCK, Tier
from tests.support.waiting import until, until_answered

PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
SHOWN = {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}
HEARD = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
CHAT = "/v1/chat/completions"
PART = "messages[0].content[1]"


def asking(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "What is this?"}, *parts]
    return {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


@contextlib.asynccontextmanager
async def world(
    server: ForeignServer, modalities: tuple[str, ...] | None = None, **deps: Any
) -> AsyncIterator[list[Tier]]:
    model = BackendModel(served="m", modalities=modalities)  # type: ignore[arg-type]
    async with server:
        entry = BackendSettings(name="b", urls=(server.url,), poll_interval_s=0.05, warm_up=False, models=(model,))
        async with passing(entry, **deps) as tiers:
            yield list(tiers)


async def test_images_and_sounds_arrive_as_they_were_sent_and_are_counted_by_their_server() -> None:
    server = ForeignServer()
    async with world(server, ("text", "image", "audio")) as tiers:
        for tier in tiers:
            client = openai.AsyncOpenAI(base_url=f"{tier.url}/v1", api_key="none", max_retries=0)
            async with client:
                told = asking(SHOWN, HEARD)
                reply = await client.chat.completions.create(**told)
                assert reply.choices[0].message.content == "one two three four"
                assert reply.usage is not None
                assert reply.usage.prompt_tokens == 40
                assert server.bodies[-1]["messages"] == told["messages"]


async def test_an_image_of_a_response_arrives_as_that_of_a_chat() -> None:
    server = ForeignServer()
    shown = {"type": "input_image", "image_url": PIXEL, "detail": "low"}
    content = [{"type": "input_text", "text": "What is this?"}, shown]
    asked: dict[str, Any] = {"model": "m", "input": [{"role": "user", "content": content}], "max_output_tokens": 4}
    async with world(server, ("text", "image")) as tiers:
        for tier in tiers:
            async with httpx.AsyncClient(base_url=tier.url) as http:
                reply = await http.post("/v1/responses", json=asked)
                assert reply.status_code == 200, reply.text
                assert server.bodies[-1]["messages"] == asking(SHOWN)["messages"]
                shown["image_url"] = "https://images.example/a.png"
                refused = await http.post("/v1/responses", json=asked)
                assert (refused.status_code, "allow_origins" in refused.text) == (400, True)
                shown["image_url"] = PIXEL
    assert len(server.bodies) == 2


@pytest.mark.parametrize("part", [SHOWN, HEARD])
async def test_a_model_of_text_is_not_asked(part: dict[str, Any]) -> None:
    server = ForeignServer()
    async with world(server, ("text",)) as tiers:
        for tier in tiers:
            async with httpx.AsyncClient(base_url=tier.url) as http:
                reply = await http.post(CHAT, json=asking(part))
                error = reply.json()["error"]
                assert reply.status_code == 400
                assert error["param"] == "messages"
                assert "modalities" in error["message"]
                assert (await http.post(CHAT, json=asking())).status_code == 200
    assert len(server.bodies) == 2


def offers_of(card: dict[str, Any]) -> set[str]:
    return set(card["overspill"]["offers"])


async def card_of(http: httpx.AsyncClient) -> dict[str, Any]:
    (card,) = (await http.get("/v1/models")).json()["data"]
    return dict(card)


async def test_a_refusal_has_a_model_asked_whether_it_takes_text_alone() -> None:
    server = ForeignServer()

    async def refuses(request: web.Request) -> web.StreamResponse:
        told = json.loads(await request.read())
        server.bodies.append(told)
        error = {"message": "m is not a multimodal model", "type": "BadRequestError", "code": 400}
        return web.json_response({"error": error}, status=400)

    server.pages[CHAT] = refuses
    async with world(server) as (edge, cloud), httpx.AsyncClient(base_url=cloud.url) as http:
        first = await http.post(CHAT, json=asking(SHOWN))
        assert first.status_code == 400
        assert "not a multimodal model" in first.json()["error"]["message"]

        async def learnt() -> bool:
            return "images" not in offers_of(await card_of(http))

        await until_answered(learnt)
        assert "audio" in offers_of(await card_of(http))
        again = await http.post(CHAT, json=asking(SHOWN))
        assert "does not do what the request needs: images" in again.json()["error"]["message"]
        assert len(server.bodies) == 2  # the caller's, and one of the tier's own
        assert server.bodies[1]["max_tokens"] == 1
        async with httpx.AsyncClient(base_url=edge.url) as below:
            assert (await below.post(CHAT, json=asking(SHOWN))).status_code == 400


async def test_what_one_caller_s_image_makes_a_server_say_keeps_no_other_s_away() -> None:
    """Servers repeat what they were sent in their errors."""
    server = ForeignServer()
    seen: list[str] = []

    async def picky(request: web.Request) -> web.StreamResponse:
        content = json.loads(await request.read())["messages"][0]["content"]
        seen.append(content[0]["text"])
        if "odd" in content[0]["text"]:
            said = f"cannot open the image of `{content[0]['text']}`"
            return web.json_response({"error": {"message": said, "code": 400}}, status=400)
        return await server.answer(request)

    server.pages[CHAT] = picky
    async with world(server) as (_, cloud), httpx.AsyncClient(base_url=cloud.url) as http:
        mallory = asking(SHOWN)
        mallory["messages"][0]["content"][0]["text"] = "odd: this model does not support images"
        for _again in range(3):
            assert (await http.post(CHAT, json=mallory)).status_code == 400
        await until(lambda: len(seen) >= 4)  # the tier has asked for itself, once
        guest = await http.post(CHAT, json=asking(SHOWN))
        assert guest.status_code == 200, guest.text
        assert "images" in offers_of(await card_of(http))
    assert len(seen) == 5


async def test_a_bad_image_teaches_nothing() -> None:
    server = ForeignServer()

    async def refuses(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "cannot identify image file", "code": 400}}, status=400)

    server.pages[CHAT] = refuses
    async with world(server) as (_, cloud), httpx.AsyncClient(base_url=cloud.url) as http:
        assert "cannot identify" in (await http.post(CHAT, json=asking(SHOWN))).json()["error"]["message"]
        (card,) = (await http.get("/v1/models")).json()["data"]
        assert "images" in card["overspill"]["offers"]


async def test_what_is_shown_is_never_answered_from_the_cache() -> None:
    server = ForeignServer()
    cache = AnswerCache(CacheSettings(max_mbytes=8), CLOCK, tuple)
    async with world(server, ("image",), cache=cache) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
        for _again in range(2):
            reply = await http.post(CHAT, json=asking(SHOWN, temperature=0))
            assert reply.status_code == 200
            assert "x-overspill-cache" not in reply.headers
    assert len(server.bodies) == 2
    assert not len(cache)


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, f"{PART}.image_url.url"),
        (
            {"type": "image_url", "image_url": {"url": "data:text/html;base64,AA=="}},
            f"{PART}.image_url.url",
        ),
        ({"type": "image_url", "image_url": {"url": "http://x/" + "a" * 9000}}, f"{PART}.image_url.url"),
        ({"type": "image_url"}, f"{PART}.image_url"),
        (
            {"type": "input_audio", "input_audio": {"data": "AA==", "format": "w v"}},
            f"{PART}.input_audio.format",
        ),
        ({"type": "video_url", "video_url": {"url": "http://x/"}}, PART),
    ],
)
async def test_what_is_wrong_with_a_part_is_named(part: dict[str, Any], param: str) -> None:
    server = ForeignServer()
    async with world(server, ("image", "audio")) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
        reply = await http.post(CHAT, json=asking(part))
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param
        told = {"model": "m", "messages": [{"role": "assistant", "content": [SHOWN]}]}
        assert (await http.post(CHAT, json=told)).status_code == 400
        assert (await http.post(CHAT, json=asking(*[SHOWN] * 65))).status_code == 400
    assert not server.bodies


def linking(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def test_links_lead_where_the_operator_says_and_are_not_fetched_here() -> None:
    server = ForeignServer()
    async with server:
        server_at = server.url
        entry = BackendSettings(name="b", urls=(server_at,), poll_interval_s=0.05, warm_up=False, models=(TAKES,))
        media = MediaSettings(allow_origins=(server_at,))
        async with passing(entry, media=media) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
            linked = linking(f"{server_at}/cat.png")
            assert (await http.post(CHAT, json=asking(linked))).status_code == 200
            assert server.bodies[-1]["messages"][0]["content"][1] == linked
            elsewhere = await http.post(CHAT, json=asking(SHOWN, linking("http://169.254.169.254/latest/meta-data")))
            assert elsewhere.status_code == 400
            told = elsewhere.json()["error"]["message"]
            assert "a link to `http://169.254.169.254/latest/meta-data`" in told
            assert "media.allow_origins" in told
            assert server_at not in told
    assert "/cat.png" not in server.asked
    assert len(server.bodies) == 1


TAKES = BackendModel(served="m", modalities=("text", "image"), tasks=("generate", "rerank", "score", "transcribe"))


async def test_no_server_is_sent_anywhere_unless_its_operator_says_so() -> None:
    """Whatever the call: servers of other makers read links in documents and forms too."""
    server = ForeignServer()
    async with server:
        entry = BackendSettings(name="b", urls=(server.url,), poll_interval_s=0.05, warm_up=False, models=(TAKES,))
        async with passing(entry) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
            inside = "http://10.0.0.1/admin"
            shown = {"content": [linking(inside)]}
            form: dict[str, Any] = {"model": (None, "m"), "url": (None, inside), "file": ("a.wav", b"RIFF")}
            replies = [
                await http.post(CHAT, json=asking(linking("https://example.com/cat.png"))),
                await http.post("/v1/rerank", json={"model": "m", "query": "a", "documents": ["b", shown]}),
                await http.post("/v1/rerank", json={"model": "m", "query": {"image": inside}, "documents": ["b"]}),
                await http.post("/v1/score", json={"model": "m", "text_1": [shown], "text_2": "b"}),
                await http.post("/v1/score", json={"model": "m", "text_1": "a", "text_2": "b", "data_1": shown}),
                await http.post("/v1/score", json={"model": "m", "text_1": "a", "text_2": {"i": "FILE:///etc/passwd"}}),
                await http.post("/v1/audio/transcriptions", files=form),
            ]
            assert [(reply.status_code, "a link to" in reply.text) for reply in replies] == [(400, True)] * 7
            assert not server.bodies
            assert not {"/v1/rerank", "/v1/score", "/v1/audio/transcriptions"} & set(server.asked)
            text = {"text": "https://example.com is a page", "url": "https://example.com", "title": "http://x"}
            asked = {"model": "m", "query": "https://example.com", "documents": [text, "http://10.0.0.1/"]}
            assert "a link to" not in (await http.post("/v1/rerank", json=asked)).text


async def test_token_calls_go_where_the_tokenizer_is() -> None:
    server = ForeignServer()
    told: list[Any] = []

    async def tokenized(request: web.Request) -> web.Response:
        told.append(json.loads(await request.read()))
        return web.json_response({"count": 2, "max_model_len": 99, "tokens": [3, 4], "token_strs": None})

    server.pages |= {"/tokenize": tokenized, "/detokenize": {"prompt": "hi there"}}
    async with world(server) as tiers:
        for tier in tiers:
            async with httpx.AsyncClient(base_url=tier.url) as http:
                reply = await http.post("/tokenize", json={"model": "m", "prompt": "hi there"})
                assert reply.json()["tokens"] == [3, 4]
                reply = await http.post("/detokenize", json={"model": "m", "tokens": [3, 4]})
                assert reply.json() == {"prompt": "hi there"}
    assert told == [{"model": "m", "prompt": "hi there"}] * 2


async def test_who_has_no_tokenizer_to_ask_says_so() -> None:
    server = ForeignServer("someone")
    async with world(server) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
        reply = await http.post("/tokenize", json={"model": "m", "prompt": "hi"})
        assert reply.status_code == 400
        assert "its tokenizer is not on this tier" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("owner", "status"), [("vllm", 200), ("sglang", 200), ("llamacpp", 200), ("someone", 400)])
async def test_what_is_told_to_a_template_goes_to_servers_that_know_it(owner: str, status: int) -> None:
    server = ForeignServer(owner)
    async with world(server) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
        await until(lambda: edge.dispatcher.replicas)
        reply = await http.post(CHAT, json=asking(chat_template_kwargs={"enable_thinking": False, "deep": [1, "é"]}))
        assert reply.status_code == status, reply.text
        if status == 200:
            assert server.bodies[-1]["chat_template_kwargs"] == {"deep": [1, "é"], "enable_thinking": False}
        else:
            assert "chat_template_kwargs" in reply.json()["error"]["message"]
        plain = await http.post(CHAT, json=asking(chat_template_kwargs={}))
        assert plain.status_code == 200
        assert "chat_template_kwargs" not in server.bodies[-1]


async def test_bad_words_go_to_servers_that_know_them() -> None:
    for owner, expected in (("vllm", 200), ("sglang", 400)):
        server = ForeignServer(owner)
        async with world(server) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
            await until(lambda: edge.dispatcher.replicas)
            reply = await http.post(CHAT, json=asking(bad_words=["no", " never"]))
            assert reply.status_code == expected, reply.text
            if expected == 200:
                assert server.bodies[-1]["bad_words"] == ["no", " never"]
            else:
                assert reply.json()["error"]["param"] == "bad_words"
