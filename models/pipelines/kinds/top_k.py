"""`top-k`: the likeliest classes, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from models.pipelines.declared.contract import Array, ArrayWork, Contract
from router.base.errors import ConfigError
from router.values.tensors import TensorSpec


class TopK(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options.

    Attributes:
        k: how many.
        classes: how many the model knows.
        labels: a text file with the name of a class on each line; empty names them by their numbers.
        softmax: the model's numbers are no probabilities yet.
    """

    classes: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    k: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 5
    labels: str = ""
    softmax: bool = True

    shared = True

    def __post_init__(self) -> None:
        if self.k > self.classes:
            raise ValueError(f"k = {self.k} of {self.classes} classes: ask for as many or fewer")

    @property
    def contract(self) -> Contract:
        outputs = (
            TensorSpec("labels", "BYTES", (self.k,)),
            TensorSpec("probabilities", "FP32", (self.k,)),
            TensorSpec("classes", "INT64", (self.k,)),
        )
        return Contract((TensorSpec("logits", "FP32", (self.classes,)),), outputs)

    def open(self) -> ArrayWork:
        """Read the labels.

        Raises:
            ConfigError: the file cannot be read, or names another number of classes.
        """
        names = [str(number).encode() for number in range(self.classes)]
        if self.labels:
            try:
                names = Path(self.labels).expanduser().read_bytes().splitlines()
            except OSError as error:
                raise ConfigError(f"top-k: labels {self.labels}: {error.strerror}", param="pipelines") from error
            if len(names) != self.classes:
                raise ConfigError(
                    f"top-k: {self.labels} names {len(names)} classes, the model has {self.classes}", param="pipelines"
                )
        table = np.empty(len(names), object)
        table[:] = names
        return _Top(self, table)


class _Top:
    def __init__(self, options: TopK, table: Array) -> None:
        self._options, self._table = options, table

    def __call__(self, batch: dict[str, Array]) -> dict[str, Array]:
        found = batch["logits"]
        if self._options.softmax:
            raised = np.exp(found - found.max(axis=1, keepdims=True))
            found = raised / raised.sum(axis=1, keepdims=True)
        best = np.argsort(-found, axis=1, kind="stable")[:, : self._options.k]
        return {
            "labels": self._table[best],
            "probabilities": np.take_along_axis(found, best, axis=1).astype(np.float32),
            "classes": best.astype(np.int64),
        }
