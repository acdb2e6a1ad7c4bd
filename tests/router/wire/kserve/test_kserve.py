"""KServe V2 bodies, JSON and binary, decode strictly; binary tensors are little-endian to the byte."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import InvalidRequest
from router.values.chunk import FinishReason
from router.values.sampling import SamplingParams
from router.values.usage import Usage
from router.wire.kserve.call import InferCall, PromptCall
from router.wire.kserve.generate import decode_generate, encode_generate
from router.wire.kserve.reply import Row, encode_infer
from router.wire.kserve.request import decode_infer
from router.wire.kserve.tensors import Tensor, element_count, from_bytes, from_json, to_bytes, to_json


def text_input(**changes) -> dict:
    return {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"], **changes}


def infer(*more: dict, text: dict | None = None, **fields) -> InferCall:
    return decode_infer(orjson.dumps({"inputs": [text or text_input(), *more], **fields}), None)


def tensor(name: str, datatype: str, value: object) -> dict:
    return {"name": name, "datatype": datatype, "shape": [1], "data": [value]}


def test_the_least_request() -> None:
    call = infer()
    assert call == InferCall(None, (PromptCall("hello", SamplingParams(max_tokens=16)),), (1,))


def test_nested_data_and_ids() -> None:
    call = infer(text=text_input(shape=[1, 1], data=[["hello"]]), id="7")
    assert (call.text, call.call_id) == ("hello", "7")


def test_parameters_come_by_three_ways() -> None:
    expected = SamplingParams(max_tokens=5, temperature=0.5, top_k=3, stop=("x",), seed=9, ignore_eos=True)
    values = {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "stop": "x", "seed": 9, "ignore_eos": True}
    assert infer(parameters=values).prompts[0].sampling == expected
    kinds = {int: "INT32", float: "FP32", str: "BYTES", bool: "BOOL"}
    assert infer(*(tensor(n, kinds[type(v)], v) for n, v in values.items())).prompts[0].sampling == expected
    assert infer(tensor("sampling_parameters", "BYTES", orjson.dumps(values).decode())).prompts[0].sampling == expected
    strings = {"max_tokens": "5", "temperature": "0.5", "top_k": "3", "stop": "x", "seed": "9", "ignore_eos": "true"}
    assert infer(tensor("sampling_parameters", "BYTES", orjson.dumps(strings).decode())).prompts[0].sampling == expected


def test_the_protocols_own_parameters() -> None:
    call = infer(parameters={"timeout": 2_500_000, "binary_data_output": True, "sequence_id": 0, "priority": 0})
    assert call.deadline_s == 2.5
    assert call.outputs == (("text_output", True),)
    wanted = [{"name": "text_output"}, {"name": "num_output_tokens", "parameters": {"binary_data": False}}]
    assert infer(outputs=wanted).outputs == (("text_output", False), ("num_output_tokens", False))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"parameters": {"max_tokens": -1}}, "max_tokens"),
        ({"parameters": {"max_tokens": "5"}}, "max_tokens"),
        ({"parameters": {"temperature": 3}}, "temperature"),
        ({"parameters": {"max_token": 3}}, "max_token"),
        ({"parameters": {"stream": 1}}, "stream"),
        ({"parameters": {"priority": 1}}, "x-overspill-priority"),
        ({"parameters": {"sequence_id": 5}}, "sequence_id"),
        ({"parameters": {"timeout": -5}}, "timeout"),
        ({"parameters": {"stop": ["a"] * 33}}, "stop"),
        ({"parameters": {"stop": ["a", ""]}}, "stop[1]"),
        ({"parameters": {"stop": "x" * 4097}}, "4097 characters, expected 1 to 4096"),
        ({"parameters": {"stop": ["x" * 4097]}}, "stop[0]"),
        ({"inputs": [text_input(), tensor("stop", "BYTES", "x" * 4097)]}, "4097 characters"),
        ({"parameters": {"x" * 100_000: 1}}, "known parameters: max_tokens"),
        ({"inputs": [text_input(), tensor("max_tokens", "INT32", 0)]}, "`max_tokens` = 0: Expected"),
        ({"parameters": {"max_tokens": 0}}, "`parameters.max_tokens` = 0: Expected"),
        ({"inputs": [text_input(shape=[9] * 10_000)]}, "10000 dimensions"),
        ({"inputs": [text_input()] * 65}, "inputs"),
        ({"outputs": [{"name": "text_output"}] * 65}, "outputs"),
        ({"inputs": [text_input(parameters={"binary_data_size": "9" * 100_000})]}, "binary_data_size"),
        ({"parameters": []}, "parameters"),
        ({"outputs": [{"name": "logits"}]}, "outputs[0].name"),
        ({"outputs": [{"name": "text_output", "parameters": {"binary_data": 1}}]}, "binary_data"),
        ({"outputs": [{}]}, "outputs[0].name"),
        ({"id": 3}, "id"),
        ({"inputs": []}, "text_input"),
        ({"inputs": "x"}, "inputs"),
        ({"inputs": [text_input(), text_input()]}, "inputs"),
        ({"inputs": [text_input(shape=[1, 2], data=["a", "b"])]}, "expected [N] or [N, 1]"),
        ({"inputs": [text_input(shape=[0], data=[])]}, "expected [N] or [N, 1]"),
        ({"inputs": [text_input(shape=[300], data=["a"] * 300)]}, "1 to 256 prompts"),
        ({"inputs": [text_input(shape=[2], data=["a", ""])]}, "`text_input[1]` is empty"),
        ({"inputs": [text_input(), {**tensor("seed", "INT64", 1), "shape": [3], "data": [1, 2, 3]}]}, "one element"),
        ({"inputs": [text_input(shape=[2])]}, "inputs[0].data"),
        ({"inputs": [text_input(shape=[-1])]}, "inputs[0].shape"),
        ({"inputs": [text_input(shape=[1 << 40])]}, "inputs[0].shape"),
        ({"inputs": [text_input(shape=["1"])]}, "inputs[0].shape[0]"),
        ({"inputs": [text_input(datatype="STRING")]}, "inputs[0].datatype"),
        ({"inputs": [text_input(datatype="INT32", data=[3])]}, "text_input"),
        ({"inputs": [text_input(data=[3])]}, "inputs[0].data[0]"),
        ({"inputs": [text_input(data=[""])]}, "text_input"),
        ({"inputs": [text_input(data=None)]}, "inputs[0].data"),
        ({"inputs": [text_input(parameters={"binary_data_size": 5})]}, "binary_data_size"),
        ({"inputs": [text_input(parameters={"binary_data_size": "5"})]}, "binary_data_size"),
        ({"inputs": [text_input(), tensor("image", "FP32", 1.0)]}, "image"),
        ({"inputs": [text_input(), tensor("max_tokens", "INT32", 2**40)]}, "inputs[1].data[0]"),
        ({"inputs": [text_input(), tensor("max_tokens", "FP32", 1.5)]}, "max_tokens"),
        ({"inputs": [text_input(), tensor("sampling_parameters", "BYTES", "{")]}, "sampling_parameters"),
        ({"inputs": [text_input(), tensor("sampling_parameters", "BYTES", "[]")]}, "sampling_parameters"),
        ({"inputs": [text_input(), tensor("sampling_parameters", "BYTES", '{"n":2}')]}, "sampling_parameters"),
    ],
)
def test_what_is_wrong_is_named(fields: dict, named: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode_infer(orjson.dumps({"inputs": [text_input()], **fields}), None)
    assert named in raised.value.message
    assert len(raised.value.message) < 500


@pytest.mark.parametrize("digits", [25, 400, 5000])
def test_numbers_of_many_digits_are_named_too(digits: int) -> None:
    for name, kind in (("temperature", "FP32"), ("top_k", "INT32"), ("seed", "INT64")):
        body = orjson.dumps({"inputs": [text_input(), tensor(name, kind, 1)]})
        with pytest.raises(InvalidRequest) as raised:
            decode_infer(body.replace(b"[1]}]}", b"[%s]}]}" % (b"9" * digits)), None)
        assert len(raised.value.message) < 200


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "+5", "5_0", "٥", "²", "", "1e2", "0x10"])
def test_a_header_length_that_is_none(length: str) -> None:
    with pytest.raises(InvalidRequest, match="inference-header-content-length"):
        decode_infer(orjson.dumps({"inputs": [text_input()]}), length)


def binary(payload: bytes, **changes) -> tuple[bytes, str]:
    entry = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(payload)}}
    head = orjson.dumps({"inputs": [{**entry, **changes}]})
    return head + payload, str(len(head))


def test_binary_input() -> None:
    assert decode_infer(*binary(b"\x05\0\0\0hello")).text == "hello"


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x05\0\0", b"\x06\0\0\0hello", b"\x05\0\0\0hellox", b"\xff\xff\xff\xffhello", b"\x02\0\0\0\xff\xfe"],
)
def test_binary_input_that_does_not_add_up(payload: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_infer(*binary(payload))


@pytest.mark.parametrize("length", ["-1", "x", "99999", "", "1.5", "²"])
def test_a_wrong_header_length(length: str) -> None:
    with pytest.raises(InvalidRequest, match="inference-header-content-length"):
        decode_infer(binary(b"\x05\0\0\0hello")[0], length)


def test_bytes_after_the_last_tensor_are_refused() -> None:
    body, length = binary(b"\x05\0\0\0hello")
    with pytest.raises(InvalidRequest, match="1 bytes follow"):
        decode_infer(body + b"x", length)


def test_output_as_json_and_as_bytes() -> None:
    usage = Usage(3, 2)
    reply = encode_infer("tiny", infer(id="7"), [Row("Grüße", FinishReason.STOP, usage)])
    assert reply.header_length is None
    assert orjson.loads(reply.body) == {
        "model_name": "tiny",
        "model_version": "1",
        "id": "7",
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["Grüße"]}],
    }
    wanted = [
        {"name": "text_output", "parameters": {"binary_data": True}},
        {"name": "finish_reason"},
        {"name": "num_output_tokens", "parameters": {"binary_data": True}},
    ]
    call = infer(outputs=wanted, parameters={"exclude_input_in_output": False})
    reply = encode_infer("tiny", call, [Row(" there", FinishReason.LENGTH, usage)])
    head = orjson.loads(reply.body[: reply.header_length])
    assert [output["name"] for output in head["outputs"]] == ["text_output", "finish_reason", "num_output_tokens"]
    assert head["outputs"][1]["data"] == ["length"]
    assert reply.body[reply.header_length :] == b"\x0b\0\0\0hello there" + b"\x02\0\0\0"


def test_a_batch_has_one_shape_and_its_parameters_are_of_all_or_of_each() -> None:
    seeds = {"name": "seed", "datatype": "INT64", "shape": [3, 1], "data": [1, 2, 3]}
    call = infer(seeds, tensor("top_k", "INT32", 5), text=text_input(shape=[3, 1], data=["a", "b", "c"]))
    assert [prompt.text for prompt in call.prompts] == ["a", "b", "c"]
    assert [(p.sampling.seed, p.sampling.top_k) for p in call.prompts] == [(1, 5), (2, 5), (3, 5)]
    rows = [Row("x", FinishReason.STOP, Usage(1, 1)), Row.failed("the queue is full"), Row("z", None, Usage(1, 2))]
    outputs = orjson.loads(encode_infer("tiny", call, rows).body)["outputs"]
    assert [(output["name"], output["shape"], output["data"]) for output in outputs] == [
        ("text_output", [3, 1], ["x", "", "z"]),
        ("error", [3, 1], ["", "the queue is full", ""]),
    ]
    with pytest.raises(InvalidRequest, match="`stream`: differs"):
        infer(
            {"name": "stream", "datatype": "BOOL", "shape": [2], "data": [True, False]},
            text=text_input(shape=[2], data=["a", "b"]),
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 5, "top_k": 3, "stop": "x"},
        {"parameters": {"max_tokens": 5, "top_k": 3, "stop": ["x"]}},
        {"sampling_parameters": {"max_tokens": "5", "top_k": 3, "stop": "x"}},
        {"sampling_parameters": '{"max_tokens": 5, "top_k": 3, "stop": "x"}'},
    ],
)
def test_generate_takes_parameters_at_the_top_and_below(fields: dict) -> None:
    call = decode_generate(orjson.dumps({"text_input": "hello", "id": "7", **fields}))
    assert (call.prompts, call.call_id) == (
        (PromptCall("hello", SamplingParams(max_tokens=5, top_k=3, stop=("x",))),),
        "7",
    )
    row = Row("there", FinishReason.STOP, Usage(1, 1))
    assert orjson.loads(encode_generate("tiny", call, row)) == {
        "model_name": "tiny",
        "model_version": "1",
        "id": "7",
        "text_output": "there",
    }


def test_outputs_are_asked_for_by_inputs_too_as_tritons_vllm_backend_has_them() -> None:
    flags = {"return_finish_reason": True, "return_num_output_tokens": True, "return_num_input_tokens": False}
    wanted = ["text_output", "finish_reason", "num_output_tokens"]
    assert [name for name, _ in infer(parameters=flags).outputs] == wanted
    assert [name for name, _ in infer(*(tensor(n, "BOOL", v) for n, v in flags.items())).outputs] == wanted
    assert [name for name, _ in infer(parameters=flags, outputs=[{"name": "finish_reason"}]).outputs] == wanted[1:]
    generated = decode_generate(orjson.dumps({"text_input": "hello", **flags}))
    assert [name for name, _ in generated.outputs] == wanted


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_token": 5}, "max_token"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"text_input": ""}, "text_input"),
        ({"text_input": ["a", "b"]}, "text_input"),
        ({"outputs": ["logits"]}, "outputs[0]"),
        ({"locality": "local-only"}, "x-overspill-locality"),
        ({"parameters": {"locality": "local-only"}}, "locality"),
        ({"sampling_parameters": [1]}, "sampling_parameters"),
        ({"sampling_parameters": 2**64}, "sampling_parameters"),
        ({"sampling_parameters": {"seed": 2**64}}, "sampling_parameters"),
    ],
)
def test_what_generate_does_not_read_is_named(fields: dict, named: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode_generate(json.dumps({"text_input": "hello", **fields}).encode())
    assert named in raised.value.message


INTEGERS = {"INT8": (-128, 127), "INT64": (-(2**63), 2**63 - 1), "UINT8": (0, 255), "UINT64": (0, 2**64 - 1)}


@given(st.sampled_from(sorted(INTEGERS)).flatmap(lambda d: st.tuples(st.just(d), st.lists(st.integers(*INTEGERS[d])))))
def test_integers_survive_both_forms(given_tensor: tuple[str, list[int]]) -> None:
    datatype, values = given_tensor
    one = Tensor("t", datatype, (len(values),), tuple(values))
    assert from_bytes(memoryview(to_bytes(one)), datatype, len(values), "t") == one.elements
    assert from_json(to_json(one), datatype, len(values), "t") == one.elements


@given(st.lists(st.binary()))
def test_strings_survive_the_binary_form(values: list[bytes]) -> None:
    one = Tensor("t", "BYTES", (len(values),), tuple(values))
    assert from_bytes(memoryview(to_bytes(one)), "BYTES", len(values), "t") == one.elements


@given(st.lists(st.booleans()), st.lists(st.floats(width=16, allow_nan=False)))
def test_booleans_and_floats_survive_the_binary_form(flags: list[bool], floats: list[float]) -> None:
    one = Tensor("t", "BOOL", (len(flags),), tuple(flags))
    assert len(to_bytes(one)) == len(flags)
    assert from_bytes(memoryview(to_bytes(one)), "BOOL", len(flags), "t") == one.elements
    for datatype in ("FP16", "FP32", "FP64"):
        one = Tensor("t", datatype, (len(floats),), tuple(floats))
        assert from_bytes(memoryview(to_bytes(one)), datatype, len(floats), "t") == one.elements


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_are_decoded_or_refused(noise: bytes, length: int) -> None:
    for header_length in (None, str(length)):
        with pytest.raises(InvalidRequest):
            decode_infer(noise, header_length)


def test_dimensions_of_thousands_of_digits_are_refused_without_being_written_out() -> None:
    with pytest.raises(InvalidRequest, match="dimension above"):
        element_count([10**4000, 10**4000], "inputs[0]")
