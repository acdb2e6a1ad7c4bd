"""Symmetric INT8 arithmetic: weight matrices per output channel, activations per tensor, zero points always 0."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from models.graph.fused import Array

LEVELS = 127.0
_SHRINK = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85)


def quantize_columns(matrix: Array) -> tuple[npt.NDArray[np.int8], Array]:
    """Quantize (in, out) per output channel, choosing the clip that loses least (squared error) of a few.

    Returns:
        int8 values (in, out) and float32 scales (out,), all positive.
    """
    largest = np.maximum(np.abs(matrix).max(axis=0), np.finfo(np.float32).tiny * LEVELS)
    best = (largest / LEVELS).astype(np.float32)
    lowest = np.full(matrix.shape[1], np.inf, np.float32)
    for shrink in _SHRINK:
        scale = (largest * shrink / LEVELS).astype(np.float32)
        error = np.square(matrix - np.clip(np.rint(matrix / scale), -LEVELS, LEVELS) * scale).sum(axis=0)
        better = error < lowest
        best[better], lowest[better] = scale[better], error[better]
    return round_columns(matrix, best), best


def round_columns(matrix: Array, scale: Array) -> npt.NDArray[np.int8]:
    """Round (in, out) to int8 with the given scales (out,)."""
    values: npt.NDArray[np.int8] = np.clip(np.rint(matrix / scale), -LEVELS, LEVELS).astype(np.int8)
    return values
