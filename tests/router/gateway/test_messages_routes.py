"""/v1/messages: whole, streamed, with tools, stop strings, thoughts and schemas, and its errors in Anthropic's form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from router.base.errors import ContextTooLong, InvalidRequest, ReplicaBroken
from router.values.answer import Answer, Route
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import Message, Prompt, PromptSize
from router.values.request import InferenceRequest, Locality
from router.values.tool_calls import ToolChoice, call_text
from router.values.usage import TokenDetails
from router.wire.anthropic import turns
from router.wire.anthropic.fields import Block, Turn
from tests.support.gateway_fakes import FAMILY, FakeDispatcher, Server, WordCounter, client_of, gateway_deps, serving

WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = call_text("weather", json.dumps({"city": "Ulm"}))
THEIRS = {"anthropic-version": "2023-06-01"}


class Scripted(FakeDispatcher):
    """Answers with these chunks."""

    def __init__(self, *chunks: TokenChunk | Exception) -> None:
        super().__init__()
        self._script = chunks

    async def start(self, request: InferenceRequest) -> Answer:
        self.requests.append(request)
        route = Route("cloud", "tiny-int8", 1, "best", degraded=False, predicted_ttft_s=None)
        return Answer(route, self._told())

    async def _told(self) -> AsyncGenerator[TokenChunk, None]:
        for chunk in self._script:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk
            await asyncio.sleep(0)


def body(text: str | list[Any] = "say one two three", **more) -> dict[str, Any]:
    return {"model": FAMILY, "max_tokens": 9, "messages": [{"role": "user", "content": text}], **more}


def ended(text: str = "", reason: FinishReason = FinishReason.STOP, **more) -> TokenChunk:
    return TokenChunk(text, int(bool(text)), reason, **more)


async def ask(dispatcher: FakeDispatcher, sent: dict[str, Any], **headers: str) -> httpx.Response:
    async with client_of(gateway_deps(dispatcher)) as http:
        return await http.post("/v1/messages", json=sent, headers={**THEIRS, **headers})


def events_in(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def streamed(dispatcher: FakeDispatcher, sent: dict[str, Any]) -> list[dict[str, Any]]:
    reply = await ask(dispatcher, {**sent, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events_in(reply.text)


async def test_a_whole_message_and_what_the_router_was_asked() -> None:
    dispatcher = FakeDispatcher()
    reply = await ask(
        dispatcher,
        body(
            system=[{"type": "text", "text": "Be brief."}],
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            stop_sequences=["END"],
            metadata={"user_id": "u"},
            service_tier="auto",
            context_management={"edits": []},
        ),
        **{"x-overspill-locality": "local-only", "anthropic-beta": "some-2026-01-01", "x-request-id": "r-1"},
    )
    found = reply.json()
    assert found == {
        "id": "msg_r-1",
        "type": "message",
        "role": "assistant",
        "model": "tiny-int8",
        "content": [{"type": "text", "text": "one two three"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 8,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    }
    assert (reply.headers["request-id"], reply.headers["x-overspill-reason"]) == ("r-1", "step-down")
    asked = dispatcher.requests[-1]
    assert [(turn.role, turn.content) for turn in asked.prompt.messages] == [
        ("system", "Be brief."),
        ("user", "say one two three"),
    ]
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 7)
    assert (sampling.stop, asked.objective.locality) == (("END",), Locality.LOCAL_ONLY)


async def test_the_events_come_in_the_order_of_the_api() -> None:
    script = Scripted(TokenChunk("one", cached_tokens=3), TokenChunk(" two"), ended(prompt_tokens=11, stop="END"))
    start, ping, begun, *deltas, closed, last, stop = await streamed(script, body())
    assert (ping, stop) == ({"type": "ping"}, {"type": "message_stop"})
    message = start["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["cache_read_input_tokens"]) == ([], None, 3)
    assert begun == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert [delta["delta"] for delta in deltas] == [
        {"type": "text_delta", "text": "one"},
        {"type": "text_delta", "text": " two"},
    ]
    assert closed == {"type": "content_block_stop", "index": 0}
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    usage = last["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (8, 3, 2)


@pytest.mark.parametrize(
    ("last", "reason", "stop"),
    [
        (ended(), "end_turn", None),
        (ended(stop="END"), "stop_sequence", "END"),
        (ended(reason=FinishReason.LENGTH), "max_tokens", None),
    ],
)
async def test_why_an_answer_ended(last: TokenChunk, reason: str, stop: str | None) -> None:
    found = (await ask(Scripted(TokenChunk("one"), last), body())).json()
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, stop)


async def test_calls_are_blocks_whole_and_streamed() -> None:
    chunks = [TokenChunk(text) for text in ("Let me see.\n", CALL[:30], CALL[30:])]
    sent = body(tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    script = Scripted(*chunks, ended())
    found = (await ask(script, sent)).json()
    text, call = found["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Ulm"})
    assert call["id"].startswith("toolu_")
    assert found["stop_reason"] == "tool_use"
    tools = script.requests[-1].prompt.tools
    assert tools is not None
    assert (tools.choice, tools.parallel, tools.offered[0].name) == (ToolChoice.REQUIRED, False, "weather")
    events = await streamed(Scripted(*chunks, ended()), sent)
    kinds = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert kinds == ["text", "tool_use"]
    pieces = [event["delta"]["partial_json"] for event in events if event.get("delta", {}).get("partial_json")]
    assert json.loads("".join(pieces)) == {"city": "Ulm"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_the_input_of_a_call_is_told_as_it_was_written() -> None:
    """A number of more than 64 bits was a 500: it was decoded, and cannot be encoded again."""
    script = Scripted(TokenChunk(call_text("weather", '{"city": "Ulm", "n": 123456789012345678901234567890}')), ended())
    reply = await ask(script, body(tools=[WEATHER]))
    assert (reply.status_code, reply.json()["stop_reason"]) == (200, "tool_use")
    assert reply.json()["content"][0]["input"] == {"city": "Ulm", "n": 123456789012345678901234567890}


async def test_a_call_that_was_cut_is_still_a_body_that_clients_can_read() -> None:
    script = Scripted(TokenChunk(CALL[:55]), ended(reason=FinishReason.LENGTH))
    found = (await ask(script, body(tools=[WEATHER]))).json()
    assert found["stop_reason"] == "max_tokens"
    assert list(found["content"][0]["input"]) == ["invalid_json"]


async def test_a_history_with_calls_results_images_and_thoughts() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    sent = body()
    sent["messages"] = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}, image]},
                {"type": "text", "text": "say ok"},
            ],
        },
        {"role": "user", "content": "now"},
    ]
    dispatcher = Scripted(ended("ok"))
    assert (await ask(dispatcher, {**sent, "tools": [WEATHER]})).status_code == 200
    _, assistant, tool, user = dispatcher.requests[-1].prompt.messages
    assert (assistant.content, assistant.tool_calls[0].arguments) == ("One moment.", '{"city": "Ulm"}')
    assert (tool.role, tool.content, tool.call_id) == ("tool", "sunny", "t1")
    assert [part if isinstance(part, str) else part.kind.value for part in user.parts] == ["images", "say ok", "now"]


@pytest.mark.parametrize("content", ["three", [{"type": "text", "text": "three"}]])
async def test_what_a_search_found_is_read(content: str | list[Any]) -> None:
    found = {"type": "search_result", "title": "one", "source": "two", "content": content, "citations": {}}
    said = {"type": "text", "text": "say ok"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [found]}
    for blocks, shown in (
        ([found, said], ["one\ntwo\nthree\nsay ok"]),
        ([result, said], ["one\ntwo\nthree", "say ok"]),
    ):
        dispatcher = FakeDispatcher()
        await ask(dispatcher, body(blocks))
        assert [turn.content for turn in dispatcher.requests[-1].prompt.messages] == shown


async def test_what_claude_code_says_to_anthropics_servers_alone_is_no_part_of_the_prompt() -> None:
    dispatcher = FakeDispatcher()
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1234;"},
        {"type": "text", "text": "You are helpful.", "cache_control": {"type": "ephemeral"}},
    ]
    await ask(dispatcher, body(system=system))
    assert dispatcher.requests[-1].prompt.messages[0].content == "You are helpful."


async def test_an_answer_goes_on_from_the_assistants_last_turn() -> None:
    dispatcher = Scripted(ended(" three"))
    sent = body()
    sent["messages"].append({"role": "assistant", "content": "one two"})
    found = (await ask(dispatcher, sent)).json()
    assert found["content"] == [{"type": "text", "text": " three"}]
    asked = dispatcher.requests[-1]
    assert (asked.continuation, [turn.role for turn in asked.prompt.messages]) == ("one two", ["user"])


@pytest.mark.parametrize("cut", [12, 14, 24, 31, 50, len(CALL) - 14, len(CALL) - 3])
async def test_a_call_that_the_assistants_last_turn_began_is_told_whole(cut: int) -> None:
    sent = body(tools=[WEATHER])
    sent["messages"].append({"role": "assistant", "content": CALL[:cut]})
    rest = [TokenChunk(CALL[at : at + 5]) for at in range(cut, len(CALL), 5)]
    found = (await ask(Scripted(*rest, ended()), sent)).json()
    (block,) = found["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {"city": "Ulm"})
    assert found["stop_reason"] == "tool_use"
    events = await streamed(Scripted(*rest, ended()), sent)
    (begun,) = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert (begun["name"], bool(begun["id"])) == ("weather", True)
    deltas = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(deltas)) == {"city": "Ulm"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("rest", "kinds", "reason"),
    [("", [], "end_turn"), ("\nDone.", ["text"], "end_turn"), ("\n" + CALL, ["tool_use"], "tool_use")],
)
async def test_behind_a_finished_call_the_answer_goes_on(rest: str, kinds: list[str], reason: str) -> None:
    sent = body(tools=[WEATHER])
    sent["messages"].append({"role": "assistant", "content": CALL})
    script = ended(rest)
    found = (await ask(Scripted(script), sent)).json()
    assert ([block["type"] for block in found["content"]], found["stop_reason"]) == (kinds, reason)
    events = await streamed(Scripted(script), sent)
    assert [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"] == kinds
    assert events[-2]["delta"]["stop_reason"] == reason


@pytest.mark.parametrize(
    ("thinking", "blocks"),
    [
        (None, ["text"]),
        ({"type": "disabled"}, ["text"]),
        ({"type": "enabled", "budget_tokens": 1024}, ["thinking", "text"]),
        ({"type": "adaptive", "display": "omitted"}, ["thinking", "text"]),
    ],
)
async def test_thoughts_are_told_to_who_asks(thinking: dict[str, Any] | None, blocks: list[str]) -> None:
    details = TokenDetails({}, {"reasoning_tokens": 1})
    chunks = [TokenChunk("", reasoning="hm"), TokenChunk("yes"), ended(details=details)]
    sent = body() if thinking is None else body(thinking=thinking)
    shown = "" if thinking is not None and "display" in thinking else "hm"
    found = (await ask(Scripted(*chunks), sent)).json()
    assert [block["type"] for block in found["content"]] == blocks
    assert found["usage"]["output_tokens_details"] == {"thinking_tokens": 1}
    events = await streamed(Scripted(*chunks), sent)
    assert [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"] == blocks
    if len(blocks) > 1:
        assert found["content"][0]["thinking"] == shown
        assert found["content"][0]["signature"]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta.get("thinking", "") for delta in deltas) == shown
        assert any(delta["type"] == "signature_delta" for delta in deltas)


async def test_thoughts_that_are_not_told_leave_signs_of_life() -> None:
    script = Scripted(*[TokenChunk("", reasoning="hm")] * 70, ended("yes"))
    events = await streamed(script, body())
    assert [event["type"] for event in events].count("ping") == 3


async def test_an_answer_by_a_schema() -> None:
    dispatcher = Scripted(ended("{}"))
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    fields: list[dict[str, Any]] = [{"output_config": {"format": wanted, "effort": "low"}}, {"output_format": wanted}]
    for more in fields:
        assert (await ask(dispatcher, body(**more))).status_code == 200
        constraint = dispatcher.requests[-1].sampling.constraint
        assert constraint is not None
        assert (constraint.source, constraint.strict) == ('{"type":"object"}', True)
    assert dispatcher.requests[0].sampling.reasoning_effort == "low"


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    events = await streamed(Scripted(TokenChunk("one"), ReplicaBroken("it died")), body())
    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {"type": "api_error", "message": "it died", "code": "replica_broken"}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "messages[0].content[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "weather"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "y"}]}, "mcp_servers"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": 3}, "temperature"),
        ({"locality": "local-only"}, "locality"),
    ],
)
async def test_what_cannot_be_served_is_named(more: dict[str, Any], named: str) -> None:
    reply = await ask(FakeDispatcher(), {**body(), **more})
    found = reply.json()
    assert (reply.status_code, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
    assert f"`{named}`" in found["error"]["message"]
    assert found["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_threads_are_refused_by_the_code_at_which_clients_go_on_without(path: str) -> None:
    async with client_of(gateway_deps()) as http:
        reply = await http.post(path, json=body(thread={"type": "create"}), headers=THEIRS)
        found = reply.json()["error"]
        assert (reply.status_code, found["type"], found["code"]) == (
            400,
            "invalid_request_error",
            "thread_unsupported_request",
        )
        assert found["details"] == {"error_code": "thread_unsupported_request"}
        assert (await http.post(path, json=body(thread=None), headers=THEIRS)).status_code == 200


async def test_a_compaction_changes_no_count() -> None:
    async with client_of(gateway_deps()) as http:
        sent = body(compaction={"type": "summarize"})
        assert (await http.post("/v1/messages/count_tokens", json=sent, headers=THEIRS)).status_code == 200


async def test_instructions_that_hold_for_one_turn_are_not_shown_behind_it() -> None:
    passing = {"role": "system", "content": "be brief", "clear_at": "next_user_message"}
    lasting = {"role": "system", "content": "be kind", "clear_at": "never"}
    sent = body()
    sent["messages"] = [{"role": "user", "content": "a"}, passing, lasting]
    dispatcher = FakeDispatcher()
    for added, shown in (
        ([], ["a", "be brief", "be kind"]),
        ([{"role": "user", "content": "b"}], ["a", "be kind", "b"]),
    ):
        await ask(dispatcher, {**sent, "messages": sent["messages"] + added})
        assert [turn.content for turn in dispatcher.requests[-1].prompt.messages] == shown


@pytest.mark.parametrize(
    ("said", "status", "kind"),
    [
        ("refuse shed", 529, "overloaded_error"),
        ("refuse unavailable", 529, "overloaded_error"),
        ("refuse long", 400, "invalid_request_error"),
        ("crash", 500, "api_error"),
    ],
)
async def test_errors_have_the_types_of_the_api(said: str, status: int, kind: str) -> None:
    reply = await ask(FakeDispatcher(), body(said))
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
    assert ("retry-after-ms" in reply.headers) == (status == 529)


async def test_either_header_holds_a_key_and_two_keys_are_refused() -> None:
    async with client_of(gateway_deps(api_keys={"a": 0, "b": 0})) as http:
        url = "/v1/messages"
        for headers in (
            {"x-api-key": "a"},
            {"authorization": "Bearer a"},
            {"x-api-key": "a", "authorization": "Bearer a"},
        ):
            assert (await http.post(url, json=body(), headers=headers)).status_code == 200
            assert (await http.get("/v1/models", headers=headers)).status_code == 200
        for headers in ({}, {"x-api-key": "c"}, {"x-api-key": "a", "authorization": "Bearer b"}):
            reply = await http.post(url, json=body(), headers=headers)
            assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
            assert reply.json()["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


async def test_refusals_before_a_route_have_its_form_too() -> None:
    async with client_of(gateway_deps()) as http:
        for path in ("/v1/messages/batches", "/v1/messages/x"):
            reply = await http.post(path, json={})
            assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
        reply = await http.post("/v1/complete", json={}, headers=THEIRS)
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
        assert "/v1/messages" in reply.json()["error"]["message"]
        reply = await http.get("/v1/messages")
        assert (reply.status_code, reply.json()["error"]["type"]) == (405, "invalid_request_error")
        reply = await http.post("/v1/messages", content=b"x" * (17 << 20))
        assert (reply.status_code, reply.json()["error"]["type"]) == (413, "request_too_large")
        reply = await http.post("/v1/messages", json={**body(), "model": "other"})
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")


async def test_tokens_are_counted() -> None:
    async with client_of(gateway_deps()) as http:
        sent = {"model": FAMILY, "messages": body("one two")["messages"], "system": "be brief"}
        reply = await http.post("/v1/messages/count_tokens", json=sent, headers=THEIRS)
        assert reply.json() == {"input_tokens": 6}
        reply = await http.post("/v1/messages/count_tokens", json={"model": FAMILY}, headers=THEIRS)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


class Unreached(FakeDispatcher):
    """An upstream was never reached."""

    def unreached(self, locality: Locality) -> str:
        return "" if locality is Locality.LOCAL_ONLY else "upstream: not reached yet"


class Narrow(WordCounter):
    """No window that is known takes it."""

    def count(self, model: str, prompt: Prompt) -> PromptSize:
        raise ContextTooLong("the prompt fits no window", param="messages")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_what_an_upstream_may_serve_that_was_never_reached_is_to_come_back(path: str) -> None:
    async with client_of(gateway_deps(Unreached(), prompts=Narrow())) as http:
        for sent in (body(), {**body(), "model": "other"}):
            reply = await http.post(path, json=sent)
            assert (reply.status_code, reply.json()["error"]["type"]) == (529, "overloaded_error")
            assert "upstream: not reached yet" in reply.json()["error"]["message"]
        reply = await http.post(path, json=body(), headers={"x-overspill-locality": "local-only"})
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_models_are_listed_in_the_callers_form() -> None:
    async with client_of(gateway_deps()) as http:
        assert (await http.get("/v1/models")).json()["object"] == "list"
        found = (await http.get("/v1/models", headers=THEIRS)).json()
        assert [one["id"] for one in found["data"]] == ["tiny", "tiny-fp32", "tiny-int8"]
        assert (found["has_more"], found["first_id"], found["last_id"]) == (False, "tiny", "tiny-int8")
        assert {one["type"] for one in found["data"]} == {"model"}
        page = (await http.get("/v1/models?limit=1&after_id=tiny", headers=THEIRS)).json()
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (["tiny-fp32"], True)
        page = (await http.get("/v1/models?limit=1&before_id=tiny-int8", headers=THEIRS)).json()
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (["tiny-fp32"], True)
        one = (await http.get("/v1/models/tiny-int8", headers=THEIRS)).json()
        assert (one["type"], one["id"], one["max_input_tokens"]) == ("model", "tiny-int8", 2048)
        reply = await http.get("/v1/models/other", headers=THEIRS)
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
        for query in ("limit=0", "limit=x", "after_id=other"):
            reply = await http.get(f"/v1/models?{query}", headers=THEIRS)
            assert reply.json()["error"]["type"] == "invalid_request_error"


def test_text_is_poured_over_a_real_connection() -> None:
    with serving(gateway_deps()) as server:
        events = events_in(_read(server))
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == "one two three four"
    assert events[-1] == {"type": "message_stop"}


def _read(server: Server) -> str:
    sent = body("slow one two three four", stream=True)
    return httpx.post(f"{server.url}/v1/messages?beta=true", json=sent, headers=THEIRS, timeout=20).text


def test_what_one_side_says_in_many_turns_is_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was put together at each turn: 2,000 of 8 KB held everybody up for 9 s."""
    joined: list[int] = []
    real = turns._joined
    monkeypatch.setattr(turns, "_joined", lambda texts: joined.append(len(texts)) or real(texts))
    said = [Turn("user", "a")] * 500 + [Turn("assistant", "b")] * 500 + [Turn("system", ""), Turn("assistant", "c")]
    assert turns.chat_of(said) == [Message("user", "\n".join("a" * 500)), Message("assistant", "b" * 500 + "c")]
    assert joined == [500]


def test_a_block_of_a_turn_of_instructions_is_named_by_its_place() -> None:
    with pytest.raises(InvalidRequest) as told:
        turns.chat_of([Turn("user", "a"), Turn("system", [Block("text", "b"), Block("image")])])
    assert "messages[1].content[1]" in told.value.message
