"""The llama family as the toolchain computes it: few, wide matrices in (in, out) order.

Every offline step (gain folding, rotation, smoothing) maps one `FusedModel` to an equivalent one, and three readers
consume it: the torch reference decoder, the ONNX graph builder and the quantizer. Sizes: H hidden, I intermediate,
D head_dim, G kv heads, n query heads per kv head, V vocabulary.

The fused qkv columns are all q heads, then k, then v, with 1/√D folded into q. The n query heads that share a kv
head are neighbours, so a reshape folds them into query rows: grouped-query attention without repeating keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from models.formats.weights import rope_inverse_frequencies
from router.base.errors import ArtifactError

if TYPE_CHECKING:
    from models.formats.weights import ModelConfig

Array = npt.NDArray[np.float32]


class WeightSource(Protocol):
    """What the toolchain needs of `models.formats.weights.Weights`."""

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> Array:
        """Return the float32 tensor under its Hugging Face name, in Hugging Face (rotate-half) rotary layout."""
        ...


@dataclass(frozen=True)
class FusedLayer:
    """One transformer block. Gains are (H,); `None` where the architecture has no such tensor."""

    attention_gain: Array
    qkv: Array  # (H, (n+2)·G·D)
    qkv_bias: Array | None  # ((n+2)·G·D,)
    q_gain: Array | None  # (D,), 1/√D folded in
    k_gain: Array | None  # (D,)
    o: Array  # (G·n·D, H)
    mlp_gain: Array
    gate_up: Array  # (H, 2·I)
    down: Array  # (I, H)
    down_block: int = 0  # size of the online Hadamard blocks before `down`; 0 is none

    def head_gains(self, groups: int, members: int) -> Array | None:
        """The norm gains of all q and k heads, ((n+1)·G, 1, D), where the architecture normalises heads."""
        if self.q_gain is None or self.k_gain is None:
            return None
        return np.stack([self.q_gain] * (members * groups) + [self.k_gain] * groups)[:, None]

    def matrices(self) -> Iterator[tuple[str, Array]]:
        """Yield the four weight matrices under the names of their inputs' statistics."""
        yield "qkv", self.qkv
        yield "o", self.o
        yield "gate_up", self.gate_up
        yield "down", self.down


@dataclass(frozen=True)
class FusedModel:
    """A whole decoder; `head` is (H, V) and a copy even where the embedding is tied, because folding parts them."""

    config: ModelConfig
    embedding: Array  # (V, H)
    layers: tuple[FusedLayer, ...]
    head_gain: Array  # (H,)
    head: Array  # (H, V)

    @property
    def group_size(self) -> int:
        """Query heads that share one kv head."""
        return self.config.num_heads // self.config.num_kv_heads


def fuse(weights: WeightSource) -> FusedModel:
    """Read `weights` into the fused arrangement.

    Raises:
        ArtifactError: head counts do not divide, or the model has a shape this family does not describe.
    """
    config = weights.config
    if config.num_heads % config.num_kv_heads:
        raise ArtifactError(
            f"{config.num_heads} query heads cannot share {config.num_kv_heads} key-value heads evenly: "
            "this model is not of the llama family"
        )
    embedding = weights.tensor("model.embed_tokens.weight")
    head = embedding if config.tie_embeddings else weights.tensor("lm_head.weight")
    return FusedModel(
        config=config,
        embedding=embedding,
        layers=tuple(_fuse_layer(weights, index) for index in range(config.num_layers)),
        head_gain=weights.tensor("model.norm.weight"),
        head=np.ascontiguousarray(head.T),
    )


def _fuse_layer(weights: WeightSource, index: int) -> FusedLayer:
    config = weights.config

    def get(name: str) -> Array:
        return weights.tensor(f"model.layers.{index}.{name}")

    scale = np.float32(config.head_dim**-0.5)
    q, k, v = (get(f"self_attn.{name}_proj.weight") for name in "qkv")
    q_gain = k_gain = qkv_bias = None
    if config.qk_norm:
        q_gain, k_gain = get("self_attn.q_norm.weight") * scale, get("self_attn.k_norm.weight")
    else:
        q = q * scale
    if config.attention_bias:
        q_bias, k_bias, v_bias = (get(f"self_attn.{name}_proj.bias") for name in "qkv")
        q_bias = q_bias if config.qk_norm else q_bias * scale
        qkv_bias = np.concatenate([q_bias, k_bias, v_bias])
    return FusedLayer(
        attention_gain=get("input_layernorm.weight"),
        qkv=np.ascontiguousarray(np.concatenate([q, k, v]).T),
        qkv_bias=qkv_bias,
        q_gain=q_gain,
        k_gain=k_gain,
        o=np.ascontiguousarray(get("self_attn.o_proj.weight").T),
        mlp_gain=get("post_attention_layernorm.weight"),
        gate_up=np.ascontiguousarray(np.concatenate([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")]).T),
        down=np.ascontiguousarray(get("mlp.down_proj.weight").T),
    )


def rope_tables(config: ModelConfig, positions: int) -> tuple[Array, Array]:
    """Cosines and sines of the rotary embedding for positions 0 … positions-1, each (positions, D)."""
    angle = np.outer(np.arange(positions, dtype=np.float64), rope_inverse_frequencies(config))
    angle = np.concatenate([angle, angle], axis=1)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def half_turn(head_dim: int) -> Array:
    """The matrix R (D, D) with x @ R = rotate_half(x) = concat(-x₂, x₁)."""
    half = head_dim // 2
    turn = np.zeros((head_dim, head_dim), np.float32)
    turn[np.arange(half) + half, np.arange(half)] = -1.0
    turn[np.arange(half), np.arange(half) + half] = 1.0
    return turn
