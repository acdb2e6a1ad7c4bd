"""Rotary position embedding, in the rotate-half layout of Hugging Face."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def rope_tables(inverse_frequencies: npt.NDArray[np.float64], positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, float32 (positions, 1, head_dim); the first half of the sines is negated.

    Args:
        inverse_frequencies: (head_dim / 2,), radians a position, scaling applied. Rounded to float32 before they are
            multiplied, as the reference implementations do.
    """
    frequency = torch.from_numpy(inverse_frequencies).float()
    angle = torch.outer(torch.arange(positions).float(), frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1).unsqueeze(1), torch.cat([-sin, sin], dim=-1).unsqueeze(1)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate (tokens, heads, head_dim) in place by the tables' rows of its positions, (tokens, 1, head_dim)."""
    low, high = x.chunk(2, dim=-1)
    swapped = torch.cat([high, low], dim=-1)
    x.mul_(cos).addcmul_(swapped, sin)
