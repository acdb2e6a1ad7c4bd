"""V2 inference of a sentence encoder: `text_input` (BYTES, [N] or [N, 1]) in, `embedding` (FP32, [N, D]) out."""

from __future__ import annotations

from array import array
from typing import Annotated

from msgspec import Meta

from router.base.errors import InvalidRequest
from router.values.task import MAX_INPUTS, EmbedCall, Embeddings
from router.wire.kserve.call import CallInfer, asked_outputs
from router.wire.kserve.parameters import TEXT_INPUT, text_of
from router.wire.kserve.protocol import ProtocolFields, read_fields
from router.wire.kserve.reply import InferReply, Output, encode_outputs
from router.wire.kserve.request import RawInfer

OUTPUT = "embedding"
_COUNT = "num_input_tokens"
_DATATYPES = {OUTPUT: "FP32", _COUNT: "INT32"}


class _Parameters(ProtocolFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    dimensions: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


def embed_infer(raw: RawInfer) -> CallInfer:
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
    read = read_fields(raw.parameters, _Parameters)
    asked = asked_outputs(raw.outputs, _DATATYPES, binary=read.binary_data_output)
    return CallInfer(
        raw.call_id,
        EmbedCall(texts, read.dimensions),
        read.timeout_s,
        tuple(asked or [(OUTPUT, read.binary_data_output)]),
    )


def encode_embed_infer(model: str, asked: CallInfer, vectors: Embeddings, prompt_tokens: int) -> InferReply:
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
