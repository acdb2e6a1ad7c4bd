"""`centre-boxes`: the four maps of CenterFace and its kin into boxes in the image that was sent.

Of a map cell (row, column) of a network that shrinks by `stride`: the heat is how likely a face is centred there, the
sizes are exp(s) · stride high and wide, the offsets move the centre within the cell, and landmarks are in shares of the
box (Xu et al., "CenterFace: Joint Face Detection and Alignment Using Face as Point", 2019).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from models.pipelines.declared.contract import Array, ArrayWork, Contract
from router.values.tensors import TensorSpec


class CentreBoxes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options.

    Attributes:
        above: cells of more heat become boxes.
        landmarks: points of each box.
    """

    above: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.35
    stride: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    landmarks: Annotated[int, msgspec.Meta(ge=1, le=100)] = 5

    shared = True

    @property
    def contract(self) -> Contract:
        maps = {"heat": 1, "sizes": 2, "offsets": 2, "points": 2 * self.landmarks}
        return Contract(
            (
                *(TensorSpec(name, "FP32", (channels, -1, -1)) for name, channels in maps.items()),
                TensorSpec("placed", "FP32", (4,)),
            ),
            (
                TensorSpec("boxes", "FP32", (-1, 4)),
                TensorSpec("scores", "FP32", (-1,)),
                TensorSpec("landmarks", "FP32", (-1, self.landmarks, 2)),
            ),
        )

    def open(self) -> ArrayWork:
        """Nothing is loaded."""
        return self._boxes

    def _boxes(self, batch: dict[str, Array]) -> dict[str, list[Array]]:
        contract = self.contract
        found = [self._one(*maps) for maps in zip(*(batch[spec.name] for spec in contract.inputs), strict=True)]
        columns = zip(*found, strict=True)
        return {spec.name: list(arrays) for spec, arrays in zip(contract.outputs, columns, strict=True)}

    def _one(self, heat: Array, sizes: Array, offsets: Array, points: Array, placed: Array) -> tuple[Array, ...]:
        rows, columns = np.nonzero(heat[0] > self.above)
        cells = np.stack([rows, columns], axis=1)
        high_wide = np.exp(sizes[:, rows, columns].T) * self.stride
        centres = (cells + offsets[:, rows, columns].T + 0.5) * self.stride
        corner = np.maximum(centres - high_wide / 2, 0)
        shares = points[:, rows, columns].T.reshape(-1, self.landmarks, 2)
        marks = shares * high_wide[:, None] + corner[:, None]
        to_image = _Back(placed)
        boxes = np.concatenate([to_image(corner[:, ::-1]), to_image((corner + high_wide)[:, ::-1])], axis=1)
        return (
            np.asarray(boxes, np.float32).reshape(-1, 4),
            np.asarray(heat[0, rows, columns], np.float32),
            np.asarray(to_image(marks[..., ::-1]), np.float32),
        )


class _Back:
    """From points (x, y) of the resized image to those of the one that was sent; see `resize`."""

    def __init__(self, placed: Array) -> None:
        self._scale, self._offset = placed[:2], placed[2:]

    def __call__(self, points: Array) -> Array:
        return np.asarray((points - self._offset) / self._scale)
