"""Rotary position embedding, in the rotate-half layout of Hugging Face."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def rope_tables(inverse_frequencies: npt.NDArray[np.float64], positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, float32 (positions, 1, head_dim).

    Args:
        inverse_frequencies: (head_dim / 2,), radians a position, scaling applied. Rounded to float32 before they are
            multiplied, as the reference implementations do.
    """
    frequency = torch.from_numpy(inverse_frequencies).float()
    angle = torch.outer(torch.arange(positions).float(), frequency)
    both = torch.cat([angle, angle], dim=-1).unsqueeze(1)
    return both.cos(), both.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate (tokens, heads, head_dim) by the tables' rows of its positions, (tokens, 1, head_dim)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin
