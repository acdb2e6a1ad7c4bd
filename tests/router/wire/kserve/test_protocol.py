"""What clients send to a model of any kind is read of all kinds: perf_analyzer asks each for a final response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from router.base.errors import InvalidRequest
from router.values.tensors import Signature, TensorSpec
from router.wire.kserve.arrays import array_infer
from router.wire.kserve.call import CallInfer, InferCall
from router.wire.kserve.embedding import embed_infer
from router.wire.kserve.request import decode_infer, read_infer, read_parts

TEXT = TensorSpec("text_input", "BYTES", (1,))


def body(**parameters: Any) -> bytes:
    text = {"name": TEXT.name, "datatype": TEXT.datatype, "shape": [1, 1], "data": ["hello"]}
    return orjson.dumps({"inputs": [text], "parameters": parameters})


KINDS: list[Callable[[bytes], InferCall | CallInfer]] = [
    lambda said: decode_infer(said, None),
    lambda said: embed_infer(read_infer(said, None)),
    lambda said: array_infer(read_parts(said, None), Signature((TEXT,), (TEXT,))),
]


@pytest.mark.parametrize("read", KINDS)
def test_a_model_of_any_kind_takes_what_the_protocol_has(read: Callable[[bytes], InferCall | CallInfer]) -> None:
    said = body(timeout=2_500_000, sequence_id=0, priority=0, triton_enable_empty_final_response=True)
    assert read(said).deadline_s == 2.5


@pytest.mark.parametrize("read", KINDS)
@pytest.mark.parametrize(
    ("name", "value"), [("priority", 1), ("sequence_id", 7), ("sequence_id", "a"), ("timeout", 0), ("other", 1)]
)
def test_what_nobody_keeps_to_is_named(
    read: Callable[[bytes], InferCall | CallInfer], name: str, value: object
) -> None:
    with pytest.raises(InvalidRequest, match=name):
        read(body(**{name: value}))
