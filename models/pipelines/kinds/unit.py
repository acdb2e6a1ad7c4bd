"""`unit`: vectors to length 1."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from models.pipelines.declared.contract import Array, ArrayWork, Contract
from router.values.tensors import TensorSpec


class Unit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options.

    Attributes:
        size: of a vector.
    """

    size: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]

    shared = True

    @property
    def contract(self) -> Contract:
        return Contract((TensorSpec("pooled", "FP32", (self.size,)),), (TensorSpec("vector", "FP32", (self.size,)),))

    def open(self) -> ArrayWork:
        """Nothing is loaded."""
        return _unit


def _unit(batch: dict[str, Array]) -> dict[str, Array]:
    pooled = batch["pooled"]
    lengths = np.linalg.norm(pooled, axis=1, keepdims=True)
    return {"vector": (pooled / np.where(lengths == 0, 1, lengths)).astype(np.float32)}
