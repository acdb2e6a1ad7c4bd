"""`normalise`: pixels into the numbers that a network was trained on."""

from __future__ import annotations

import msgspec
import numpy as np

from models.pipelines.declared.contract import Array, ArrayWork, Contract
from router.values.tensors import TensorSpec

Three = tuple[float, float, float]


class Normalise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options: (pixel · scale − mean) / std for each channel, channels first.

    Attributes:
        bgr: blue comes first.
    """

    scale: float = 1 / 255
    mean: Three = (0.0, 0.0, 0.0)
    std: Three = (1.0, 1.0, 1.0)
    bgr: bool = False

    shared = True

    def __post_init__(self) -> None:
        if 0.0 in self.std:
            raise ValueError("std holds a 0, by which nothing can be divided")

    @property
    def contract(self) -> Contract:
        return Contract(
            (TensorSpec("resized", "UINT8", (-1, -1, 3)),), (TensorSpec("normalised", "FP32", (3, -1, -1)),)
        )

    def open(self) -> ArrayWork:
        """Nothing is loaded."""
        return self._normalise

    def _normalise(self, batch: dict[str, Array]) -> dict[str, Array]:
        pixels = batch["resized"][..., ::-1] if self.bgr else batch["resized"]
        gain = np.asarray(self.scale / np.asarray(self.std), np.float32)
        shift = np.asarray(np.asarray(self.mean) / np.asarray(self.std), np.float32)
        found = pixels.astype(np.float32) * gain - shift
        return {"normalised": np.ascontiguousarray(found.transpose(0, 3, 1, 2))}
