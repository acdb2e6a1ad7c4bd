"""The body of …/infer over HTTP: JSON, perhaps followed by tensors as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.base.errors import InvalidRequest
from router.wire.body import decode_json
from router.wire.headers import whole_number
from router.wire.kserve.call import MAX_TENSORS, InferCall, infer_call
from router.wire.kserve.tensors import Tensor, check_datatype, element_count, from_bytes, from_json
from router.wire.names import refuse_fields, refuse_names

HEADER_LENGTH = "inference-header-content-length"


class _Output(msgspec.Struct, frozen=True):
    name: str
    parameters: dict[str, Any] = {}


class InferInput(msgspec.Struct, frozen=True):
    """A tensor as the JSON part tells it; its content may follow as bytes."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class _Infer(msgspec.Struct, frozen=True):
    inputs: Annotated[list[InferInput], Meta(max_length=MAX_TENSORS)]
    id: Annotated[str, Meta(max_length=1024)] | None = None
    parameters: dict[str, Any] = {}
    outputs: Annotated[list[_Output], Meta(max_length=MAX_TENSORS)] = []


_decoder = msgspec.json.Decoder(_Infer)
INFER_BODY = _Infer  # what the API's description shows


@dataclass(frozen=True, slots=True)
class RawInfer:
    """A request whose tensors are read, whatever its model makes of them.

    Attributes:
        outputs: name and parameters of each that was asked for.
    """

    call_id: str | None
    parameters: Mapping[str, Any]
    tensors: Sequence[Tensor]
    outputs: Sequence[tuple[str, Mapping[str, Any]]]

    def to_prompts(self) -> InferCall:
        """Return what it asks of a text model.

        Raises:
            InvalidRequest: naming the tensor or parameter at fault.
        """
        return infer_call(self.call_id, self.parameters, self.tensors, self.outputs)


def decode_infer(body: bytes, header_length: str | None) -> InferCall:
    """Decode the body of …/infer to a text model; as `read_infer`."""
    return read_infer(body, header_length).to_prompts()


def read_infer(body: bytes, header_length: str | None) -> RawInfer:
    """Decode the body of …/infer.

    Args:
        header_length: value of `Inference-Header-Content-Length`; tensors follow the JSON part as bytes.

    Raises:
        InvalidRequest: naming the tensor or parameter at fault.
    """
    parsed = read_parts(body, header_length)
    tensors = _tensors(parsed.inputs, parsed.binary)
    return RawInfer(parsed.call_id, parsed.parameters, tensors, parsed.outputs)


@dataclass(frozen=True, slots=True)
class InferParts:
    """A request before any of its tensors is read.

    Attributes:
        binary: what follows the JSON part: the tensors that come as bytes, one after the other.
        outputs: name and parameters of each that was asked for.
    """

    call_id: str | None
    parameters: Mapping[str, Any]
    inputs: Sequence[InferInput]
    binary: memoryview
    outputs: Sequence[tuple[str, Mapping[str, Any]]]


def read_parts(body: bytes, header_length: str | None) -> InferParts:
    """Decode the JSON part of a body of …/infer; as `read_infer`."""
    head, binary = _split(body, header_length)
    raw = decode_json(_decoder, head)
    refuse_fields(head, frozenset(_Infer.__struct_fields__))
    for kind, listed in (
        ("inputs", [t.parameters for t in raw.inputs]),
        ("outputs", [t.parameters for t in raw.outputs]),
    ):
        for index, read in enumerate(listed):
            refuse_names(read, f"{kind}[{index}].parameters")
    outputs = [(output.name, output.parameters) for output in raw.outputs]
    return InferParts(raw.id, raw.parameters, raw.inputs, binary, outputs)


def cut(raw: InferInput, binary: memoryview, at: str) -> memoryview | None:
    """Return the content of a tensor that comes as bytes, from the beginning of what is left of them.

    Raises:
        InvalidRequest: it says another size than there is.
    """
    size = raw.parameters.get("binary_data_size")
    if size is None:
        if raw.data is None:
            raise InvalidRequest(f"`{at}.data` is required", param=f"{at}.data")
        return None
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(binary):
        raise InvalidRequest(
            f"`{at}.parameters.binary_data_size`: {str(size)[:40]} is no size of data left in the body",
            param=f"{at}.parameters.binary_data_size",
        )
    return binary[:size]


def nothing_left(binary: memoryview) -> None:
    """Refuse bytes behind the last tensor.

    Raises:
        InvalidRequest: there are some.
    """
    if len(binary):
        raise InvalidRequest(f"{len(binary)} bytes follow the last tensor of the body")


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


def _tensors(inputs: Sequence[InferInput], binary: memoryview) -> list[Tensor]:
    found = []
    for index, raw in enumerate(inputs):
        at = f"inputs[{index}]"
        check_datatype(raw.datatype, at)
        count = element_count(raw.shape, at)
        data = cut(raw, binary, at)
        if data is None:
            elements = from_json(raw.data, raw.datatype, count, at)
        else:
            elements = from_bytes(data, raw.datatype, count, at)
            binary = binary[len(data) :]
        found.append(Tensor(raw.name, raw.datatype, tuple(raw.shape), elements))
    nothing_left(binary)
    return found
