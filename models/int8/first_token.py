"""What the first token of a sequence leaves behind, kept in float32 because INT8 scales cannot hold it.

Models of this kind park attention on the first position: a few of its activations grow a thousand times larger than
any other (massive activations, Sun et al., 2024), far beyond what one scale a tensor can carry. An artifact therefore
ships the first token's keys, values and logits, and no runtime computes them. That covers chats, which all begin with
the same token. Another first token grows the same giants, and from the layer behind them on its keys and values are
those of the shipped one within a few percent, whatever it is: from there on (`settled_layer`) a runtime takes the
shipped ones for it, and below its own, where INT8 holds them.
"""

from __future__ import annotations

import numpy as np
import torch

from models.graph.artifact import Prefix
from models.graph.decoder import Decoder, Inputs
from models.graph.fused import Array, FusedModel

_SAMPLE = 128  # tokens spread over the vocabulary
_ALIKE = 0.2  # of its norm, by which half of them may differ from the shipped one


def first_token(model: FusedModel, token: int) -> Prefix:
    """Return what is shipped for `token`."""
    ids = [token, *(int(other) for other in np.linspace(0, model.config.vocab_size - 1, _SAMPLE))]
    keys, values, logits = _alone(model, ids)
    own = [np.ascontiguousarray(part[:, 0]) for part in (keys, values)]
    return Prefix((token,), own[0], own[1], np.ascontiguousarray(logits[0]), settled_layer(keys, values))


def settled_layer(keys: Array, values: Array) -> int | None:
    """Return the layer from which the first position is the same whatever token stands there, None if none is.

    Args:
        keys, values: float32 (layers, tokens, G, 1, D) at position 0; the first token is the one to be compared with.
    """
    settled = None
    for layer in reversed(range(len(keys))):
        if max(_median_distance(part[layer]) for part in (keys, values)) > _ALIKE:
            break
        settled = layer
    return settled


def _median_distance(rows: Array) -> float:
    flat = rows.reshape(len(rows), -1)
    distances = np.linalg.norm(flat[1:] - flat[0], axis=1) / np.maximum(np.linalg.norm(flat[1:], axis=1), 1e-12)
    return float(np.median(distances))


def _alone(model: FusedModel, ids: list[int]) -> tuple[Array, Array, Array]:
    """Keys and values (layers, tokens, G, 1, D) and logits (tokens, V) of sequences of one token each."""
    config, count = model.config, len(ids)
    nothing = [torch.zeros(count, config.num_kv_heads, 0, config.head_dim)] * len(model.layers)
    zeros = torch.zeros(count, 1, dtype=torch.int64)
    step = Decoder(model, torch.float64)(
        Inputs(torch.tensor(ids)[:, None], zeros, torch.zeros(count, 1, 1, 1), zeros, nothing, nothing)
    )
    keys, values = (torch.stack(part).to(torch.float32).numpy() for part in (step.new_k, step.new_v))
    return keys, values, step.logits[:, 0].to(torch.float32).numpy()
