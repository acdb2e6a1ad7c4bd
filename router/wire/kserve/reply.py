"""Answers → outputs of a V2 reply, and their HTTP form: JSON, perhaps followed by tensors as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from router.values.chunk import FinishReason
from router.values.usage import Usage
from router.wire.kserve.call import ERROR_OUTPUT, OUTPUTS, VERSION, InferCall
from router.wire.kserve.tensors import Element, Tensor, to_bytes, to_json

_FAILED = b"error"


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one prompt.

    Attributes:
        finish_reason: None of one that failed, and of a piece that is not the last.
        error: why it failed; empty for an answer.
    """

    text: str
    finish_reason: FinishReason | None
    usage: Usage
    error: str = ""

    @classmethod
    def failed(cls, error: str) -> Row:
        return cls("", None, Usage(0, 0), error)


@dataclass(frozen=True, slots=True)
class InferReply:
    """An encoded reply.

    Attributes:
        header_length: of the JSON part, set when tensors follow as bytes.
    """

    body: bytes
    header_length: int | None


def output_tensors(call: InferCall, rows: Sequence[Row]) -> list[tuple[Tensor, bool]]:
    """Return the outputs that were asked for, each with whether it goes as bytes.

    Where a prompt of a batch failed, `error` comes along although nobody asked: an empty text alone would say nothing.
    """
    wanted = list(call.outputs)
    if any(row.error for row in rows) and all(name != ERROR_OUTPUT for name, _ in wanted):
        wanted.append((ERROR_OUTPUT, wanted[0][1]))
    found = []
    for name, binary in wanted:
        elements = tuple(_value(name, call, index, row) for index, row in enumerate(rows))
        found.append((Tensor(name, OUTPUTS[name], call.shape, elements), binary))
    return found


def _value(name: str, call: InferCall, index: int, row: Row) -> Element:
    if name == "text_output":
        return ((call.prompts[index].text + row.text) if call.echo and not row.error else row.text).encode("utf-8")
    if name == "finish_reason":
        return _FAILED if row.error else b"" if row.finish_reason is None else row.finish_reason.value.encode()
    if name == ERROR_OUTPUT:
        return row.error.encode("utf-8")
    return row.usage.prompt_tokens if name == "num_input_tokens" else row.usage.completion_tokens


@dataclass(frozen=True, slots=True)
class Output:
    """One output of a reply as it is written: its bytes, or what stands in the JSON."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: bytes | list[Any]


def encode_outputs(model: str, call_id: str | None, outputs: Iterable[Output]) -> InferReply:
    """Encode a reply: its JSON, and behind it the outputs that go as bytes."""
    entries: list[dict[str, object]] = []
    tail: list[bytes] = []
    for output in outputs:
        entry: dict[str, object] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if isinstance(output.data, bytes):
            entry["parameters"] = {"binary_data_size": len(output.data)}
            tail.append(output.data)
        else:
            entry["data"] = output.data
        entries.append(entry)
    body: dict[str, object] = {"model_name": model, "model_version": VERSION, "outputs": entries}
    if call_id is not None:
        body["id"] = call_id
    head = orjson.dumps(body)
    return InferReply(b"".join([head, *tail]), len(head) if tail else None)


def encode_infer(model: str, call: InferCall, rows: Sequence[Row]) -> InferReply:
    """Encode finished answers, one for each prompt, with the outputs that were asked for."""
    tensors = output_tensors(call, rows)
    written = (Output(t.name, t.datatype, t.shape, to_bytes(t) if binary else to_json(t)) for t, binary in tensors)
    return encode_outputs(model, call.call_id, written)
