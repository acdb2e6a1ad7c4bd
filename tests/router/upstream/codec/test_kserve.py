"""Requests to a V2 model and its answers, as bytes: three kinds of inputs, three endpoints, and what can go wrong."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import ContextTooLong, InvalidRequest, ModelNotFound, ReplicaFailed, Shed, Unavailable
from router.upstream.codec.events import Event
from router.upstream.codec.kserve import KServeCodec
from router.upstream.codec.kserve_model import Metadata, TensorSpec, TextModel, TritonConfig, text_model
from router.upstream.settings import KServeSettings
from router.values.chunk import FinishReason
from router.values.prompt import ChatPrompt, Message, TextPrompt, TokenPrompt
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams

CHUNKED = {"transfer-encoding": "chunked"}
WINDOW = 100


def specs(text: str) -> list[TensorSpec]:
    found = []
    for item in text.split():
        name, _, datatype = item.partition(":")
        found.append(TensorSpec(name, datatype or "BYTES", (-1, -1) if name == "stop_words" else (1,)))
    return found


def model(
    inputs: str = "text_input", outputs: str = "text_output", *, endpoint: Any = "generate_stream", **settings
) -> TextModel:
    told = Metadata(specs(inputs), specs(outputs))
    found = text_model("m n", told, TritonConfig(), KServeSettings(endpoint=endpoint, **settings), streams=True)
    assert found is not None
    return found


def ask(prompt: object = TextPrompt("one two"), continuation: str = "", **sampling) -> InferenceRequest:
    return InferenceRequest(
        request_id="r-1",
        model="m",
        prompt=prompt,  # type: ignore[arg-type]
        sampling=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling}),
        objective=Objective(),
        prompt_tokens=10,
        accepted_at_s=0.0,
        continuation=continuation,
        continuation_tokens=len(continuation.split()),
    )


def body(codec: KServeCodec, request: InferenceRequest) -> dict[str, Any]:
    return json.loads(codec.encode(request, WINDOW).body)


def events(found: TextModel, pieces: list[bytes], headers: dict[str, str] | None = None, **sampling) -> list[Event]:
    parser = KServeCodec(found).parser(ask(**sampling), WINDOW, CHUNKED if headers is None else headers)
    got = [event for piece in pieces for event in parser.feed(piece)]
    return [*got, *parser.end()]


def text_of(got: list[Event]) -> str:
    return "".join(event.told()[0] for event in got)


def tokens_of(got: list[Event]) -> int:
    assert got[-1].usage is not None
    return got[-1].usage.completion_tokens


def stream(*texts: str) -> bytes:
    return b"".join(
        b"data: " + json.dumps({"model_name": "m", "text_output": text}).encode() + b"\n\n" for text in texts
    )


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_that_declares_nothing_gets_parameters() -> None:
    post = KServeCodec(model()).encode(ask(temperature=0.5, continuation=" three", stop=("x",)), WINDOW)
    assert post.path == "/v2/models/m%20n/generate_stream"
    assert json.loads(post.body) == {
        "text_input": "one two three",
        "parameters": {"max_tokens": 7, "temperature": 0.5},
    }


def test_a_vllm_backend_gets_its_sampling_as_json() -> None:
    codec = KServeCodec(
        model("text_input sampling_parameters stream:BOOL exclude_input_in_output:BOOL return_num_output_tokens:BOOL")
    )
    sent = body(codec, ask(top_k=5, seed=3, stop=("a", "b"), ignore_eos=True))
    assert json.loads(sent.pop("sampling_parameters")) == {
        "max_tokens": 8,
        "temperature": 0.0,
        "top_k": 5,
        "seed": 3,
        "stop": ["a", "b"],
        "ignore_eos": True,
    }
    assert sent == {
        "text_input": "one two",
        "stream": True,
        "exclude_input_in_output": True,
        "return_num_output_tokens": True,
        "parameters": {},
    }


TRT_LLM = (
    "text_input max_tokens:INT32 stop_words top_k:INT32 top_p:FP32 temperature:FP32 random_seed:UINT64 "
    "beam_width:INT32 stream:BOOL"
)


def test_tensorrt_llm_is_greedy_by_its_top_k() -> None:
    assert body(KServeCodec(model(TRT_LLM)), ask(stop=("a", "b"))) == {
        "text_input": "one two",
        "max_tokens": 8,
        "top_k": 1,
        "stop_words": ["a", "b"],
        "stream": True,
        "parameters": {},
    }


def test_tensorrt_llm_is_told_to_sample_from_all() -> None:
    sent = body(KServeCodec(model(TRT_LLM)), ask(temperature=1, seed=7))
    assert (sent["temperature"], sent["top_p"], sent["random_seed"]) == (1.0, 1.0, 7)
    assert "top_k" not in sent


def test_infer_gets_tensors_in_the_shapes_that_the_metadata_tells() -> None:
    found = model("text_input max_tokens:INT32 stop_words", "text_output num_output_tokens:INT32", endpoint="infer")
    assert body(KServeCodec(found), ask(stop=("a", "b"))) == {
        "id": "r-1",
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["one two"]},
            {"name": "max_tokens", "datatype": "INT32", "shape": [1], "data": [8]},
            {"name": "stop_words", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "b"]},
        ],
        "outputs": [{"name": "text_output"}, {"name": "num_output_tokens"}],
        "parameters": {"temperature": 0.0},
    }


def test_an_answer_without_a_cap_may_fill_the_window() -> None:
    assert body(KServeCodec(model()), ask(max_tokens=None))["parameters"]["max_tokens"] == WINDOW - 10


def test_a_conversation_is_rendered_where_that_can_be() -> None:
    chat = ask(ChatPrompt((Message("user", "hi"),)), continuation="well")
    codec = KServeCodec(model(), lambda prompt, so_far: f"<{prompt.messages[0].content}>{so_far}")
    assert body(codec, chat)["text_input"] == "<hi>well"
    with pytest.raises(InvalidRequest, match="its chat template is not known here"):
        KServeCodec(model()).encode(chat, WINDOW)
    with pytest.raises(InvalidRequest, match="takes text, not ids"):
        codec.encode(ask(TokenPrompt((1, 2))), WINDOW)


def test_what_json_cannot_hold_is_the_request_s_fault() -> None:
    with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
        KServeCodec(model()).encode(ask(TextPrompt("\ud800")), WINDOW)


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.text(max_size=6), max_size=6), st.lists(st.integers(0, 400), max_size=8))
def test_however_the_bytes_are_cut_the_text_is_the_same(texts: list[str], cuts: list[int]) -> None:
    data = stream(*texts)
    at = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[one:other] for one, other in itertools.pairwise(at)]
    got = events(model(), pieces)
    assert text_of(got) == "".join(texts)
    assert [event.finish_reason for event in got if event.finish_reason] == [FinishReason.STOP]
    assert got[-1].done


def test_as_many_tokens_as_asked_for_were_cut_there() -> None:
    got = events(model(), [stream("a", "b", "c")], max_tokens=3)
    assert got[-1].finish_reason is FinishReason.LENGTH
    assert tokens_of(got) == 3


def test_counts_and_reasons_are_believed_where_they_are_told() -> None:
    pieces = [
        {"text_output": ["one two"], "num_output_tokens": [2], "finish_reason": ["None"]},
        {"text_output": ["."], "num_output_tokens": [1], "finish_reason": ["length"]},
    ]
    got = events(model(), [b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces])
    assert text_of(got) == "one two."
    assert tokens_of(got) == 3
    assert got[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("count", [-1, 10**9, 2.5, "3", True, None])
def test_a_count_that_cannot_be_is_not_believed(count: object) -> None:
    piece = json.dumps({"text_output": "one", "num_output_tokens": count}).encode()
    assert tokens_of(events(model(), [b"data: " + piece + b"\n\n"])) == 1


def test_an_answer_in_one_piece_is_counted_by_its_size() -> None:
    whole = json.dumps({"text_output": " and so it goes on for a while"}).encode()
    got = events(model(endpoint="generate"), [whole[:9], whole[9:]], {"content-length": "1"}, max_tokens=50)
    assert text_of(got) == " and so it goes on for a while"
    assert 5 <= tokens_of(got) <= 12
    assert got[-1].finish_reason is FinishReason.STOP


def test_infer_answers_with_tensors() -> None:
    outputs = [
        {"name": "num_output_tokens", "datatype": "INT32", "shape": [1], "data": [3]},
        {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["x y z"]},
    ]
    got = events(model(endpoint="infer"), [json.dumps({"outputs": outputs}).encode()], max_tokens=3)
    assert (text_of(got), tokens_of(got), got[-1].finish_reason) == ("x y z", 3, FinishReason.LENGTH)


def test_stop_strings_are_kept_here() -> None:
    got = events(model(), [stream("one s", "to", "p two")], stop=("stop",))
    assert text_of(got) == "one "
    assert got[-1].finish_reason is FinishReason.STOP
    assert got[-1].cut


def test_what_only_began_like_a_stop_string_is_not_lost() -> None:
    assert text_of(events(model(), [stream("one st")], stop=("stop",))) == "one st"


def test_a_stream_that_repeats_what_came_before_is_told_once() -> None:
    got = events(model(accumulates=True), [stream("one", "one two", "one two three")])
    assert text_of(got) == "one two three"


def test_a_prompt_that_is_repeated_is_no_answer() -> None:
    assert text_of(events(model(echoes=True), [stream("one two", " three")])) == " three"
    assert text_of(events(model(echoes=True), [stream("not so")])) == "not so"


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (b'data: {"error":"out of memory"}\n\n', "out of memory"),
        (b"data: {}\n\n", "without the output `text_output`"),
        (b'data: {"text_output":3}\n\n', "without the output"),
        (b"data: [1]\n\n", "without the output"),
        (b"data: {\n\n", "without the output"),
        (b"data: " + b"[" * 5000 + b"\n\n", "without the output"),
        (b"data: \xff\xfe\n\n", "without the output"),
    ],
)
def test_what_is_no_answer_is_an_error(payload: bytes, named: str) -> None:
    got = events(model(), [stream("one"), payload, stream("two")])
    assert text_of(got) == "one"
    assert named in str(got[-1].error_message)
    assert not any(event.finish_reason for event in got)


def test_an_error_in_a_body_that_says_200_is_one() -> None:
    got = events(model(endpoint="generate"), [b'{"error":"generate expects model to produce exactly 1 response"}'])
    assert "exactly 1 response" in str(got[-1].error_message)


def test_a_body_without_an_end_of_its_own_is_never_whole() -> None:
    got = events(model(), [stream("one")], {})
    assert "does not tell whether the answer is whole" in str(got[-1].error_message)


def test_an_event_without_an_end_is_bounded() -> None:
    parser = KServeCodec(model()).parser(ask(), WINDOW, CHUNKED)
    got = [event for _ in range(40) for event in parser.feed(b"x" * 200_000)]
    assert [str(event.error_message) for event in got] == ["an answer of more than 4194304 bytes in one piece"]


@pytest.mark.parametrize(
    ("status", "told", "kind"),
    [
        (400, '{"error":"it fails"}', ReplicaFailed),
        (400, 'data: {"error":"it fails"}', ReplicaFailed),
        (400, '{"error":"prompt length (9000) exceeds maximum input length (8192)"}', ContextTooLong),
        (401, "", ReplicaFailed),
        (404, '{"error":"Request for unknown model"}', ModelNotFound),
        (429, "", Shed),
        (500, "[1, 2]", ReplicaFailed),
        (503, '{"error":"Exceeds maximum queue size"}', Unavailable),
    ],
)
def test_a_refusal_of_triton(status: int, told: str, kind: type[Exception]) -> None:
    error = KServeCodec(model()).decode_error(status, {}, told.encode(), "backend t")
    assert type(error) is kind
    assert "backend t" in error.message


def test_another_server_s_400_is_the_request_s_fault() -> None:
    codec = KServeCodec(model(), triton=False)
    assert type(codec.decode_error(422, {}, b'{"detail":"no"}', "b")) is InvalidRequest
    assert type(codec.decode_error(404, {}, b"", "b")) is ReplicaFailed
