"""V2 inference of a pipeline: its own tensors in and out, whatever they mean, as bytes wherever they come as bytes.

A request holds every input of the model once; the first dimension of each counts the inputs. A reply's outputs have one
row for each.
"""

from __future__ import annotations

import math

from router.base.errors import InvalidRequest
from router.values.task import TensorCall
from router.values.tensors import MAX_ROWS, NamedTensor, Signature, Tensors, TensorSpec
from router.wire.kserve.call import CallInfer, asked_outputs
from router.wire.kserve.protocol import ProtocolFields, read_fields
from router.wire.kserve.reply import InferReply, Output, encode_outputs
from router.wire.kserve.request import InferInput, InferParts, cut, nothing_left
from router.wire.kserve.tensors import (
    MAX_DIMENSIONS,
    Tensor,
    check_datatype,
    element_bytes,
    element_count,
    from_bytes,
    from_json,
    to_bytes,
    to_json,
)


def array_infer(parts: InferParts, signature: Signature) -> CallInfer:
    """Make sense of a request to a pipeline.

    Raises:
        InvalidRequest: naming the tensor or parameter at fault.
    """
    known = {spec.name: spec for spec in signature.inputs}
    found: dict[str, NamedTensor] = {}
    binary = parts.binary
    for index, raw in enumerate(parts.inputs):
        at = f"inputs[{index}]"
        spec = known.get(raw.name)
        if spec is None or raw.name in found:
            what = "there already" if spec else "no input of this model"
            listed = ", ".join(map(str, signature.inputs))
            raise InvalidRequest(f"`{at}.name`: `{raw.name[:80]}` is {what}; it takes: {listed}", param=f"{at}.name")
        data = cut(raw, binary, at)
        found[raw.name] = _tensor(raw, spec, data, at)
        binary = binary[0 if data is None else len(data) :]
    nothing_left(binary)
    missing = [str(spec) for spec in signature.inputs if spec.name not in found]
    if missing:
        raise InvalidRequest(f"`inputs`: missing: {', '.join(missing)}", param="inputs")
    read = read_fields(parts.parameters, ProtocolFields)
    known_outputs = [spec.name for spec in signature.outputs]
    asked = asked_outputs(parts.outputs, known_outputs, binary=read.binary_data_output)
    return CallInfer(
        parts.call_id,
        TensorCall(_alike(tuple(found[spec.name] for spec in signature.inputs))),
        read.timeout_s,
        tuple(asked or ((name, read.binary_data_output) for name in known_outputs)),
    )


def _alike(tensors: tuple[NamedTensor, ...]) -> tuple[NamedTensor, ...]:
    """Check that all tensors hold as many inputs."""
    rows = {tensor.name: tensor.shape[0] for tensor in tensors}
    if len(set(rows.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise InvalidRequest(f"`inputs`: the first dimension counts inputs, and they differ: {told}", param="inputs")
    return tensors


def _tensor(raw: InferInput, spec: TensorSpec, data: memoryview | None, at: str) -> NamedTensor:
    check_datatype(raw.datatype, at)
    shape = tuple(raw.shape)
    if raw.datatype != spec.datatype or not shape or not spec.holds(shape[1:]) or not 1 <= shape[0] <= MAX_ROWS:
        got = f"{raw.datatype[:40]}{list(shape)[:MAX_DIMENSIONS]}"
        raise InvalidRequest(
            f"`{raw.name}`: {got}, expected {spec.datatype}{[-1, *spec.shape]} with 1 to {MAX_ROWS} inputs "
            "in front (-1: any length)",
            param=raw.name,
        )
    if 0 in shape:  # no data at all bounds the other dimensions then
        element_count([dimension or 1 for dimension in shape], at)
    if data is None:
        elements = from_json(raw.data, raw.datatype, element_count(raw.shape, at), at)
        return NamedTensor(raw.name, raw.datatype, shape, to_bytes(Tensor(raw.name, raw.datatype, shape, elements)))
    if any(dimension < 0 for dimension in shape):
        raise InvalidRequest(f"`{at}.shape`: holds a negative dimension", param=f"{at}.shape")
    if raw.datatype == "BYTES":
        from_bytes(data, raw.datatype, element_count(raw.shape, at), at)
    elif len(data) != element_bytes(raw.datatype) * math.prod(shape):
        raise InvalidRequest(
            f"`{at}`: {raw.datatype}{list(shape)} takes {element_bytes(raw.datatype) * math.prod(shape)} bytes, "
            f"got {len(data)}",
            param=at,
        )
    return NamedTensor(raw.name, raw.datatype, shape, bytes(data))


def encode_array_infer(model: str, asked: CallInfer, answer: Tensors) -> InferReply:
    """Encode what a pipeline returned, with the outputs that were asked for."""
    by_name = {tensor.name: tensor for tensor in answer.tensors}
    written = (_written(by_name[name], binary=binary) for name, binary in asked.outputs)
    return encode_outputs(model, asked.call_id, written)


def _written(tensor: NamedTensor, *, binary: bool) -> Output:
    if binary:
        return Output(tensor.name, tensor.datatype, tensor.shape, tensor.data)
    elements = from_bytes(memoryview(tensor.data), tensor.datatype, math.prod(tensor.shape), tensor.name)
    listed = to_json(Tensor(tensor.name, tensor.datatype, tensor.shape, elements))
    return Output(tensor.name, tensor.datatype, tensor.shape, listed)
