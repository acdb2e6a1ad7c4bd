"""/v1/embeddings: requests into calls, vectors into replies.

An input is a text or a list of token ids, and a request holds one or a list of them. Vectors go out as numbers, or as
the base64 of little-endian float32, which client libraries ask for by themselves. Unknown fields are tolerated; known
ones that would change a vector and are not served are refused by name.
"""

from __future__ import annotations

import base64
import sys
from array import array
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from router.base.errors import InvalidRequest
from router.values.request import ApiRequest
from router.values.sampling import SamplingParams
from router.values.task import MAX_INPUTS, EmbedCall, Embeddings
from router.wire.body import decode_json
from router.wire.names import checked_field_names
from router.wire.openai.unserved import Unserved, only

_ONE_PIECE = SamplingParams(max_tokens=1)
"""A call's answer counts as one token."""

Encoding = Literal["float", "base64"]


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/embeddings.

    Attributes:
        dimensions: length of the vectors: the first elements of whole ones, normalised again.
        priority: higher is better, as in `x-overspill-priority`.
    """

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    input: str | list[str | int | list[int]]
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    # Known, and served only at the value that changes nothing.
    truncate_prompt_tokens: Any = None
    add_special_tokens: Any = None
    normalize: Any = None
    messages: Any = None
    embed_dtype: Any = None
    input_type: Any = None
    use_activation: Any = None
    endianness: Any = None
    padding: Any = None
    # Of Jina, Cohere, Voyage, Mistral and TEI.
    task: Any = None
    prompt_name: Any = None
    late_chunking: Any = None
    normalized: Any = None
    embedding_type: Any = None
    output_dtype: Any = None
    output_dimension: Any = None


_UNIT = "vectors have unit length: leave it out"
_ALIKE = "queries and documents are embedded alike: leave it out"
_FLOATS = "vectors are float32: leave it out"
_UNSERVED = Unserved(
    (
        "truncate_prompt_tokens",
        only(-1),  # "what is longer than the window": that is refused, all else has its vector
        "inputs are not cut: a vector of half a text is none of it; send pieces",
    ),
    ("add_special_tokens", only(True), "texts get their special tokens: send token ids to choose them"),
    ("normalize", only(True), _UNIT),
    ("normalized", only(True), _UNIT),
    ("use_activation", only(True), _UNIT),
    ("messages", only(), "conversations are not embedded: send `input`"),
    ("embed_dtype", only("float32"), _FLOATS),
    ("embedding_type", only("float"), _FLOATS),
    ("output_dtype", only("float"), _FLOATS),
    ("endianness", only("little", "native"), "base64 holds little-endian numbers: leave it out"),
    ("padding", only("do_not_pad"), "inputs are not padded: leave it out"),
    ("input_type", only("document"), _ALIKE),
    ("task", only(), _ALIKE),
    ("prompt_name", only(), _ALIKE),
    ("late_chunking", only(False), "each input is embedded alone: leave it out"),
    ("output_dimension", only(), "send `dimensions`"),
)
_decoder = msgspec.json.Decoder(EmbeddingBody)
_FIELDS = frozenset(EmbeddingBody.__struct_fields__)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A decoded request, and how its vectors are to be written."""

    request: ApiRequest
    encoding: Encoding


def decode_embeddings(body: bytes) -> EmbeddingRequest:
    """Decode the body of /v1/embeddings.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    raw = decode_json(_decoder, body)
    _UNSERVED.refuse(raw, checked_field_names(body, _FIELDS))
    call = EmbedCall(_inputs(raw.input), raw.dimensions)
    return EmbeddingRequest(
        ApiRequest(raw.model, call, _ONE_PIECE, priority=raw.priority), raw.encoding_format or "float"
    )


def _inputs(raw: str | list[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(raw, str) or (raw and isinstance(raw[0], int)):
        return (_input(raw, "input"),)
    if len(raw) > MAX_INPUTS:
        raise InvalidRequest(
            f"`input` has {len(raw)} elements, at most {MAX_INPUTS} are taken at once: send several requests",
            param="input",
        )
    if not raw:
        raise InvalidRequest("`input` is empty: send a text, or a list of them", param="input")
    return tuple(_input(one, f"input[{index}]") for index, one in enumerate(raw))


def _input(raw: object, at: str) -> str | tuple[int, ...]:
    if not raw and raw != 0:
        raise InvalidRequest(f"`{at}` is empty: send text, or at least one token id", param=at)
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise InvalidRequest(f"`{at}`: texts and lists of token ids, not a number among them", param=at)
    for index, token_id in enumerate(raw):
        if not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise InvalidRequest(f"`{at}[{index}]` is no token id", param=f"{at}[{index}]")
    return tuple(raw)


def encode_embeddings(model: str, vectors: Embeddings, encoding: Encoding, prompt_tokens: int) -> bytes:
    """Return the body of a reply."""
    rows = (vectors.row(index) for index in range(len(vectors)))
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(row).decode() if encoding == "base64" else _numbers(row),
        }
        for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return orjson.dumps({"object": "list", "data": data, "model": model, "usage": usage})


def _numbers(row: bytes) -> list[float]:
    """Return float32 values; written with as many digits as a double has, they read back to the same bits."""
    numbers = array("f", row)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
