"""Answers → outputs of a V2 reply, and their HTTP form: JSON, perhaps followed by tensors as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def encode_infer(model: str, call: InferCall, rows: Sequence[Row]) -> InferReply:
    """Encode finished answers, one for each prompt, with the outputs that were asked for."""
    outputs: list[dict[str, object]] = []
    tail = b""
    any_binary = False
    for tensor, binary in output_tensors(call, rows):
        entry: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
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
