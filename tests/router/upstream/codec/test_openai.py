"""The wire to an upstream: what cannot be written is the request's fault, what cannot be true is not believed."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.base.errors import (
    BodyShed,
    ContextTooLong,
    DeadlineLost,
    Evicted,
    InvalidRequest,
    PromiseLost,
    ReplicaFailed,
    ReplicasFailed,
    RequestFailed,
    Shed,
    Unavailable,
)
from router.dispatch.attempts.blame import Verdict, verdict
from router.upstream.codec.events import EventParser, origin_of
from router.upstream.codec.openai import encode_http
from router.upstream.codec.refusals import decode_error
from router.values.prompt import ChatPrompt, Message, TextPrompt, TokenPrompt
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.wire import names as wire_names

ANY_TEXT = st.text(st.characters(codec=None), max_size=12)  # lone surrogates and control characters too
NUMBERS = st.one_of(st.floats(), st.integers(-(2**70), 2**70))


def ask(**changes: Any) -> InferenceRequest:
    plain = InferenceRequest("r", "tiny", TextPrompt("hello"), SamplingParams(), Objective(), 3, 0.0)
    return msgspec.structs.replace(plain, **changes)


@pytest.mark.parametrize("name", ["traceparent", "tracestate"])
@pytest.mark.parametrize("value", ["ключ=1", "a=\u00e9", "a\r\nx: y", "a\x00b", "\udcff"])
def test_a_trace_that_is_not_ascii_is_the_requests_fault(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode_http(ask(headers=((name, value),)), Objective(), "tiny", 512)
    assert caught.value.param == name
    assert verdict(caught.value) is Verdict.REQUEST


@settings(max_examples=150)
@given(
    headers=st.lists(
        st.tuples(st.sampled_from(["traceparent", "tracestate", "x-overspill-hops"]), ANY_TEXT), max_size=3
    ),
    prompt=st.one_of(
        st.builds(TextPrompt, ANY_TEXT),
        st.builds(lambda text: ChatPrompt((Message("user", text),)), ANY_TEXT),
        st.builds(TokenPrompt, st.lists(st.integers(-(2**70), 2**70), max_size=3).map(tuple)),
    ),
    sampling=st.builds(
        SamplingParams, max_tokens=st.none() | st.integers(-(2**70), 2**70), temperature=NUMBERS, seed=NUMBERS
    ),
    session=st.none() | ANY_TEXT,
    request_id=ANY_TEXT,
    continuation=ANY_TEXT,
)
def test_whatever_a_request_holds_is_sent_or_its_own_fault(
    *, headers: list, prompt: object, sampling: SamplingParams, session: str | None, request_id: str, continuation: str
) -> None:
    request = ask(
        headers=tuple(headers), prompt=prompt, sampling=sampling, request_id=request_id, continuation=continuation
    )
    try:
        post = encode_http(request, Objective(session=session), "tiny", 512)
    except InvalidRequest:
        return
    orjson.loads(post.body)
    for name, value in post.headers:
        assert (name + value).isascii()
        assert (name + value).isprintable()


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, None, InvalidRequest),
        (400, "context_length_exceeded", ContextTooLong),
        (413, None, InvalidRequest),
        (414, None, InvalidRequest),
        (422, None, InvalidRequest),
        (431, None, InvalidRequest),
        (401, None, ReplicaFailed),
        (403, None, ReplicaFailed),
        (408, None, ReplicaFailed),
        (429, None, Shed),
        (429, "shed", Shed),
        (429, "evicted", Evicted),
        (429, "body_shed", BodyShed),
        (500, "request_failed", RequestFailed),
        (500, "internal_error", ReplicaFailed),
        (502, None, ReplicaFailed),
        (503, None, Unavailable),
        (503, "unavailable", Unavailable),
        (503, "deadline_lost", DeadlineLost),
        (503, "promise_lost", PromiseLost),
        (503, "replicas_failed", ReplicasFailed),
    ],
)
def test_a_status_and_a_code_say_whose_fault_it_is(status: int, code: str | None, expected: type) -> None:
    body = orjson.dumps({"error": {"message": "why", "code": code}})
    assert type(decode_error(status, {}, body, "upstream")) is expected


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens.",
        "The input (3000 tokens) is longer than the model's context length (2048 tokens).",
        "the request exceeds the available context size (2048 tokens)",
    ],
)
def test_servers_without_a_code_for_it_are_known_by_how_they_tell_of_an_overflow(message: str) -> None:
    body = orjson.dumps({"error": {"message": message, "code": 400}})
    error = decode_error(400, {}, body, "backend vllm")
    assert isinstance(error, ContextTooLong)
    assert message in error.message
    assert "prompt is too long" in error.message, "LangChain looks for it"


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b'{"error":7}', b'{"error":{"code":[]}}', b"[" * 100_000])
def test_an_error_of_any_shape_is_read(body: bytes) -> None:
    for status in (400, 429, 500, 503, 999):
        error = decode_error(status, {"retry-after": "1e309", "retry-after-ms": "nan"}, body, "upstream")
        assert len(error.message) <= 4000


@pytest.mark.parametrize("told", [10**29, -1, 4.5, 1e300, True, "7", None, [], {}])
def test_a_usage_that_cannot_be_true_is_a_missing_one(told: object) -> None:
    body = orjson.dumps(told) if told != 10**29 else b"1" + b"0" * 29
    line = b'data: {"choices":[],"usage":{"prompt_tokens":%s,"completion_tokens":%s}}\n' % (body, body)
    (event,) = EventParser().feed(line)
    assert event.error_message is None
    assert event.usage is not None
    assert event.usage.told_tokens(512) is None
    assert event.usage.told_prompt_tokens(512) is None


def test_null_is_no_choice_and_no_alternative() -> None:
    entry = b'{"token":"a","logprob":-1,"top_logprobs":null}'
    lines = (
        b'data: {"choices":null,"usage":{"completion_tokens":3}}\n'
        b'data: {"choices":[{"delta":{"content":"a"},"logprobs":{"content":[%s]}}]}\n' % entry
    )
    usage, token = EventParser().feed(lines)
    assert (usage.error_message, usage.told(), usage.finish_reason) == (None, ("", "", False), None)
    assert usage.usage is not None
    assert usage.usage.told_tokens(9) == 3
    assert [entry.top for entry in token.logprobs(2)] == [()]


def test_a_usage_within_the_window_is_believed() -> None:
    (event,) = EventParser().feed(b'data: {"usage":{"prompt_tokens":512,"completion_tokens":0,"x":1}}\n')
    assert event.usage is not None
    assert (event.usage.told_tokens(512), event.usage.told_prompt_tokens(512)) == (0, 512)
    assert event.usage.told_prompt_tokens(511) is None


@pytest.mark.parametrize(
    "details", ["null", "7", "[]", "{}", '{"cached_tokens":-1}', '{"cached_tokens":513}', '{"cached_tokens":true}']
)
def test_what_an_upstream_says_of_its_cache_is_believed_within_reason(details: str) -> None:
    line = f'data: {{"usage":{{"prompt_tokens":512,"prompt_tokens_details":{details}}}}}\n'
    (event,) = EventParser().feed(line.encode())
    assert event.usage is not None
    assert event.usage.told_cached_tokens(512) is None
    (event,) = EventParser().feed(b'data: {"usage":{"prompt_tokens_details":{"cached_tokens":512}}}\n')
    assert event.usage is not None
    assert event.usage.told_cached_tokens(512) == 512


@pytest.mark.parametrize(
    "payload",
    [
        b'{"choices":[{"finish_reason":7}]}',
        b'{"choices":[{"finish_reason":["stop"]}]}',
        b'{"choices":[{"delta":[]}]}',
        b'{"choices":[{"delta":{"content":7}}]}',
        b'{"choices":[{"delta":{"content":{"text":"a"}}}]}',
        b'{"choices":[{"text":7}]}',
        b'{"choices":7}',
        b'{"choices":[7]}',
        b'{"usage":7}',
        b'{"error":7}',
        b"[]",
        b"7",
        b"[" * 5000,
        b'"\\ud800"',
        b"\xff\xfe",
    ],
)
def test_an_event_of_another_shape_is_an_error_and_no_crash(payload: bytes) -> None:
    (event,) = EventParser().feed(b"data: " + payload + b"\n")
    assert event.error_message
    assert len(event.error_message) < 1000


def test_an_event_without_end_is_an_error() -> None:
    parser = EventParser()
    events = [event for _ in range(5) for event in parser.feed(b"data: " + b"x" * 1_000_000)]
    assert events[-1].error_message


@settings(max_examples=100)
@given(name=ANY_TEXT, huge=st.booleans())
def test_what_an_upstream_calls_itself_fits_our_own_headers(name: str, huge: bool) -> None:
    told = name * 100_000 if huge else name
    headers = {
        wire_names.MODEL: told,
        wire_names.TIER: told,
        wire_names.REASON: told,
        wire_names.RUNG: "1",
        wire_names.MAX_TOKENS: "9" * 400,
    }
    origin = origin_of(headers)
    if not name:
        assert origin is None
        return
    assert origin is not None
    for text in (origin.tier, origin.variant, origin.reason):
        assert text.isascii()
        assert text.isprintable()
        assert len(text) <= 128
    assert origin.max_tokens is None


def test_a_time_to_come_back_is_finite() -> None:
    for value in ("inf", "nan", "-1", "1e999", "soon", ""):
        error = decode_error(503, {"retry-after": value}, b"", "upstream")
        assert isinstance(error, Unavailable)
        assert math.isfinite(error.retry_after_s)
