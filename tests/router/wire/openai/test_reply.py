"""Answers become the bodies and events that OpenAI's clients expect."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from router.values.chunk import FinishReason
from router.values.usage import Usage
from router.wire.openai.reply import DONE, Choice, EventEncoder, ReplyHead, encode_body

HEAD = ReplyHead(chat=True, request_id="r", created_s=5, model="tiny-int8")
TEXT_HEAD = ReplyHead(chat=False, request_id="r", created_s=5, model="tiny-int8")


def events(raw: bytes) -> list[dict]:
    lines = [line for line in raw.split(b"\n\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    return [orjson.loads(line[6:]) for line in lines if line != DONE.strip()]


@given(st.text())
def test_text_survives_the_event_encoding(text: str) -> None:
    encoder = EventEncoder(HEAD, include_usage=False, running_usage=False)
    (event,) = events(encoder.text(text, Usage(1, 1)))
    assert event["choices"] == [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]
    assert "usage" not in event


def test_a_chat_stream_has_the_shape_clients_expect() -> None:
    encoder = EventEncoder(HEAD, include_usage=True, running_usage=False)
    raw = encoder.start(Usage(3, 0)) + encoder.text("a", Usage(3, 1)) + encoder.finish(FinishReason.LENGTH, Usage(3, 1))
    raw += encoder.close(Usage(3, 1))
    assert raw.endswith(DONE)
    first, text, last, usage = events(raw)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (first["id"], first["object"], first["model"]) == ("chatcmpl-r", "chat.completion.chunk", "tiny-int8")
    assert text["usage"] is None
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    assert Usage(3, 1, 0).to_json()["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_text_stream_has_the_shape_clients_expect() -> None:
    encoder = EventEncoder(TEXT_HEAD, include_usage=False, running_usage=True)
    assert encoder.start(Usage(3, 0)) == b""
    text, last = events(
        encoder.text("a", Usage(3, 1)) + encoder.finish(FinishReason.STOP, Usage(3, 2)) + encoder.close(Usage(3, 2))
    )
    assert text["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}]
    assert text["usage"]["completion_tokens"] == 1
    assert (text["object"], text["id"]) == ("text_completion", "cmpl-r")
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["usage"]["total_tokens"] == 5


def test_the_stop_string_that_ended_an_answer_is_told_where_there_was_one() -> None:
    encoder = EventEncoder(HEAD, include_usage=False, running_usage=False)
    (last,) = events(encoder.finish(FinishReason.STOP, Usage(1, 1), 'E"'))
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("stop", 'E"')
    body = orjson.loads(encode_body(HEAD, [Choice("a", FinishReason.STOP, stop='E"')], Usage(1, 1)))
    assert body["choices"][0]["stop_reason"] == 'E"'


def test_whole_bodies() -> None:
    body = orjson.loads(encode_body(HEAD, [Choice("hi", FinishReason.STOP)], Usage(2, 1)))
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hi", "refusal": None}
    assert body["usage"]["total_tokens"] == 3
    body = orjson.loads(encode_body(TEXT_HEAD, [Choice("hi", FinishReason.LENGTH)], Usage(2, 1)))
    assert body["choices"][0]["text"] == "hi"
    assert body["choices"][0]["finish_reason"] == "length"
