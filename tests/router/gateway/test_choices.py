"""Several choices, echoed prompts and log probabilities, through the real `openai` SDK on a real uvicorn."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from router.gateway import token_routes
from router.gateway.app import create_app
from router.gateway.choices import total
from router.values.usage import Usage
from tests.support.gateway_fakes import FAMILY, FakeDispatcher, Server, gateway_deps, says


def events_of(server: Server, path: str, body: dict) -> list[dict]:
    with httpx.Client(base_url=server.url) as http:
        text = http.post(path, json={"model": FAMILY, "stream": True, **body}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# ── choices ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_choices_are_requests_of_their_own_with_seeds_of_their_own(sdk: openai.OpenAI, server: Server) -> None:
    reply = sdk.chat.completions.create(
        model=FAMILY, messages=says("say a b c"), n=3, seed=7, extra_headers={"x-request-id": "r"}
    )
    assert [(choice.index, choice.message.content) for choice in reply.choices] == [(n, "a b c") for n in range(3)]
    asked = {request.request_id: request.sampling.seed for request in server.dispatcher.requests}
    assert asked == {"r": 7, "r.1": 8, "r.2": 9}
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5, 9)


def test_prompts_of_a_list_come_before_choices(sdk: openai.OpenAI, server: Server) -> None:
    reply = sdk.completions.create(model=FAMILY, prompt=["say a", "say b c"], n=2)
    assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "a"), (1, "a"), (2, "b c"), (3, "b c")]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2 + 3, 2 + 4)
    reply = sdk.completions.create(model=FAMILY, prompt=[[5, 6], [7]], max_tokens=1)
    assert [choice.text for choice in reply.choices] == ["one", "one"]


def test_streamed_choices_are_interleaved_and_whole(sdk: openai.OpenAI, server: Server) -> None:
    words = " ".join(f"w{n}" for n in range(30))
    stream = sdk.chat.completions.create(
        model=FAMILY, messages=says(f"slow {words}"), n=3, stream=True, stream_options={"include_usage": True}
    )
    texts, order, ends, usage = defaultdict(str), [], {}, None
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            order.append(choice.index)
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert dict(texts) == dict.fromkeys(range(3), words)
    assert ends == dict.fromkeys(range(3), "stop")
    assert order != sorted(order), "one after the other"
    assert (usage.prompt_tokens, usage.completion_tokens) == (32, 90)


def test_one_choice_that_fails_is_told_and_the_rest_is_not_lost(server: Server) -> None:
    prompts = ["say a b", "refuse shed", "break"]
    with httpx.Client(base_url=server.url) as http:
        reply = http.post("/v1/completions", json={"model": FAMILY, "prompt": prompts})
    choices = reply.json()["choices"]
    assert reply.status_code == 200
    assert [choice["finish_reason"] for choice in choices] == ["stop", "error", "error"]
    assert [choice["text"] for choice in choices] == ["a b", "", ""]
    assert choices[1]["error"]["code"] == "capacity_exceeded" or choices[1]["error"]["message"] == "the queue is full"
    events = events_of(server, "/v1/completions", {"prompt": prompts})
    last = {}
    texts = defaultdict(str)
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            last[choice["index"]] = choice
    assert (texts[0], texts[1], texts[2]) == ("a b", "", "one two")
    assert [last[index]["finish_reason"] for index in range(3)] == ["stop", "error", "error"]
    assert last[2]["error"]["message"] == "the replica died"


@pytest.mark.parametrize("stream", [False, True])
def test_where_all_choices_fail_the_first_error_is_the_reply(server: Server, stream: bool) -> None:
    body = {"model": FAMILY, "prompt": ["refuse shed", "refuse shed"], "stream": stream}
    with httpx.Client(base_url=server.url) as http:
        reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 429
    assert "retry-after" in reply.headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_leaves_takes_all_choices_along(server: Server, stream: bool) -> None:
    body = {"model": FAMILY, "prompt": ["stall", "stall"], "stream": stream}
    with httpx.Client(base_url=server.url, timeout=0.5) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, headers={"x-request-id": "gone"})
    assert server.dispatcher.wait_closed("gone")
    assert server.dispatcher.wait_closed("gone.1")


async def test_a_caller_who_stops_reading_takes_all_choices_along() -> None:
    """It goes away while a piece is being sent: nobody asks for the next one."""
    dispatcher, sending = FakeDispatcher(), asyncio.Event()
    app = create_app(gateway_deps(dispatcher))
    body = json.dumps({"model": FAMILY, "prompt": ["forever", "forever"], "stream": True}).encode()
    came = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict:
        if came:
            return came.pop()
        await sending.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            sending.set()
            await asyncio.Event().wait()

    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"gone"), (b"host", b"localhost")]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
    }
    scope |= {"query_string": b"", "headers": headers, "client": ("127.0.0.1", 5), "server": None, "scheme": "http"}
    await app({**scope, "asgi": {"version": "3.0"}, "http_version": "1.1", "root_path": ""}, receive, send)
    assert sorted(dispatcher.closed) == ["gone", "gone.1"]


@given(st.lists(st.tuples(st.integers(1, 50), st.lists(st.integers(0, 50), min_size=3, max_size=3)), min_size=1))
def test_a_prompt_counts_once_for_its_choices(prompts: list[tuple[int, list[int]]]) -> None:
    usages = [Usage(prompt, tokens, 1) for prompt, answers in prompts for tokens in answers]
    found = total(usages, 3)
    assert found.prompt_tokens == sum(prompt for prompt, _ in prompts)
    assert found.completion_tokens == sum(sum(answers) for _, answers in prompts)
    assert found.cached_tokens == len(prompts)


# ── log probabilities and echo ──────────────────────────────────────────────────────────────────────────────────────


def test_log_probabilities_of_a_chat(sdk: openai.OpenAI) -> None:
    reply = sdk.chat.completions.create(model=FAMILY, messages=says("say a é"), logprobs=True, top_logprobs=1)
    entries = reply.choices[0].logprobs.content
    assert [(entry.token, entry.logprob, entry.bytes) for entry in entries] == [
        ("a", -1.0, [97]),
        (" é", -1.0, [32, 0xC3, 0xA9]),
    ]
    assert [(top.token, top.logprob) for top in entries[0].top_logprobs] == [("", -0.5)]
    assert sdk.chat.completions.create(model=FAMILY, messages=says("say a")).choices[0].logprobs is None


def test_log_probabilities_of_a_streamed_chat(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(model=FAMILY, messages=says("say a b"), logprobs=True, stream=True)
    told = [
        (choice.delta.content, [entry.token for entry in choice.logprobs.content])
        for event in stream
        for choice in event.choices
        if choice.logprobs
    ]
    assert told == [("a", ["a"]), (" b", [" b"])]


def test_echo_tells_the_prompt_and_its_log_probabilities(sdk: openai.OpenAI) -> None:
    """As lm-eval's `local-completions` asks: the prompt scored, one token generated."""
    reply = sdk.completions.create(model=FAMILY, prompt="say é b", echo=True, logprobs=1, max_tokens=1, temperature=0)
    choice = reply.choices[0]
    assert choice.text == "say é bé"
    assert choice.logprobs.tokens == ["say", " é", " b", "é"]
    assert choice.logprobs.token_logprobs == [None, -1.0, -1.0, -1.0]
    assert choice.logprobs.text_offset == [0, 3, 5, 7]
    assert choice.logprobs.top_logprobs == [None, {"": -0.5, " é": -1.0}, {"": -0.5, " b": -1.0}, {"": -0.5, "é": -1.0}]
    assert reply.usage.completion_tokens == 1


def test_echo_without_an_answer(sdk: openai.OpenAI, server: Server) -> None:
    mixed: Any = ["say b", [3, 1]]
    reply = sdk.completions.create(model=FAMILY, prompt=mixed, echo=True, logprobs=0, max_tokens=0)
    first, second = reply.choices
    assert (first.text, first.finish_reason) == ("say b", "length")
    assert first.logprobs.tokens == ["say", " b"]
    assert second.text == "xxx x"
    assert reply.usage.completion_tokens == 0
    assert [request.sampling.max_tokens for request in server.dispatcher.requests] == [1, 1]
    assert sdk.completions.create(model=FAMILY, prompt="say b", echo=True).choices[0].text == "say bb"


def test_a_streamed_echo(sdk: openai.OpenAI) -> None:
    stream = sdk.completions.create(model=FAMILY, prompt="say b c", echo=True, logprobs=0, stream=True)
    events = [choice for event in stream for choice in event.choices]
    assert "".join(event.text for event in events) == "say b cb c"
    lines = [event.logprobs for event in events if event.logprobs]
    told = [pair for line in lines for pair in zip(line.tokens or (), line.text_offset or (), strict=True)]
    assert told == [("say", 0), (" b", 3), (" c", 5), ("b", 7), (" c", 8)]


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tokenize_and_detokenize_in_vllms_shapes(server: Server) -> None:
    with httpx.Client(base_url=server.url) as http:

        def post(path: str, **body: object) -> httpx.Response:
            return http.post(path, json={"model": FAMILY, **body})

        assert post("/tokenize", prompt="ab c").json() == {
            "count": 4,
            "max_model_len": 2048,
            "tokens": [1, 2, 1, 2],
            "token_strs": None,
        }
        plain = post("/tokenize", prompt="ab c", add_special_tokens=False, return_token_strs=True).json()
        assert plain["token_strs"] == ["xx", "x", "xx"]
        chat = post("/tokenize", messages=says("ab"), add_generation_prompt=False).json()
        assert chat["tokens"] == [1, 2]
        assert post("/detokenize", tokens=[2, 1]).json() == {"prompt": "xx x"}
        wrongs: list[tuple[str, dict[str, Any], str]] = [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": says("b")}, "prompt"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/tokenize", {"messages": says("a"), "chat_template": "x"}, "chat_template"),
            ("/tokenize", {"messages": says("a"), "continue_final_message": True}, "continue_final_message"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/detokenize", {}, "tokens"),
        ]
        for path, wrong, param in wrongs:
            reply = post(path, **wrong)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), (path, wrong)
        assert http.post("/tokenize", json={"model": "other", "prompt": "a"}).status_code == 404


def test_many_tokens_are_written_beside_the_event_loop(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million of them take seconds as texts, and others have answers to come meanwhile."""
    beside: list[bool] = []
    for name in ("encode_tokens", "encode_text"):
        real = getattr(token_routes, name)

        def call(*given: Any, real: Any = real) -> Any:
            beside.append(threading.current_thread().name != "gateway-under-test")
            return real(*given)

        monkeypatch.setattr(token_routes, name, call)
    with httpx.Client(base_url=server.url) as http:
        for many in (1, 20_000):
            told = {"model": FAMILY, "prompt": "ab " * many, "return_token_strs": True}
            assert http.post("/tokenize", json=told).status_code == 200
            assert http.post("/detokenize", json={"model": FAMILY, "tokens": [1] * many}).status_code == 200
    assert beside == [False, False, True, True]
