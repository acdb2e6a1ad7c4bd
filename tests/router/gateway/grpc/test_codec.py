"""Whatever a message of gRPC holds, it becomes a body or a refusal that names what is wrong."""

from __future__ import annotations

import contextlib

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import InvalidRequest
from router.gateway.grpc import codec
from router.gateway.grpc.messages import load_messages
from router.wire.kserve.request import decode_infer

MESSAGES = load_messages()
Request = MESSAGES["ModelInferRequest"]
NAMES = st.sampled_from(["text_input", "max_tokens", "stream", "seed", "sampling_parameters", "image", ""]) | st.text(
    max_size=9
)
DATATYPES = st.sampled_from(["BYTES", "INT32", "INT8", "FP16", "FP32", "FP64", "BOOL", "UINT64", "STRING", ""])
FIELDS = {
    "bytes_contents": st.binary(max_size=9),
    "int_contents": st.integers(-(2**31), 2**31 - 1),
    "fp32_contents": st.floats(width=32),
    "fp64_contents": st.floats(),
    "bool_contents": st.booleans(),
    "uint64_contents": st.integers(0, 2**64 - 1),
}
PARAMETERS = {
    "bool_param": st.booleans(),
    "int64_param": st.integers(-(2**63), 2**63 - 1),
    "string_param": st.text(max_size=9),
    "double_param": st.floats(),
    "uint64_param": st.integers(0, 2**64 - 1),
}


@st.composite
def requests(draw: st.DrawFn):
    request = Request(model_name="tiny", id=draw(st.text(max_size=5)))
    for _ in range(draw(st.integers(0, 3))):
        shape = draw(st.lists(st.integers(-2, 3) | st.just(2**62), max_size=3))
        tensor = request.inputs.add(name=draw(NAMES), datatype=draw(DATATYPES), shape=shape)
        field = draw(st.sampled_from(sorted(FIELDS)))
        getattr(tensor.contents, field).extend(draw(st.lists(FIELDS[field], max_size=3)))
    request.raw_input_contents.extend(draw(st.lists(st.binary(max_size=12), max_size=3)))
    for name in draw(st.lists(NAMES, max_size=2)):
        kind = draw(st.sampled_from(sorted(PARAMETERS)))
        setattr(request.parameters[name], kind, draw(PARAMETERS[kind]))
    for name in draw(st.lists(NAMES | st.just("text_output"), max_size=2)):
        request.outputs.add(name=name)
    return request


@given(requests())
def test_any_request_becomes_a_body_or_a_refusal(request) -> None:
    with contextlib.suppress(InvalidRequest):
        body, head_bytes = codec.infer_body(request)
        orjson.loads(body[:head_bytes])
    with contextlib.suppress(InvalidRequest):
        generated = codec.generate_body(request)
        assert generated is None or isinstance(orjson.loads(generated), dict)


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=5))
def test_prompts_arrive_as_they_were_sent_typed_or_raw(prompts: list[str]) -> None:
    typed, raw = Request(), Request()
    for request in (typed, raw):
        request.inputs.add(name="text_input", datatype="BYTES", shape=[len(prompts)])
    elements = [prompt.encode() for prompt in prompts]
    typed.inputs[0].contents.bytes_contents.extend(elements)
    raw.raw_input_contents.append(b"".join(len(e).to_bytes(4, "little") + e for e in elements))
    for request in (typed, raw):
        body, head_bytes = codec.infer_body(request)
        call = decode_infer(body, str(head_bytes))
        assert [prompt.text for prompt in call.prompts] == prompts


def test_a_stream_is_of_one_prompt() -> None:
    request = Request()
    request.inputs.add(name="text_input", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([b"a", b"b"])
    request.parameters["stream"].bool_param = True
    with pytest.raises(InvalidRequest, match="one prompt"):
        codec.generate_body(request)
