"""…/infer of a tier above from its other end: what it tells is checked before it is believed."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec
import pytest

from router.base.errors import InvalidRequest, ReplicaFailed
from router.upstream.codec.pipelines import Asked, decode_answer, encode_call, path_of
from router.upstream.servers.rungs import read_rungs
from router.values.task import Task, TensorCall
from router.values.tensors import NamedTensor, Signature, Tensors, TensorSpec
from router.wire.kserve.arrays import array_infer, encode_array_infer
from router.wire.kserve.request import read_parts

SIGNATURE = Signature(
    (TensorSpec("image", "BYTES", (1,)), TensorSpec("size", "INT64", (-1,))), (TensorSpec("boxes", "FP32", (-1, 4)),)
)
CALL = TensorCall(
    (
        NamedTensor("image", "BYTES", (2, 1), b"\x01\0\0\0a\x02\0\0\0bc"),
        NamedTensor("size", "INT64", (2, 3), bytes(48)),
    )
)
BOXES = NamedTensor("boxes", "FP32", (2, 1, 4), bytes(range(32)))


def test_a_call_and_its_answer_come_over_whole() -> None:
    body, (name, length) = encode_call(CALL)
    assert name == "inference-header-content-length"
    there = array_infer(read_parts(body, length), SIGNATURE)
    assert there.call == CALL
    reply = encode_array_infer("m", there, Tensors((BOXES,)))
    chunk = decode_answer(reply.body, str(reply.header_length), Asked(SIGNATURE, 2, "up"), None)
    assert chunk.output == Tensors((BOXES,))
    assert chunk.finish_reason is not None
    assert path_of("a b/c") == "/v2/models/a%20b%2Fc/infer"


@pytest.mark.parametrize("dimensions", [[1, 0, 1 << 62, 3], [1, 0, 1 << 70, 3], [1, 1 << 20, 0, 3]])
def test_a_tensor_of_nothing_has_bounds_too(dimensions: list[int]) -> None:
    """An array of no elements may still be none that can be made: that is its caller's fault, not the pipeline's."""
    signature = Signature((TensorSpec("pixels", "UINT8", (-1, -1, 3)),), ())
    told = {"name": "pixels", "shape": dimensions, "datatype": "UINT8", "parameters": {"binary_data_size": 0}}
    head = json.dumps({"inputs": [told]}).encode()
    with pytest.raises(InvalidRequest, match=r"`inputs\[0\]\.shape`"):
        array_infer(read_parts(head, str(len(head))), signature)


@pytest.mark.parametrize(
    "output",
    [
        {"name": "boxes", "datatype": "FP32", "shape": [3, 1, 4], "parameters": {"binary_data_size": 48}},
        {"name": "boxes", "datatype": "FP32", "shape": [2, 1, 4], "parameters": {"binary_data_size": 31}},
        {"name": "boxes", "datatype": "FP32", "shape": [2, 1, 4], "parameters": {"binary_data_size": 10**9}},
        {"name": "boxes", "datatype": "FP64", "shape": [2, 1, 4], "parameters": {"binary_data_size": 64}},
        {"name": "boxes", "datatype": "FP99", "shape": [2, 1, 4], "parameters": {"binary_data_size": 32}},
        {"name": "other", "datatype": "FP32", "shape": [2, 1, 4], "parameters": {"binary_data_size": 32}},
        {"name": "boxes", "datatype": "FP32", "shape": [2, -1, 4], "parameters": {"binary_data_size": 32}},
        {"name": "boxes", "datatype": "FP32", "shape": [2, 1, 4], "parameters": {}},
    ],
)
def test_an_answer_that_cannot_be_is_the_server_s_fault(output: dict[str, object]) -> None:
    head = msgspec.json.encode({"outputs": [output]})
    with pytest.raises(ReplicaFailed, match=r"^up: "):
        decode_answer(head + bytes(64), str(len(head)), Asked(SIGNATURE, 2, "up"), None)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff"])
def test_what_is_no_answer_is_the_server_s_fault(body: bytes) -> None:
    with pytest.raises(ReplicaFailed, match=r"^up: "):
        decode_answer(body, "", Asked(SIGNATURE, 2, "up"), None)


def test_a_rung_that_tells_no_tensors_is_left_out() -> None:
    card = {
        "kind": "variant",
        "family": "f",
        "variant": "v",
        "tasks": ["infer"],
        "prior": {"prefill_tokens_per_s": 1, "decode_tokens_per_s": 1},
    }

    def read(told: Mapping[str, object]) -> list[Signature | None]:
        body = msgspec.json.encode({"data": [{"id": "v", "overspill": told}]})
        infos = read_rungs(body, "http://up").infos
        assert all(info.tasks == frozenset({Task.INFER}) for info in infos)
        return [info.signature for info in infos]

    assert read(card) == []
    assert read(card | {"signature": SIGNATURE}) == [SIGNATURE]
