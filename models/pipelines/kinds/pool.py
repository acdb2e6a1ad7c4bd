"""`pool`: vectors of tokens into one of their text."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np

from models.pipelines.declared.contract import Array, ArrayWork, Contract
from router.values.tensors import TensorSpec


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options.

    Attributes:
        size: of a vector.
        how: the mean over the tokens, or the vector of the first one.
        mask: type of the mask; see `tokenize`.
    """

    size: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    how: Literal["mean", "first"] = "mean"
    mask: Literal["INT64", "FP32"] = "INT64"

    shared = True

    @property
    def contract(self) -> Contract:
        inputs = (TensorSpec("hidden", "FP32", (-1, self.size)), TensorSpec("attention_mask", self.mask, (-1,)))
        return Contract(inputs, (TensorSpec("pooled", "FP32", (self.size,)),))

    def open(self) -> ArrayWork:
        """Nothing is loaded."""
        return self._pool

    def _pool(self, batch: dict[str, Array]) -> dict[str, Array]:
        hidden, mask = batch["hidden"], batch["attention_mask"]
        if self.how == "first":
            return {"pooled": np.ascontiguousarray(hidden[:, 0])}
        if mask.shape[1] < hidden.shape[1]:  # what a model computed of padding
            mask = np.pad(mask, ((0, 0), (0, hidden.shape[1] - mask.shape[1])))
        weights = mask[:, :, None].astype(np.float32)
        found = (hidden * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1)
        return {"pooled": found.astype(np.float32)}
