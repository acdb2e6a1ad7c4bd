"""Texts to vectors as a pipeline: tokenize → encode. The encoder is a tier's own.

Between the stages go `Tokens`. The encoder gives the mean of each text's token vectors; it is cut to the dimensions
that were asked for and normalised in the same stage, a whole batch at once: for so little a thread more is in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import tokenizers

from models.pipelines.batching import BatchSettings
from models.pipelines.stage import Opens, StagePlan, Work
from router.base.errors import ArtifactError, ContextTooLong, InvalidRequest, OverspillError
from router.values.prompt import Input
from router.values.task import EmbedCall, Embeddings

BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_TOKENIZE_AT_ONCE = 64
_SHORT_CHARS = 4096  # of a batch: tokenized in its own thread in a few milliseconds
MOST_CHARS_A_TOKEN = 100
"""Of a text on the average; longer ones are refused unread. Prose has 4, and no word of more becomes a token."""

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Text:
    """One input as it comes in: a text, or token ids; `dimensions` as in `EmbedCall`."""

    given: str | tuple[int, ...]
    dimensions: int | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """One input as the encoder takes it."""

    ids: list[int]
    dimensions: int | None


@dataclass(frozen=True, slots=True)
class Vector:
    """One vector of unit length, float32 (D,), and the tokens that it cost."""

    values: Array
    tokens: int


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """What the stages around an encoder know of it.

    Attributes:
        tokenizer: its tokenizer.json.
        context_tokens: longest input, special tokens included.
        vocab_size: ids below it have a vector.
        dimensions: of a whole vector.
    """

    tokenizer: Path
    context_tokens: int
    vocab_size: int
    dimensions: int


Encode = Callable[[list[list[int]]], Array]
"""A batch of token ids to the mean of their vectors, float32 (B, H)."""


def embedding_stages(
    shape: EncoderShape,
    encode: Opens,
    batching: BatchSettings,
    *,
    instances: int = 1,
    pool: Any = "threads",
    pads_to: Literal["longest", "nothing"] = "longest",
    timeout_s: float = 0.0,
    start_timeout_s: float = 0.0,
) -> tuple[StagePlan, ...]:
    """Return the stages around an encoder.

    Args:
        encode: makes the stage's function from `encoding` and an `Encode`.
        batching: of the encoder, in tokens; without buckets it gets `BUCKETS` up to the model's window.
        pads_to: see `BatchSettings`.
        timeout_s, start_timeout_s: of the encoder in a process; see `StagePlan`.
    """
    fitting = tuple(size for size in BUCKETS if size < shape.context_tokens)
    buckets = batching.buckets or (*fitting, shape.context_tokens)
    batching = msgspec.structs.replace(batching, buckets=buckets, pads_to=pads_to)
    return (
        StagePlan("tokenize", partial(open_tokenize, shape), batching=BatchSettings(max_size=_TOKENIZE_AT_ONCE)),
        StagePlan(
            "encode",
            encode,
            workers=instances,
            batching=batching,
            cost=tokens_of,
            pool=pool,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
        ),
    )


def tokens_of(value: Tokens) -> int:
    """Return the size of an input."""
    return len(value.ids)


def open_tokenize(shape: EncoderShape) -> Work:
    """Read the tokenizer.

    Raises:
        ArtifactError: there is none that can be read.
    """
    try:
        backend = tokenizers.Tokenizer.from_file(str(shape.tokenizer))
    except Exception as error:  # the library raises a bare Exception
        raise ArtifactError(f"{shape.tokenizer}: not a tokenizer: {error}; pull the model again") from error
    backend.no_padding()
    backend.no_truncation()
    return partial(_tokenize, shape, backend)


def _tokenize(shape: EncoderShape, backend: tokenizers.Tokenizer, batch: list[Text]) -> list[Tokens | OverspillError]:
    hopeless = {at: error for at, value in enumerate(batch) if (error := _hopeless(shape, value)) is not None}
    rest = iter(_tokenized(shape, backend, [value for at, value in enumerate(batch) if at not in hopeless]))
    return [hopeless[at] if at in hopeless else next(rest) for at in range(len(batch))]


def _hopeless(shape: EncoderShape, value: Text) -> ContextTooLong | None:
    """Refuse what is surely too long before seconds go into its tokens: the texts of others wait for them."""
    if len(value.given) <= MOST_CHARS_A_TOKEN * shape.context_tokens:
        return None
    what = "characters" if isinstance(value.given, str) else "tokens"
    return ContextTooLong(
        f"`input`: one has {len(value.given)} {what}, this model's maximum context length is {shape.context_tokens} "
        "tokens: shorten it, or send it in pieces",
        param="input",
    )


def _tokenized(shape: EncoderShape, backend: tokenizers.Tokenizer, batch: list[Text]) -> list[Tokens | OverspillError]:
    texts = [value.given for value in batch if isinstance(value.given, str)]
    try:
        encoded = iter(_encoded(backend, texts))
    except TypeError:  # half a surrogate pair in one of them
        if len(batch) > 1:
            return [_tokenized(shape, backend, [value])[0] for value in batch]
        return [InvalidRequest("an input holds half a surrogate pair; send valid Unicode", param="input")]
    ids = [next(encoded).ids if isinstance(value.given, str) else list(value.given) for value in batch]
    return [_checked(shape, value, found) for value, found in zip(batch, ids, strict=True)]


def _encoded(backend: tokenizers.Tokenizer, texts: list[str]) -> list[tokenizers.Encoding]:
    """Tokenize short texts one by one: for a batch the library wakes threads of its own, which then look for more."""
    if sum(map(len, texts)) <= _SHORT_CHARS:
        return [backend.encode(text) for text in texts]
    return backend.encode_batch_fast(texts)


def _checked(shape: EncoderShape, value: Text, ids: list[int]) -> Tokens | OverspillError:
    if len(ids) > shape.context_tokens:
        return ContextTooLong(
            f"`input`: one has {len(ids)} tokens, this model's maximum context length is {shape.context_tokens} "
            "tokens: shorten it, or send it in pieces",
            param="input",
        )
    outside = next((token for token in ids if not 0 <= token < shape.vocab_size), None)
    if outside is not None:
        return InvalidRequest(
            f"`input`: {outside} is no token id of this model, which has {shape.vocab_size}: ids of another model's "
            "tokenizer mean nothing here, send text",
            param="input",
        )
    return Tokens(ids, value.dimensions)


def encoding(encode: Encode, batch: list[Tokens]) -> list[Vector | OverspillError]:
    """Run an encoder over a batch. A vector that is no number is the fault of its input alone."""
    means = encode([value.ids for value in batch])
    finite = np.logical_and.reduce(np.isfinite(means), axis=1)
    return [
        _vector(value, mean if value.dimensions else row, numbers)
        for value, mean, row, numbers in zip(batch, means, units(means), finite.tolist(), strict=True)
    ]


def _vector(value: Tokens, row: Array, finite: bool) -> Vector | OverspillError:
    if not finite:
        return InvalidRequest("`input`: one gives no finite vector", param="input")
    if value.dimensions:
        row = units(row[None, : value.dimensions])[0]
    return Vector(row, len(value.ids))


def units(rows: Array) -> Array:
    """Return float32 (B, D) with every row of length 1; one of length 0 stays as it is."""
    with np.errstate(invalid="ignore", over="ignore"):  # rows that are not finite belong to inputs that fail
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows / np.where(lengths == 0, 1, lengths), np.float32)


def padded(batch: list[list[int]]) -> tuple[npt.NDArray[np.int64], Array]:
    """Pad a batch of ids; returns ids int64 (B, S), and a mask float32 (B, S) that is 1 for tokens."""
    lengths = np.array([len(ids) for ids in batch])
    mask = np.arange(lengths.max())[None, :] < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate([np.asarray(one, np.int64) for one in batch])
    return ids, mask.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a call becomes inputs of such a pipeline, and their vectors an answer: `models.pipelines.replica.Calls`."""

    dimensions: int

    def values(self, prompt: Input) -> Sequence[Text]:
        """Return the inputs of a call.

        Raises:
            InvalidRequest: it asks for something else, or for longer vectors than there are.
        """
        if not isinstance(prompt, EmbedCall):
            raise InvalidRequest("this model makes embeddings: send it to /v1/embeddings", param="model")
        wanted = prompt.dimensions
        if wanted is not None and wanted > self.dimensions:
            raise InvalidRequest(
                f"`dimensions` = {wanted}: this model's vectors have {self.dimensions}; ask for as many or fewer",
                param="dimensions",
            )
        return [Text(given, wanted) for given in prompt.inputs]

    def output(self, results: Sequence[Vector]) -> tuple[Embeddings, int]:
        """Return the answer, and the tokens of all inputs."""
        data = b"".join([np.asarray(result.values, "<f4").tobytes() for result in results])
        return Embeddings(data, len(results[0].values)), sum([result.tokens for result in results])
