"""V2 messages of gRPC ↔ the bodies that the HTTP gateway reads and writes.

Raw tensor contents are the same bytes in both, so an inference request is a JSON head and those bytes behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import orjson

from router.base.errors import InvalidRequest
from router.wire.kserve.call import OUTPUTS
from router.wire.kserve.parameters import INPUTS, SAMPLING_INPUT, TEXT_INPUT
from router.wire.kserve.tensors import Tensor, check_datatype, element_count, from_bytes, to_bytes, to_json

FINAL = "triton_final_response"
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def infer_body(request: Any) -> tuple[bytes, int]:
    """Return the body of …/infer for a `ModelInferRequest`, and the length of its JSON part.

    Raises:
        InvalidRequest: naming the tensor at fault.
    """
    raws = _raw_contents(request)
    inputs = []
    for index, tensor in enumerate(request.inputs):
        parameters = {**plain(tensor.parameters), "binary_data_size": len(raws[index])}
        entry = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype}
        inputs.append({**entry, "parameters": parameters})
    outputs = [
        {"name": output.name, "parameters": _without_form(plain(output.parameters))} for output in request.outputs
    ]
    body = {
        "inputs": inputs,
        "outputs": outputs,
        "parameters": {**plain(request.parameters), "binary_data_output": True},
        **({"id": request.id} if request.id else {}),
    }
    head = orjson.dumps(body)
    return b"".join([head, *raws]), len(head)


def generate_body(request: Any) -> bytes | None:
    """Return the body of …/generate_stream for a `ModelInferRequest` that asks for a stream; None for any other.

    Raises:
        InvalidRequest: naming the tensor at fault; a stream is of one prompt.
    """
    raws = _raw_contents(request)
    wanted = dict(plain(request.parameters))
    tensors = [
        _tensor(tensor, raw, f"inputs[{i}]") for i, (tensor, raw) in enumerate(zip(request.inputs, raws, strict=True))
    ]
    values = {tensor.name: to_json(tensor)[0] if len(tensor.elements) == 1 else None for tensor in tensors}
    if not (values.get("stream") or wanted.get("stream")):
        return None
    for name, value in values.items():
        if value is None:
            raise InvalidRequest(f"`{name[:80]}`: a stream answers one prompt: send one element", param=name[:80])
        if name not in {TEXT_INPUT, SAMPLING_INPUT, *INPUTS}:
            known = ", ".join([TEXT_INPUT, SAMPLING_INPUT, *INPUTS])
            raise InvalidRequest(f"`{name[:80]}`: no such input; known inputs: {known}", param=name[:80])
    outputs = [output.name for output in request.outputs] or ["text_output"]
    # The end of a stream is known by its finish reason.
    body = {**values, "parameters": wanted, "outputs": list(dict.fromkeys([*outputs, "finish_reason"]))}
    return orjson.dumps(body)


def infer_response(messages: Mapping[str, Any], request: Any, head_bytes: int, body: bytes) -> Any:
    """Return the `ModelInferResponse` for a reply of …/infer, all of whose outputs are bytes."""
    told = orjson.loads(body[:head_bytes])
    response = messages["ModelInferResponse"](
        model_name=told["model_name"], model_version=told["model_version"], id=request.id
    )
    at = head_bytes
    for output in told["outputs"]:
        size = output["parameters"]["binary_data_size"]
        response.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        response.raw_output_contents.append(body[at : at + size])
        at += size
    return response


def stream_response(messages: Mapping[str, Any], request: Any, event: Mapping[str, Any]) -> Any:
    """Return the `ModelStreamInferResponse` for an event of …/generate_stream."""
    if "error" in event and "model_name" not in event:
        return stream_error(messages, request, event["error"])
    response = messages["ModelInferResponse"](
        model_name=event["model_name"], model_version=event["model_version"], id=request.id
    )
    response.parameters[FINAL].bool_param = bool(event["finish_reason"])
    shape = next((list(tensor.shape) for tensor in request.inputs if tensor.name == TEXT_INPUT), [1])
    wanted = [output.name for output in request.outputs] or ["text_output"]
    # What was asked for by an input comes along; the finish reason that is asked for here alone does not.
    for name in (name for name in event if name in wanted or name in _flagged(request)):
        value = event[name]
        element = value.encode() if isinstance(value, str) else value
        response.outputs.add(name=name, datatype=OUTPUTS[name], shape=shape)
        response.raw_output_contents.append(to_bytes(Tensor(name, OUTPUTS[name], (1,), (element,))))
    return messages["ModelStreamInferResponse"](infer_response=response)


def _flagged(request: Any) -> set[str]:
    """Return the outputs that inputs of a request ask for."""
    named = {tensor.name for tensor in request.inputs} | set(request.parameters)
    return {name.removeprefix("return_") for name in named if name.startswith("return_")} & OUTPUTS.keys()


def stream_error(messages: Mapping[str, Any], request: Any, text: str) -> Any:
    """Return the response that tells of one request of a stream that it failed; its id says which."""
    return messages["ModelStreamInferResponse"](error_message=text, infer_response={"id": request.id})


def plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as JSON has them; one without a value is left out."""
    found = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None:
            found[name] = getattr(parameter, kind)
    return found


def _without_form(parameters: dict[str, Any]) -> dict[str, Any]:
    """Whether an output goes as bytes is HTTP's affair alone."""
    return {name: value for name, value in parameters.items() if name != "binary_data"}


def _raw_contents(request: Any) -> list[bytes]:
    """Return the contents of each input as bytes, however they came."""
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise InvalidRequest(
            f"`raw_input_contents`: {len(raws)} for {len(request.inputs)} inputs: send all of them raw, or none",
            param="raw_input_contents",
        )
    return list(raws) or [_typed(tensor, f"inputs[{index}]") for index, tensor in enumerate(request.inputs)]


def _typed(tensor: Any, at: str) -> bytes:
    check_datatype(tensor.datatype, at)
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise InvalidRequest(
            f"`{at}.contents`: {tensor.datatype} is sent in `raw_input_contents`", param=f"{at}.contents"
        )
    elements = tuple(getattr(tensor.contents, field))
    count = element_count(tensor.shape, at)
    if len(elements) != count:
        raise InvalidRequest(
            f"`{at}.contents.{field}`: {len(elements)} elements, the shape asks for {count}", param=f"{at}.contents"
        )
    try:
        return to_bytes(Tensor(tensor.name, tensor.datatype, tuple(tensor.shape), elements))
    except struct.error:
        raise InvalidRequest(f"`{at}.contents`: an element does not fit {tensor.datatype}", param=at) from None


def _tensor(tensor: Any, raw: bytes, at: str) -> Tensor:
    check_datatype(tensor.datatype, at)
    count = element_count(tensor.shape, at)
    elements = from_bytes(memoryview(raw), tensor.datatype, count, at)
    return Tensor(tensor.name, tensor.datatype, tuple(tensor.shape), elements)
