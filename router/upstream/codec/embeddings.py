"""/v1/embeddings from its other end: calls into requests, replies into vectors."""

from __future__ import annotations

import base64
import binascii
from array import array
from typing import Annotated

import msgspec
import orjson

from router.base.errors import ReplicaFailed
from router.base.json_input import UNREADABLE
from router.values.chunk import FinishReason, Origin, TokenChunk
from router.values.request import InferenceRequest
from router.values.task import EmbedCall, Embeddings

PATH = "/v1/embeddings"


class _Vector(msgspec.Struct):
    index: int
    embedding: str | list[float]


class _Usage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None


class _Reply(msgspec.Struct):
    data: list[_Vector]
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Reply)


def encode_call(call: EmbedCall, model: str) -> bytes:
    """Return the body of a request."""
    body: dict[str, object] = {"model": model, "input": list(call.inputs), "encoding_format": "base64"}
    if call.dimensions is not None:
        body["dimensions"] = call.dimensions
    return orjson.dumps(body)


def decode_answer(body: bytes, request: InferenceRequest, origin: Origin | None, who: str) -> TokenChunk:
    """Read a reply; servers that know no base64 send numbers.

    Raises:
        ReplicaFailed: it is none, or holds other vectors than were asked for.
    """
    call = request.prompt
    expected = len(call.inputs) if isinstance(call, EmbedCall) else 0
    try:
        reply = _decoder.decode(body)
        rows = [_row(vector.embedding) for vector in sorted(reply.data, key=lambda vector: vector.index)]
    except (*UNREADABLE, binascii.Error, OverflowError) as error:
        raise ReplicaFailed(f"{who}: no answer with vectors: {error}") from None
    sizes = {len(row) for row in rows}
    if len(rows) != expected or len(sizes) != 1 or 0 in sizes or next(iter(sizes)) % 4:
        raise ReplicaFailed(f"{who}: {len(rows)} vectors of {sorted(sizes)} bytes for {expected} inputs")
    told = None if reply.usage is None else reply.usage.prompt_tokens
    return TokenChunk(
        "",
        tokens=1,
        finish_reason=FinishReason.STOP,
        prompt_tokens=told,
        origin=origin,
        output=Embeddings(b"".join(rows), next(iter(sizes)) // 4),
    )


def _row(told: str | list[float]) -> bytes:
    return base64.b64decode(told, validate=True) if isinstance(told, str) else array("f", told).tobytes()
