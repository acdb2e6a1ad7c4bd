"""Smoothing: move activation outliers of single channels into the weights behind them, exactly.

After SmoothQuant (Xiao et al., 2022): s_j = max|x_j|^α / max|w_j|^(1-α) per input channel, the input is divided and
the weight row multiplied by it. Here the division is folded too: into RMSNorm's gain (qkv, gate_up, head), into the
value columns (o) and into the up columns (down).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from models.graph.fused import Array, FusedLayer, FusedModel

ALPHA = 0.5
_FLOOR = 1e-5  # of the largest: channels that are never used must not draw the factors apart


def factors(inputs: Array, weights: Array) -> Array:
    """Smoothing factors with geometric mean 1.

    Args:
        inputs, weights: largest magnitude per channel, both of the same shape.
    """
    x, w = (np.maximum(part.astype(np.float64), max(float(part.max()) * _FLOOR, 1e-12)) for part in (inputs, weights))
    logs = ALPHA * np.log(x) - (1 - ALPHA) * np.log(w)
    result: Array = np.exp(logs - logs.mean()).astype(np.float32)
    return result


def smooth(model: FusedModel, largest: Mapping[tuple[int, str], Array]) -> FusedModel:
    """Return an equivalent model whose matrices' inputs have fewer outlier channels.

    Args:
        largest: (layer, matrix) → largest magnitude per input channel (in,); for `down` under the name `down_raw`.
    """
    layers = tuple(_smooth_layer(model, layer, index, largest) for index, layer in enumerate(model.layers))
    head = factors(largest[len(layers), "head"], np.abs(model.head).max(axis=1))
    return replace(model, layers=layers, head_gain=model.head_gain / head, head=model.head * head[:, None])


def _smooth_layer(
    model: FusedModel, layer: FusedLayer, index: int, largest: Mapping[tuple[int, str], Array]
) -> FusedLayer:
    groups, dim = model.config.num_kv_heads, model.config.head_dim
    qkv = factors(largest[index, "qkv"], np.abs(layer.qkv).max(axis=1))
    gate_up = factors(largest[index, "gate_up"], np.abs(layer.gate_up).max(axis=1))
    down = factors(largest[index, "down_raw"], np.abs(layer.down).max(axis=1))
    # The query heads of a group mix the same values: their channels share one factor.
    shared = (groups, model.group_size, dim)
    value = factors(
        largest[index, "o"].reshape(shared).max(axis=1), np.abs(layer.o).max(axis=1).reshape(shared).max(axis=1)
    )
    columns = np.ones(layer.qkv.shape[1], np.float32)
    columns[-groups * dim :] = value.reshape(-1)
    wide = layer.down.shape[0]
    up_columns = np.concatenate([np.ones(wide, np.float32), down])
    return replace(
        layer,
        attention_gain=layer.attention_gain / qkv,
        qkv=layer.qkv * qkv[:, None] / columns,
        qkv_bias=None if layer.qkv_bias is None else layer.qkv_bias / columns,
        o=layer.o * np.broadcast_to(value[:, None], shared).reshape(-1, 1),
        mlp_gain=layer.mlp_gain / gate_up,
        gate_up=layer.gate_up * gate_up[:, None] / up_columns,
        down=layer.down * down[:, None],
    )
