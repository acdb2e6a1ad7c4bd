"""KServe V2 (open inference protocol) for text models: inference requests → values, values → replies.

A text model takes `text_input` (BYTES, one element: a raw prompt) and returns `text_output`. Sampling parameters come,
as with Triton's vLLM backend, as request `parameters`, as one-element tensors of the same names, or as a JSON object in
the BYTES tensor `sampling_parameters`. A parameter or tensor that is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from router.base.errors import InvalidRequest
from router.base.shapes import Key, Misfit, dotted, misfit, value_at
from router.values.replica import ReplicaInfo
from router.values.request import FinishReason, SamplingParams
from router.wire.body import decode_json, shown
from router.wire.headers import whole_number
from router.wire.names import refuse_fields, refuse_names
from router.wire.openai.reply import Usage
from router.wire.sampling import (
    COMPLETION_MAX_TOKENS,
    MaxTokens,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    stop_strings,
)
from router.wire.tensors import Element, Tensor, check_datatype, element_count, from_bytes, from_json, to_bytes, to_json

HEADER_LENGTH = "inference-header-content-length"
VERSION = "1"
_MAX_TENSORS = 64  # more than this protocol has names for
_TEXT_INPUT = "text_input"
_SAMPLING_INPUT = "sampling_parameters"
_OUTPUTS = {"text_output": "BYTES", "finish_reason": "BYTES", "num_input_tokens": "INT32", "num_output_tokens": "INT32"}
_SPELLING = {int: "INT32", float: "FP32", bool: "BOOL", str: "BYTES"}
_INPUTS: dict[str, type] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "seed": int,
    "stop": str,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "ignore_eos": bool,
    "exclude_input_in_output": bool,
    "stream": bool,
}


class _Output(msgspec.Struct, frozen=True):
    name: str
    parameters: dict[str, Any] = {}


class _Input(msgspec.Struct, frozen=True):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class _Infer(msgspec.Struct, frozen=True):
    inputs: Annotated[list[_Input], Meta(max_length=_MAX_TENSORS)]
    id: Annotated[str, Meta(max_length=1024)] | None = None
    parameters: dict[str, Any] = {}
    outputs: Annotated[list[_Output], Meta(max_length=_MAX_TENSORS)] = []


class _Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_tokens: MaxTokens = COMPLETION_MAX_TOKENS
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    seed: Seed | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    ignore_eos: bool = False
    exclude_input_in_output: bool = True
    stream: bool = False
    # What clients send as request parameters of the protocol itself.
    timeout: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    binary_data_output: bool = False
    priority: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False


@dataclass(frozen=True, slots=True)
class InferCall:
    """A decoded request.

    Attributes:
        call_id: the caller's own id, echoed in the body.
        deadline_s: from `parameters.timeout`, which the protocol counts in microseconds.
        echo: the prompt is repeated in front of the answer (`exclude_input_in_output`: false).
        outputs: name → as bytes.
    """

    call_id: str | None
    text: str
    sampling: SamplingParams
    deadline_s: float | None
    echo: bool
    outputs: tuple[tuple[str, bool], ...]


_decoder = msgspec.json.Decoder(_Infer)
INFER_BODY = _Infer  # what the API's description shows


def decode_infer(body: bytes, header_length: str | None) -> InferCall:
    """Decode the body of …/infer.

    Args:
        header_length: value of `Inference-Header-Content-Length`; tensors follow the JSON part as bytes.

    Raises:
        InvalidRequest: naming the tensor or parameter at fault.
    """
    head, binary = _split(body, header_length)
    raw = decode_json(_decoder, head)
    refuse_fields(head, _Infer.__struct_fields__)
    for kind, listed in (
        ("inputs", [t.parameters for t in raw.inputs]),
        ("outputs", [t.parameters for t in raw.outputs]),
    ):
        for index, read in enumerate(listed):
            refuse_names(read, f"{kind}[{index}].parameters")
    tensors = {tensor.name: tensor for tensor in _tensors(raw.inputs, binary)}
    if len(tensors) < len(raw.inputs):
        raise InvalidRequest("`inputs`: two tensors have one name", param="inputs")
    text_tensor = tensors.pop(_TEXT_INPUT, None)
    if text_tensor is None:
        raise InvalidRequest(f"`inputs`: the tensor `{_TEXT_INPUT}` is required", param="inputs")
    text = _text(text_tensor)
    if not text:
        raise InvalidRequest(f"`{_TEXT_INPUT}` is empty", param=_TEXT_INPUT)
    parameters = _parameters(raw.parameters, tensors)
    return InferCall(
        call_id=raw.id,
        text=text,
        sampling=_sampling(parameters),
        deadline_s=None if parameters.timeout is None else parameters.timeout / 1e6,
        echo=not parameters.exclude_input_in_output,
        outputs=_outputs(raw.outputs, parameters.binary_data_output),
    )


def _split(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    if header_length is None:
        return body, memoryview(b"")
    length = whole_number(header_length, len(body))
    if length is None:
        raise InvalidRequest(
            f"`{HEADER_LENGTH}: {header_length[:40]}`: expected a length of at most the body's {len(body)} bytes",
            param=HEADER_LENGTH,
        )
    return body[:length], memoryview(body)[length:]


def _tensors(inputs: list[_Input], binary: memoryview) -> list[Tensor]:
    found = []
    offset = 0
    for index, raw in enumerate(inputs):
        at = f"inputs[{index}]"
        check_datatype(raw.datatype, at)
        count = element_count(raw.shape, at)
        size = raw.parameters.get("binary_data_size")
        if size is None:
            if raw.data is None:
                raise InvalidRequest(f"`{at}.data` is required", param=f"{at}.data")
            elements = from_json(raw.data, raw.datatype, count, at)
        else:
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(binary) - offset:
                raise InvalidRequest(
                    f"`{at}.parameters.binary_data_size`: {str(size)[:40]} is no size of data left in the body",
                    param=f"{at}.parameters.binary_data_size",
                )
            elements = from_bytes(binary[offset : offset + size], raw.datatype, count, at)
            offset += size
        found.append(Tensor(raw.name, raw.datatype, tuple(raw.shape), elements))
    if offset != len(binary):
        raise InvalidRequest(f"{len(binary) - offset} bytes follow the last tensor of the body")
    return found


def _single(tensor: Tensor) -> Element:
    if len(tensor.elements) != 1:
        raise InvalidRequest(
            f"`{tensor.name}`: shape {list(tensor.shape)}, expected one element: send one prompt per request",
            param=tensor.name,
        )
    return tensor.elements[0]


def _text(tensor: Tensor) -> str:
    value = _single(tensor)
    if not isinstance(value, bytes):
        raise InvalidRequest(f"`{tensor.name}`: datatype {tensor.datatype}, expected BYTES", param=tensor.name)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"`{tensor.name[:80]}` is no valid UTF-8: {error.reason}", param=tensor.name) from None


def _parameters(given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _Parameters:
    merged: dict[str, Any] = dict(given)
    for name, tensor in tensors.items():
        if name == _SAMPLING_INPUT:
            merged.update(_loose(_text(tensor)))
        elif name not in _INPUTS:
            known = ", ".join([_TEXT_INPUT, _SAMPLING_INPUT, *_INPUTS])
            raise InvalidRequest(f"`{name[:80]}`: no such input; known inputs: {known}", param=name)
        else:
            merged[name] = _text(tensor) if tensor.datatype == "BYTES" else _single(tensor)
    try:
        found = msgspec.convert(merged, _Parameters, strict=True)
    except msgspec.ValidationError as error:
        raise _wrong_parameter(merged, given, str(error)) from None
    for name, refused in (("stream", found.stream), ("priority", found.priority), ("sequence_id", found.sequence_id)):
        if refused:
            raise InvalidRequest(f"`parameters.{name}`: {_REMEDIES[name]}", param=f"parameters.{name}")
    return found


def _wrong_parameter(merged: Mapping[str, Any], given: Mapping[str, Any], error: str) -> InvalidRequest:
    """Name a parameter as it was sent: in `parameters`, or as a tensor."""
    found = misfit(merged, _Parameters) or Misfit((), error)
    if found.unknown is not None:
        key: Key = (found.unknown[:80],)
        what = f"no such parameter; known parameters: {', '.join(_Parameters.__struct_fields__)}"
    else:
        key, what = found.key, found.what
    where = dotted(("parameters", *key) if not key or key[0] in given else key)
    value = None if found.unknown is not None else value_at(merged, found.key)
    return InvalidRequest(f"`{where}`{shown(value)}: {what}", param=where)


_REMEDIES = {
    "stream": "this protocol answers in one piece over HTTP: stream from /v1/completions",
    "priority": "send the header `x-overspill-priority` (higher is better) instead",
    "sequence_id": "text models keep no state between requests: send the whole prompt",
}


def _loose(text: str) -> dict[str, Any]:
    """Read the JSON object in `sampling_parameters`; its numbers may be strings, as clients of vLLM write them."""
    try:
        raw = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"`{_SAMPLING_INPUT}` is no valid JSON: {error}", param=_SAMPLING_INPUT) from None
    if not isinstance(raw, dict):
        raise InvalidRequest(f"`{_SAMPLING_INPUT}`: expected a JSON object", param=_SAMPLING_INPUT)
    try:
        found = msgspec.convert(raw, _Parameters, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"`{_SAMPLING_INPUT}`: {error}", param=_SAMPLING_INPUT) from None
    return {name: getattr(found, name) for name in raw}


def _sampling(parameters: _Parameters) -> SamplingParams:
    return SamplingParams(
        max_tokens=parameters.max_tokens,
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        top_k=max(0, parameters.top_k),
        seed=parameters.seed,
        stop=stop_strings(parameters.stop),
        presence_penalty=parameters.presence_penalty,
        frequency_penalty=parameters.frequency_penalty,
        repetition_penalty=parameters.repetition_penalty,
        ignore_eos=parameters.ignore_eos,
    )


def _outputs(wanted: list[_Output], binary_by_default: bool) -> tuple[tuple[str, bool], ...]:
    found = []
    for index, output in enumerate(wanted):
        if output.name not in _OUTPUTS:
            raise InvalidRequest(
                f"`outputs[{index}].name`: no such output; known outputs: {', '.join(_OUTPUTS)}",
                param=f"outputs[{index}].name",
            )
        binary = output.parameters.get("binary_data", binary_by_default)
        if not isinstance(binary, bool):
            at = f"outputs[{index}].parameters.binary_data"
            raise InvalidRequest(f"`{at}`: expected true or false", param=at)
        found.append((output.name, binary))
    return tuple(found) or (("text_output", binary_by_default),)


@dataclass(frozen=True, slots=True)
class InferReply:
    """An encoded reply.

    Attributes:
        header_length: of the JSON part, set when tensors follow as bytes.
    """

    body: bytes
    header_length: int | None


def encode_infer(model: str, call: InferCall, text: str, finish_reason: FinishReason, usage: Usage) -> InferReply:
    """Encode a finished answer with the outputs that were asked for."""
    values: dict[str, Element] = {
        "text_output": ((call.text + text) if call.echo else text).encode("utf-8"),
        "finish_reason": finish_reason.value.encode(),
        "num_input_tokens": usage.prompt_tokens,
        "num_output_tokens": usage.completion_tokens,
    }
    outputs: list[dict[str, object]] = []
    tail = b""
    any_binary = False
    for name, binary in call.outputs:
        tensor = Tensor(name, _OUTPUTS[name], (1,), (values[name],))
        entry: dict[str, object] = {"name": name, "datatype": tensor.datatype, "shape": [1]}
        if binary:
            raw = to_bytes(tensor)
            entry["parameters"] = {"binary_data_size": len(raw)}
            tail += raw
            any_binary = True
        else:
            entry["data"] = to_json(tensor)
        outputs.append(entry)
    body: dict[str, object] = {"model_name": model, "model_version": VERSION, "outputs": outputs}
    if call.call_id is not None:
        body["id"] = call.call_id
    head = orjson.dumps(body)
    return InferReply(head + tail, len(head) if any_binary else None)


def model_metadata(name: str, replicas: list[ReplicaInfo]) -> dict[str, object]:
    """Describe a family or a variant; the optional inputs are listed because clients look names and types up here."""
    inputs = [{"name": _TEXT_INPUT, "datatype": "BYTES", "shape": [1]}]
    inputs += [{"name": key, "datatype": _SPELLING[kind], "shape": [1]} for key, kind in _INPUTS.items()]
    inputs.append({"name": _SAMPLING_INPUT, "datatype": "BYTES", "shape": [1]})
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "overspill",
        "inputs": inputs,
        "outputs": [{"name": key, "datatype": kind, "shape": [1]} for key, kind in _OUTPUTS.items()],
        "parameters": {
            "family": replicas[0].family,
            "variants": ",".join(dict.fromkeys(info.variant for info in replicas)),
            "context_tokens": max(info.context_tokens for info in replicas),
        },
    }
