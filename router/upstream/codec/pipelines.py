"""…/infer of a tier's pipeline from its other end: calls into bodies, replies into tensors, all as bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import orjson

from router.base.errors import InvalidRequest, ReplicaFailed
from router.base.json_input import UNREADABLE
from router.values.chunk import FinishReason, Origin, TokenChunk
from router.values.task import TensorCall
from router.values.tensors import NamedTensor, Signature, Tensors, TensorSpec
from router.wire.headers import whole_number
from router.wire.kserve.request import HEADER_LENGTH
from router.wire.kserve.tensors import check_datatype, element_bytes, from_bytes


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1, max_length=8)]
    parameters: dict[str, Any]


class _Reply(msgspec.Struct):
    outputs: list[_Output]


_decoder = msgspec.json.Decoder(_Reply)


def path_of(model: str) -> str:
    """Return where a model is asked."""
    return f"/v2/models/{quote(model, safe='')}/infer"


def encode_call(call: TensorCall) -> tuple[bytes, tuple[str, str]]:
    """Return the body of a request, and the header that tells how long its JSON part is."""
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in call.tensors
    ]
    head = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    return b"".join([head, *(tensor.data for tensor in call.tensors)]), (HEADER_LENGTH, str(len(head)))


@dataclass(frozen=True, slots=True)
class Asked:
    """What a reply has to fit; `who` was asked."""

    signature: Signature | None
    rows: int
    who: str


def decode_answer(body: bytes, header_length: str, asked: Asked, origin: Origin | None) -> TokenChunk:
    """Read a reply.

    Args:
        header_length: value of `Inference-Header-Content-Length`; empty where there is none.

    Raises:
        ReplicaFailed: it is none, or holds other tensors than the model returns.
    """
    rows, who, wanted = asked.rows, asked.who, () if asked.signature is None else asked.signature.outputs
    length = whole_number(header_length, len(body))
    at = len(body) if length is None else length
    try:
        tensors = _tensors(_decoder.decode(body[:at]), memoryview(body)[at:])
    except (*UNREADABLE, InvalidRequest) as error:
        raise ReplicaFailed(f"{who}: no answer with tensors: {error}") from None
    by_name = {tensor.name: tensor for tensor in tensors}
    wrong = [str(spec) for spec in wanted if not _fits(by_name.get(spec.name), spec, rows)]
    if wrong:
        raise ReplicaFailed(f"{who}: its answer to {rows} inputs lacks {', '.join(wrong)}, or has it in another form")
    return TokenChunk(
        "", tokens=1, finish_reason=FinishReason.STOP, prompt_tokens=rows, origin=origin, output=Tensors(tensors)
    )


def _tensors(told: _Reply, binary: memoryview) -> tuple[NamedTensor, ...]:
    found = []
    for output in told.outputs:
        check_datatype(output.datatype, output.name[:80])
        size = output.parameters.get("binary_data_size")
        if type(size) is not int or not 0 <= size <= len(binary):
            raise InvalidRequest(f"`{output.name[:80]}` says no size of data that is there")
        data, binary = binary[:size], binary[size:]
        count = math.prod(output.shape)
        if output.datatype == "BYTES":
            from_bytes(data, output.datatype, count, output.name[:80])
        elif size != count * element_bytes(output.datatype):
            raise InvalidRequest(f"`{output.name[:80]}` has {size} bytes, not those of {count} elements")
        found.append(NamedTensor(output.name, output.datatype, tuple(output.shape), bytes(data)))
    return tuple(found)


def _fits(tensor: NamedTensor | None, spec: TensorSpec, rows: int) -> bool:
    return (
        tensor is not None
        and tensor.datatype == spec.datatype
        and tensor.shape[0] == rows
        and spec.holds(tensor.shape[1:])
    )
