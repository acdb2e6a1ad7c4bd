"""`non-maximum-suppression`: of boxes that overlap, the one with the highest score is kept."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from models.pipelines.declared.contract import Array, ArrayWork, Contract
from router.values.tensors import TensorSpec

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Suppression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options.

    Attributes:
        overlap: intersection over union from which the weaker of two boxes goes.
        above: boxes of no higher score are dropped.
        top: boxes kept at most, the best ones.
        beside: landmarks of each box, which go with it; 0 reads none.

    Boxes are (left, top, right, bottom). `count` tells how many there are, since a reply to several inputs fills up
    shorter lists with zeros.
    """

    overlap: Share = 0.3
    above: Share = 0.5
    top: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100
    beside: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0

    shared = True

    @property
    def contract(self) -> Contract:
        lists = [TensorSpec("boxes", "FP32", (-1, 4)), TensorSpec("scores", "FP32", (-1,))]
        if self.beside:
            lists.append(TensorSpec("landmarks", "FP32", (-1, self.beside, 2)))
        return Contract(tuple(lists), (*lists, TensorSpec("count", "INT32", (1,))))

    def open(self) -> ArrayWork:
        """Nothing is loaded."""
        return self._suppress

    def _suppress(self, batch: dict[str, Array]) -> dict[str, list[Array]]:
        kept = [self.kept(boxes, scores) for boxes, scores in zip(batch["boxes"], batch["scores"], strict=True)]
        found = {
            name: [array[keep] for array, keep in zip(arrays, kept, strict=True)] for name, arrays in batch.items()
        }
        return found | {"count": [np.array([len(keep)], np.int32) for keep in kept]}

    def kept(self, boxes: Array, scores: Array) -> Array:
        """Return the places of the boxes that are kept, the highest score first.

        Args:
            boxes: float32 (N, 4); scores: float32 (N,).
        """
        left = np.argsort(-scores, kind="stable")
        left = left[scores[left] > self.above]
        areas = np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 0), axis=1)
        kept: list[int] = []
        while left.size and len(kept) < self.top:
            best, left = int(left[0]), left[1:]
            kept.append(best)
            near = np.maximum(boxes[left, :2], boxes[best, :2])
            far = np.minimum(boxes[left, 2:], boxes[best, 2:])
            shared = np.prod(np.maximum(far - near, 0), axis=1)
            whole = areas[left] + areas[best] - shared
            left = left[shared < self.overlap * np.maximum(whole, np.finfo(np.float32).tiny)]
        return np.array(kept, np.int64)
