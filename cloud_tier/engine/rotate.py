"""Rotations that spread the few large channels of a decoder's hidden states over all of them, before W8A8 rounds them.

A decoder computes the same when its residual stream is turned by an orthogonal matrix, once the gains of its norms are
folded into the matrices behind them (QuaRot, Ashkboos et al. 2024): the turn is folded into the weights and costs
nothing later. The input of the `down` matrix has no such neighbour: it is turned by small Hadamard blocks as it comes.
"""

from __future__ import annotations

import math

import torch

_BLOCK = 64
_SEED = 2  # of six, the one with the least perplexity of SmolLM2-135M on the selection set; they differ by 0.5 %


class Rotation:
    """An orthogonal matrix of (width, width), as a Kronecker product of small ones: cheap to apply to wide weights."""

    def __init__(self, width: int) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        self._signs = torch.randint(0, 2, (width,), generator=generator).float() * 2 - 1
        self._factors = [_orthogonal(size, generator) for size in _factors(width)]

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Turn the last dimension of (…, width), float32."""
        shape = x.shape
        x = x * self._signs
        sizes = [len(factor) for factor in self._factors]
        x = x.reshape(-1, *sizes)
        for place, factor in enumerate(self._factors, 1):
            x = torch.movedim(torch.movedim(x, place, -1) @ factor, -1, place)
        return x.reshape(shape)

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """Turn the first dimension of (width, …), float32."""
        return self.rows(x.transpose(0, 1)).transpose(0, 1).contiguous()


def hadamard(size: int) -> torch.Tensor:
    """Return the normalised Hadamard matrix of a power of two; it is its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def hadamard_block(width: int) -> int:
    """Return the size of the Hadamard blocks that a width is cut into: the largest power of two, at most 64."""
    return math.gcd(width, _BLOCK)


def _factors(width: int) -> list[int]:
    """Powers of two of at most 64, and what is left: a product of `width`."""
    found = []
    while width > 1 and (block := hadamard_block(width)) > 1:
        found.append(block)
        width //= block
    return [*found, width] if width > 1 or not found else found


def _orthogonal(size: int, generator: torch.Generator) -> torch.Tensor:
    if size & (size - 1) == 0:
        return hadamard(size)
    square, _ = torch.linalg.qr(torch.randn(size, size, generator=generator))
    return torch.as_tensor(square)
