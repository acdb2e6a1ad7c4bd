"""`tokenize`: texts into token ids, a batch at once, by a tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import tokenizers

from models.pipelines.declared.contract import Array, ArrayWork, Contract, dtype_of
from models.pipelines.embedding import MOST_CHARS_A_TOKEN
from router.base.errors import ArtifactError, ContextTooLong, InvalidRequest
from router.values.tensors import TensorSpec


class Tokenize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options.

    Attributes:
        tokenizer: a tokenizer.json, or the catalogue variant of an encoder, whose own is taken.
        max_tokens: longer texts are refused, or `cut` where that is set.
        mask: type of the mask that models take beside the ids: 1 for tokens, and 0 for padding.
    """

    tokenizer: Annotated[str, msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 512
    cut: bool = False
    mask: Literal["INT64", "FP32"] = "INT64"

    shared = True

    @property
    def contract(self) -> Contract:
        return Contract(
            (TensorSpec("text", "BYTES", (1,)),),
            (TensorSpec("input_ids", "INT64", (-1,)), TensorSpec("attention_mask", self.mask, (-1,))),
        )

    def open(self) -> ArrayWork:
        """Read the tokenizer.

        Raises:
            ArtifactError: there is none that can be read.
        """
        try:
            backend = tokenizers.Tokenizer.from_file(str(Path(self.tokenizer).expanduser()))
        except Exception as error:  # the library raises a bare Exception
            raise ArtifactError(f"{self.tokenizer}: not a tokenizer: {error}") from error
        backend.no_padding()
        backend.no_truncation()
        return _Tokenizer(self, backend)


class _Tokenizer:
    def __init__(self, options: Tokenize, backend: tokenizers.Tokenizer) -> None:
        self._options, self._backend = options, backend

    def __call__(self, batch: dict[str, Array]) -> dict[str, list[Array]]:
        texts = [self._readable(_text(row[0])) for row in batch["text"]]
        ids = [self._bounded(encoding.ids) for encoding in self._backend.encode_batch_fast(texts)]
        kind: Any = dtype_of(self._options.mask)
        return {
            "input_ids": [np.array(one, np.int64) for one in ids],
            "attention_mask": [np.ones(len(one), kind) for one in ids],
        }

    def _readable(self, text: str) -> str:
        """Refuse, or cut, what is surely too long before seconds go into its tokens."""
        most = MOST_CHARS_A_TOKEN * self._options.max_tokens
        if len(text) > most and not self._options.cut:
            raise ContextTooLong(
                f"`text`: {len(text)} characters, the pipeline takes {self._options.max_tokens} tokens: shorten it, or "
                "send it in pieces",
                param="text",
            )
        return text[:most]

    def _bounded(self, ids: list[int]) -> list[int]:
        most = self._options.max_tokens
        if len(ids) > most and not self._options.cut:
            raise ContextTooLong(
                f"`text`: {len(ids)} tokens, the pipeline takes {most}: shorten it, or send it in pieces", param="text"
            )
        return ids[:most]


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("`text` is not valid UTF-8", param="text") from None
