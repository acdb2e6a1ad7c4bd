"""Rotations that spread outliers over all channels and change nothing else, after QuaRot (Ashkboos et al., 2024).

The residual stream is turned by one orthogonal matrix, each head's values by another, both folded into the weights;
the input of `down` is turned online by blocks of a Hadamard matrix whose inverse is folded into `down`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from models.graph.fused import Array, FusedLayer, FusedModel

_LARGEST_BLOCK = 512


@lru_cache(maxsize=16)
def hadamard(size: int) -> Array:
    """The orthonormal, symmetric Sylvester-Hadamard matrix; `size` is a power of two."""
    matrix = np.ones((1, 1), np.float64)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    result: Array = (matrix / np.sqrt(size)).astype(np.float32)
    result.flags.writeable = False
    return result


def power_of_two_in(size: int, cap: int = _LARGEST_BLOCK) -> int:
    """The largest power of two that divides `size`, at most `cap`."""
    return min(size & -size, cap)


def orthogonal(size: int, seed: int) -> npt.NDArray[np.float64]:
    """A random orthogonal matrix: (random orthogonal of the odd part) ⊗ Hadamard of the rest, times random signs."""
    random = np.random.default_rng(seed)
    block = power_of_two_in(size, cap=size)
    odd, triangle = np.linalg.qr(random.standard_normal((size // block, size // block)))
    odd = odd * np.sign(np.diag(triangle))
    signs = random.choice([-1.0, 1.0], size)
    return signs[:, None] * np.kron(odd, hadamard(block).astype(np.float64))


def fold_gains(model: FusedModel) -> FusedModel:
    """Move every RMSNorm gain into the matrix behind it, leaving ones."""

    def fold(layer: FusedLayer) -> FusedLayer:
        return replace(
            layer,
            attention_gain=np.ones_like(layer.attention_gain),
            qkv=layer.qkv * layer.attention_gain[:, None],
            mlp_gain=np.ones_like(layer.mlp_gain),
            gate_up=layer.gate_up * layer.mlp_gain[:, None],
        )

    layers = tuple(fold(layer) for layer in model.layers)
    head = model.head * model.head_gain[:, None]
    return replace(model, layers=layers, head=head, head_gain=np.ones_like(model.head_gain))


def rotate(model: FusedModel, seed: int = 0) -> FusedModel:
    """Turn the residual stream and each head's values; the result computes the same logits.

    Folds the gains first, because a rotation commutes with RMSNorm only where all gains are equal. Keys and queries
    stay as they are: the rotary embedding, and a per-head norm where there is one, lie between them.
    """
    model = fold_gains(model)
    config = model.config
    turn = orthogonal(config.hidden_size, seed)
    value_turn = orthogonal(config.head_dim, seed + 1)

    def turned(layer: FusedLayer) -> FusedLayer:
        qkv = (turn.T @ layer.qkv).reshape(config.hidden_size, -1, config.head_dim)
        qkv[:, -config.num_kv_heads :] = qkv[:, -config.num_kv_heads :] @ value_turn
        bias = layer.qkv_bias
        if bias is not None:
            bias = bias.reshape(-1, config.head_dim).copy()
            bias[-config.num_kv_heads :] = bias[-config.num_kv_heads :] @ value_turn
            bias = bias.reshape(-1).astype(np.float32)
        heads = layer.o.reshape(config.num_heads, config.head_dim, config.hidden_size)
        return replace(
            layer,
            qkv=qkv.reshape(layer.qkv.shape).astype(np.float32),
            qkv_bias=bias,
            o=((value_turn.T @ heads).reshape(layer.o.shape) @ turn).astype(np.float32),
            gate_up=(turn.T @ layer.gate_up).astype(np.float32),
            down=(layer.down @ turn).astype(np.float32),
        )

    return replace(
        model,
        layers=tuple(turned(layer) for layer in model.layers),
        embedding=(model.embedding @ turn).astype(np.float32),
        head=(turn.T @ model.head).astype(np.float32),
    )


def turn_down(layer: FusedLayer, block: int) -> FusedLayer:
    """Put an online Hadamard of `block` before `down` and its inverse (itself: it is symmetric) into `down`."""
    if block <= 1:
        return layer
    blocks = layer.down.reshape(-1, block, layer.down.shape[1])
    turned = (hadamard(block).astype(np.float64) @ blocks).astype(np.float32)
    return replace(layer, down=turned.reshape(layer.down.shape), down_block=block)
