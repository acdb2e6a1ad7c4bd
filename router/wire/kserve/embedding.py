"""V2 inference of a sentence encoder: `text_input` (BYTES, [N] or [N, 1]) in, `embedding` (FP32, [N, D]) out."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.base.errors import InvalidRequest
from router.values.request import ApiRequest
from router.values.sampling import SamplingParams
from router.values.task import MAX_INPUTS, EmbedCall, Embeddings
from router.wire.kserve.parameters import TEXT_INPUT, text_of
from router.wire.kserve.reply import InferReply, Output, encode_outputs
from router.wire.kserve.request import RawInfer

OUTPUT = "embedding"
_COUNT = "num_input_tokens"
_DATATYPES = {OUTPUT: "FP32", _COUNT: "INT32"}


class _Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may stand in `parameters`; `timeout` counts microseconds."""

    dimensions: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    timeout: Annotated[int, Meta(ge=1)] | None = None
    binary_data_output: bool = False


@dataclass(frozen=True, slots=True)
class EmbedInfer:
    """A decoded request.

    Attributes:
        outputs: name → as bytes.
    """

    call_id: str | None
    call: EmbedCall
    deadline_s: float | None
    outputs: tuple[tuple[str, bool], ...]

    def request(self, model: str) -> ApiRequest:
        """Return it as the router takes it."""
        return ApiRequest(model, self.call, SamplingParams(max_tokens=1), deadline_s=self.deadline_s)


def embed_infer(raw: RawInfer) -> EmbedInfer:
    """Make sense of a request to an encoder.

    Raises:
        InvalidRequest: naming the tensor or parameter at fault.
    """
    others = [tensor.name for tensor in raw.tensors if tensor.name != TEXT_INPUT]
    if len(raw.tensors) != 1 or others:
        named = ", ".join(name[:80] for name in others) or "none"
        raise InvalidRequest(
            f"`inputs`: an encoder takes the one tensor `{TEXT_INPUT}`, beside it came: {named}", param="inputs"
        )
    text = raw.tensors[0]
    if len(text.shape) > 2 or (len(text.shape) == 2 and text.shape[1] != 1) or len(text.elements) > MAX_INPUTS:
        raise InvalidRequest(
            f"`{TEXT_INPUT}`: shape {list(text.shape)}, expected [N] or [N, 1] with at most {MAX_INPUTS} texts",
            param=TEXT_INPUT,
        )
    texts = tuple(text_of(text, element) for element in text.elements)
    if not texts or not all(texts):
        raise InvalidRequest(f"`{TEXT_INPUT}` is empty", param=TEXT_INPUT)
    try:
        read = msgspec.convert(dict(raw.parameters), _Parameters)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"`parameters`: {error}", param="parameters") from None
    return EmbedInfer(
        raw.call_id,
        EmbedCall(texts, read.dimensions),
        None if read.timeout is None else read.timeout / 1e6,
        _outputs(raw.outputs, read.binary_data_output),
    )


def _outputs(wanted: Sequence[tuple[str, Mapping[str, Any]]], binary: bool) -> tuple[tuple[str, bool], ...]:
    found = []
    for index, (name, parameters) in enumerate(wanted):
        if name not in _DATATYPES:
            at = f"outputs[{index}].name"
            raise InvalidRequest(f"`{at}`: no such output; known outputs: {', '.join(_DATATYPES)}", param=at)
        found.append((name, bool(parameters.get("binary_data", binary))))
    return tuple(found) or ((OUTPUT, binary),)


def encode_embed_infer(model: str, asked: EmbedInfer, vectors: Embeddings, prompt_tokens: int) -> InferReply:
    """Encode the vectors with the outputs that were asked for."""
    values = {
        OUTPUT: ([len(vectors), vectors.dimensions], vectors.data),
        _COUNT: ([1], prompt_tokens.to_bytes(4, "little")),
    }
    outputs = []
    for name, binary in asked.outputs:
        shape, data = values[name]
        listed = data if binary else array("f" if name == OUTPUT else "i", data).tolist()
        outputs.append(Output(name, _DATATYPES[name], shape, listed))
    return encode_outputs(model, asked.call_id, outputs)


INPUTS = [(TEXT_INPUT, "BYTES", [-1, 1])]
OUTPUTS = [(OUTPUT, "FP32", [-1, -1]), (_COUNT, "INT32", [1])]
