"""The OpenAI surface, through the real `openai` SDK and raw sockets, on a real uvicorn."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import gzip
import json
import socket
import threading
import zlib
from collections.abc import Callable, MutableMapping
from typing import Any

import httpx
import openai
import pytest

from router.base.clock import MonotonicClock
from router.gateway.app import GatewayLimits, create_app
from router.values.prompt import ChatPrompt, Message, Prompt, PromptSize, TokenPrompt
from router.values.request import Locality, Objective
from tests.support.gateway_fakes import FAMILY, FakeDispatcher, Server, WordCounter, gateway_deps, says, serving

CHAT = "/v1/chat/completions"


@pytest.fixture
def http(server: Server):
    with httpx.Client(base_url=server.url) as client:
        yield client


def body(text: str = "say a b", **fields) -> dict:
    return {"model": FAMILY, "messages": says(text), **fields}


def test_models_are_listed_with_what_they_are(sdk: openai.OpenAI) -> None:
    models = {model.id: model for model in sdk.models.list()}
    assert list(models) == ["tiny", "tiny-fp32", "tiny-int8"]
    assert models["tiny"].overspill["variants"] == ["tiny-fp32", "tiny-int8"]  # type: ignore[attr-defined]
    rung = sdk.models.retrieve("tiny-int8").overspill  # type: ignore[attr-defined]
    assert (rung["rung"], rung["quality"], rung["context_tokens"], rung["tier"]) == (1, 0.9, 2048, "cloud")
    assert rung["prior"]["decode_tokens_per_s"] == 60.0
    with pytest.raises(openai.NotFoundError, match="tiny-int8"):
        sdk.models.retrieve("tiny-int9")


def test_chat(sdk: openai.OpenAI, server: Server) -> None:
    raw = sdk.chat.completions.with_raw_response.create(
        model=FAMILY,
        messages=says("say hello there"),
        temperature=0,
        seed=3,
        stop=["\n"],
        max_completion_tokens=9,
        extra_headers={"x-request-id": "abc", "x-overspill-ttft-slo-ms": "900", "x-overspill-locality": "local-only"},
    )
    reply = raw.parse()
    assert reply.choices[0].message.content == "hello there"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == "tiny-int8"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (4, 2, 6)
    expected = {
        "x-request-id": "abc",
        "x-overspill-tier": "cloud",
        "x-overspill-model": "tiny-int8",
        "x-overspill-rung": "1",
        "x-overspill-reason": "step-down",
        "x-overspill-degraded": "true",
        "x-overspill-predicted-ttft-ms": "42.1",
        "x-overspill-max-tokens": "9",
    }
    assert {name: raw.headers[name] for name in expected} == expected
    assert "first-token;dur=" in raw.headers["server-timing"]
    seen = server.dispatcher.requests[0]
    assert seen.objective == Objective(ttft_s=0.9, locality=Locality.LOCAL_ONLY)
    assert seen.sampling.stop == ("\n",)
    assert (seen.request_id, seen.prompt_tokens, seen.model) == ("abc", 4, FAMILY)
    assert seen.prompt_bytes > 0


def test_a_chat_stream_with_usage(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model="tiny-fp32", messages=says("say a b c"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "a b c"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][:-1] == [None] * (len(chunks) - 2)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3
    assert all(c.usage is None for c in chunks[:-1])
    assert {c.model for c in chunks} == {"tiny-fp32"}


def test_a_stream_without_usage_has_none(http: httpx.Client) -> None:
    raw = http.post(CHAT, json=body(stream=True)).text
    assert "usage" not in raw
    assert raw.endswith("data: [DONE]\n\n")


def test_completions(sdk: openai.OpenAI, server: Server) -> None:
    reply = sdk.completions.create(model=FAMILY, prompt="say a b c", max_tokens=2)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("a b", "length")
    chunks = list(sdk.completions.create(model=FAMILY, prompt=[5, 6, 7], stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "one two"
    assert server.dispatcher.requests[1].prompt == TokenPrompt((5, 6, 7))


async def test_the_async_sdk_streams(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model=FAMILY, messages=says("slow a b c"), stream=True)
        texts = [c.choices[0].delta.content async for c in stream]
    assert "".join(t for t in texts if t) == "a b c"


async def test_leaving_a_stream_cancels_its_work(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=FAMILY, messages=says("forever"), stream=True, extra_headers={"x-request-id": "leaves"}
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
    assert await asyncio.to_thread(server.dispatcher.wait_closed, "leaves")


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_the_first_token_cancels_the_work(server: Server, stream: bool) -> None:
    name = f"early-{stream}"
    with httpx.Client(base_url=server.url, timeout=0.2) as client, pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=body("hang", stream=stream), headers={"x-request-id": name})
    assert server.dispatcher.wait_cancelled(name)


def test_leaving_a_reply_that_is_not_streamed_cancels_its_work(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=0.2) as client, pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=body("forever"), headers={"x-request-id": "whole"})
    assert server.dispatcher.wait_closed("whole")


def test_error_classes_of_the_sdk(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(model=FAMILY, messages=says("x"), max_tokens=-1)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "max_tokens",
        "invalid_request",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.chat.completions.create(model="gpt-4o", messages=says("x"))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        sdk.chat.completions.create(model=FAMILY, messages=says("refuse long"))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.RateLimitError) as shed:
        sdk.chat.completions.create(model=FAMILY, messages=says("refuse shed"))
    assert shed.value.response.headers["retry-after"] == "1"
    assert shed.value.response.headers["retry-after-ms"] == "250"
    with pytest.raises(openai.InternalServerError) as unavailable:
        sdk.chat.completions.create(model=FAMILY, messages=says("refuse unavailable"))
    assert unavailable.value.status_code == 503
    assert unavailable.value.response.headers["retry-after"] == "8"
    with pytest.raises(openai.APIError, match="the replica died") as broken:
        list(sdk.chat.completions.create(model=FAMILY, messages=says("break"), stream=True))
    assert broken.value.code == "replica_broken"


def test_the_sdk_retries_as_it_is_told(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=1) as client:
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model=FAMILY, messages=says("refuse shed"))
        assert len(server.dispatcher.requests) == 2, "a shed request may come back"
        server.dispatcher.forget()
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model=FAMILY, messages=says("refuse deadline"))
        assert len(server.dispatcher.requests) == 1, "a lost deadline is not retried"


@pytest.mark.parametrize("how", ["break", "bug", "silent"])
def test_a_stream_that_cannot_go_on_says_so(http: httpx.Client, how: str) -> None:
    events = http.post(CHAT, json=body(how, stream=True)).text.strip().split("\n\n")
    assert "one" in events[1]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["code"] == {"bug": "internal_error"}.get(how, "replica_broken")
    assert error["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("how", "status", "code"), [("break-first", 502, "replica_broken"), ("crash", 500, "internal_error")]
)
def test_what_breaks_before_the_first_token_is_a_status(
    http: httpx.Client, how: str, status: int, code: str, stream: bool
) -> None:
    reply = http.post(CHAT, json=body(how, stream=stream))
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert "ZeroDivision" not in reply.text


def test_a_broken_answer_is_no_answer(http: httpx.Client) -> None:
    for how in ("break", "silent"):
        reply = http.post(CHAT, json=body(how))
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "replica_broken")


def test_embeddings_name_the_model(sdk: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny") as raised:
        sdk.embeddings.create(model=FAMILY, input="hello")
    assert raised.value.code == "model_not_found"
    wrong = http.post("/v1/embeddings", json={"model": FAMILY, "input": 3}).json()["error"]
    assert wrong["param"] == "input"


def test_unserved_features_are_named(sdk: openai.OpenAI) -> None:
    image: Any = [{"type": "text", "text": "what"}, {"type": "video_url", "video_url": {"url": "http://x"}}]
    with pytest.raises(openai.BadRequestError) as raised:
        sdk.chat.completions.create(model=FAMILY, messages=[{"role": "user", "content": image}])
    assert raised.value.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_request"),
        (b"", {}, 400, "invalid_request"),
        (b"[]", {}, 400, "invalid_request"),
        (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        (b"{}", {"content-encoding": "br"}, 415, "unsupported_media_type"),
        (b"junk", {"content-encoding": "gzip"}, 400, "invalid_request"),
        (gzip.compress(b"{}", mtime=0)[:-4], {"content-encoding": "gzip"}, 400, "invalid_request"),
        (b"{}", {"x-overspill-deadline-ms": "soon"}, 400, "invalid_request"),
        (b"{}", {"x-request-id": "a b"}, 400, "invalid_request"),
    ],
)
def test_bad_bodies(http: httpx.Client, content: bytes, headers: dict, status: int, code: str) -> None:
    reply = http.post(CHAT, content=content, headers={"content-type": "application/json", **headers})
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_what_follows_a_packed_body_is_not_left_out_in_silence(http: httpx.Client) -> None:
    packed = gzip.compress(json.dumps(body()).encode())
    assert http.post(CHAT, content=packed, headers={"content-encoding": "gzip"}).status_code == 200
    for rest in (b"more", packed[:-4], b"\0" * 8, packed + b"more"):
        reply = http.post(CHAT, content=packed + rest, headers={"content-encoding": "gzip"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "content-encoding"), rest[:4]
    deflated = zlib.compress(json.dumps(body()).encode())
    reply = http.post(CHAT, content=deflated + deflated, headers={"content-encoding": "deflate"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "content-encoding"), "only gzip has members"


def test_gzip_may_have_several_members(http: httpx.Client, server: Server) -> None:
    plain = json.dumps(body("say zipped " + "x" * 100_000)).encode()
    parts = [plain[at : at + 1_000] for at in range(0, len(plain), 1_000)] + [b""]
    packed = b"".join(gzip.compress(part, mtime=0) for part in parts)
    reply = http.post(CHAT, content=packed, headers={"content-encoding": "gzip"})
    assert reply.json()["choices"][0]["message"]["content"].startswith("zipped")
    assert server.dispatcher.requests[0].prompt_bytes == len(plain)


def test_members_of_gzip_are_bounded_by_what_they_unpack_to_and_in_number(http: httpx.Client) -> None:
    large = gzip.compress(b" " * 1_000_000, mtime=0)
    reply = http.post(CHAT, content=large * 17, headers={"content-encoding": "gzip"})
    assert reply.status_code == 413
    reply = http.post(CHAT, content=gzip.compress(b"", mtime=0) * 200_000, headers={"content-encoding": "gzip"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "content-encoding")


def test_a_wrong_header_is_named(http: httpx.Client) -> None:
    reply = http.post(CHAT, json=body(), headers={"x-overspill-min-quality": "best"})
    assert reply.json()["error"]["param"] == "x-overspill-min-quality"


def test_a_repeated_locality_a_near_name_and_a_query_never_reach_the_router(http: httpx.Client, server: Server) -> None:
    for path, lines, param in (
        (CHAT, [("x-overspill-locality", "local-only"), ("x-overspill-locality", "any")], "x-overspill-locality"),
        (CHAT, [("x-overspill-locality", "local-only, any")], "x-overspill-locality"),
        (CHAT, [("x-overspil-locality", "local-only")], "x-overspil-locality"),
        (f"{CHAT}?locality=local-only", [], "locality"),
    ):
        reply = http.post(path, json=body(), headers=lines)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not server.dispatcher.requests


def test_compressed_bodies_are_read(http: httpx.Client, server: Server) -> None:
    plain = json.dumps(body("say zipped " + "x" * 2000)).encode()
    packed = gzip.compress(plain, mtime=0)
    reply = http.post(CHAT, content=packed, headers={"content-encoding": "gzip"})
    assert reply.json()["choices"][0]["message"]["content"].startswith("zipped")
    assert server.dispatcher.requests[0].prompt_bytes == len(plain) > 5 * len(packed), "the prompt, not its packing"


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_the_byte_order_mark_of_an_editor_is_passed_over(http: httpx.Client, pack: Callable[[bytes], bytes]) -> None:
    sent = pack(codecs.BOM_UTF8 + json.dumps(body("say marked")).encode())
    reply = http.post(CHAT, content=sent, headers={"content-encoding": "identity" if pack is bytes else "gzip"})
    assert reply.json()["choices"][0]["message"]["content"].startswith("marked")


def test_a_continuation_is_taken_apart(http: httpx.Client, server: Server) -> None:
    messages = [*says("say more"), {"role": "assistant", "content": "so far"}]
    fields: dict[str, Any] = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert http.post(CHAT, json=body(**fields)).status_code == 200
    seen = server.dispatcher.requests[0]
    assert (seen.prompt, seen.continuation) == (ChatPrompt((Message("user", "say more"),)), "so far")
    assert seen.prompt_tokens == 6, "the text so far is part of what must fit the window"


def test_usage_so_far(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    lines = http.post(CHAT, json=body("say a b", stream=True, stream_options=options)).text.strip().split("\n\n")
    counts = [json.loads(line[6:])["usage"]["completion_tokens"] for line in lines if line != "data: [DONE]"]
    assert counts == [0, 1, 2, 2, 2]


def test_unknown_paths_and_methods_look_like_openais_errors(http: httpx.Client) -> None:
    assert http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    reply = http.get(CHAT)
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert reply.json()["error"]["code"] == "method_not_allowed"


def test_requests_with_one_id_are_told_apart(server: Server, http: httpx.Client) -> None:
    stop = threading.Event()

    def hold() -> None:
        with httpx.stream(
            "POST", server.url + CHAT, json=body("forever", stream=True), headers={"x-request-id": "same"}
        ) as reply:
            pieces = reply.iter_bytes()  # dropping the iterator would close the stream
            next(pieces)
            started.set()
            stop.wait(10)

    started = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    assert started.wait(10)
    second = http.post(CHAT, json=body(), headers={"x-request-id": "same"})
    stop.set()
    thread.join()
    assert second.headers["x-request-id"] == "same~2"


def test_an_estimated_prompt_reaches_the_router_as_one() -> None:
    class Guesser(WordCounter):
        def count(self, model: str, prompt: Prompt) -> PromptSize:
            return PromptSize(100, slack=40)

    deps = gateway_deps(prompts=Guesser())
    with serving(deps) as server, httpx.Client(base_url=server.url) as client:
        assert client.post(CHAT, json=body("say so")).json()["usage"]["prompt_tokens"] == 100
        seen = server.dispatcher.requests[-1]
        assert (seen.prompt_tokens, seen.least_prompt_tokens) == (100, 60)


def test_what_was_tokenized_to_be_counted_goes_on_with_the_request() -> None:
    encoder = object()

    class Counter(WordCounter):
        def count(self, model: str, prompt: Prompt) -> PromptSize:
            return PromptSize.of([1, 2, 3], encoder)

    deps = gateway_deps(prompts=Counter())
    with serving(deps) as server, httpx.Client(base_url=server.url) as client:
        client.post(CHAT, json=body("say so"))
        begun = [*says("say so"), {"role": "assistant", "content": "so"}]
        options = {"continue_final_message": True, "add_generation_prompt": False}
        client.post(CHAT, json={"model": FAMILY, "messages": begun, **options})
    first, continued = server.dispatcher.requests
    assert first.token_ids(encoder) == [1, 2, 3]
    assert first.token_ids(object()) is None
    assert continued.token_ids(encoder) is None


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v2/models/nope/infer"])
def test_an_unknown_model_is_looked_up_once_with_one_message(path: str) -> None:
    dispatcher, looked = FakeDispatcher(), []
    known = dispatcher.known_models()
    dispatcher.known_models = lambda: looked.append(1) or known
    asked = {"model": "nope", "prompt": "x"} if "completions" in path and "chat" not in path else body(model="nope")
    if path.startswith("/v2"):
        asked = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}
    with serving(gateway_deps(dispatcher)) as server, httpx.Client(base_url=server.url) as client:
        reply = client.post(path, json=asked)
    assert (reply.status_code, len(looked)) == (404, 1)
    assert "tiny-int8" in reply.text


def test_long_prompts_are_counted_off_the_event_loop() -> None:
    counter = WordCounter()
    with serving(gateway_deps(prompts=counter)) as server, httpx.Client(base_url=server.url) as client:
        client.post(CHAT, json=body("say short"))
        client.post(CHAT, json=body("say " + "x " * 11_000))
    assert counter.threads[0] == "gateway-under-test"
    assert counter.threads[1] != "gateway-under-test"


def test_limits() -> None:
    limits = GatewayLimits(max_body_bytes=2000, max_requests=1, body_timeout_s=0.1, retry_after_s=2.5)
    with serving(gateway_deps(limits=limits)) as server, httpx.Client(base_url=server.url) as client:
        for content in (b"x" * 2001, iter([b"x" * 1500, b"x" * 1500]), gzip.compress(b"x" * 1_000_000, mtime=0)[:2000]):
            headers = {"content-encoding": "gzip"} if isinstance(content, bytes) and content[:1] == b"\x1f" else {}
            reply = client.post(CHAT, content=content, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
            assert b"408" in slow.recv(4096)
        with httpx.stream("POST", server.url + CHAT, json=body("forever", stream=True)) as held:
            pieces = held.iter_bytes()
            next(pieces)
            full = client.post(CHAT, json=body())
            assert (full.status_code, full.headers["retry-after"]) == (429, "3")


def test_a_client_that_stops_reading_is_dropped() -> None:
    deps = gateway_deps(limits=GatewayLimits(send_stall_s=0.2))
    with serving(deps) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        text = json.dumps(body("flood", stream=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nx-request-id: deaf\r\ncontent-length: {len(text)}\r\n\r\n"
        client.sendall(head.encode() + text)
        assert server.dispatcher.wait_closed("deaf")


def test_a_client_that_breaks_off_its_body_costs_nothing(server: Server, http: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{")
    assert http.post(CHAT, json=body()).status_code == 200
    assert len(server.dispatcher.requests) == 1


def test_draining_is_never_a_bare_503() -> None:
    deps = gateway_deps(closed=lambda: "draining")
    with serving(deps) as server, httpx.Client(base_url=server.url) as client:
        for path in (CHAT, "/v1/completions", "/v2/models/tiny/infer"):
            reply = client.post(path, json=body())
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert reply.headers["retry-after-ms"] == "1000"
            assert "draining" in reply.text
        assert client.get("/v1/models").status_code == 200


async def test_the_stream_is_closed_when_a_send_fails() -> None:
    """What an ASGI server does when the connection breaks between two reads of `receive`."""
    dispatcher = FakeDispatcher()
    app = create_app(gateway_deps(dispatcher, clock=MonotonicClock()))
    sent = []

    async def receive() -> dict:
        if sent or dispatcher.requests:
            await asyncio.sleep(600)
        return {"type": "http.request", "body": json.dumps(body("forever", stream=True)).encode()}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)
        if len(sent) > 3:
            raise OSError("broken pipe")

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"x-request-id", b"fails")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
        "root_path": "",
        "http_version": "1.1",
    }
    with contextlib.suppress(OSError):
        await app(scope, receive, send)
    assert dispatcher.closed == ["fails"]
