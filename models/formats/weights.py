"""Weights of the llama family as float32 arrays under Hugging Face names, whatever file they come from. Torch-free.

`open_weights` reads a GGUF file or a Hugging Face directory (config.json + safetensors, one file or sharded).
Rotary layout is Hugging Face's (halves, not interleaved pairs).
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from models.formats.config import ModelConfig, config_from_gguf, config_from_hf
from models.formats.safetensors import SafetensorsFile
from router.base.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from models.formats.gguf import GgufFile

__all__ = ["ModelConfig", "Weights", "open_weights", "rope_inverse_frequencies"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

_GGUF_TOP = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class _TensorSource(Protocol):
    def read(self, name: str) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True)
class Weights:
    """Weights that are read when asked for.

    Attributes:
        config: the shape of this model, after any pruning.
        path: the GGUF file or the directory it was opened from.
        layers: original index of each kept layer.
    """

    config: ModelConfig
    path: Path
    layers: tuple[int, ...]
    _source: _TensorSource

    @property
    def names(self) -> tuple[str, ...]:
        """All tensor names, in the order of a forward pass; `lm_head.weight` only where the head is untied."""
        config = self.config
        parts = ["input_layernorm.weight"]
        for projection in ("q_proj", "k_proj", "v_proj"):
            parts.append(f"self_attn.{projection}.weight")
            if config.attention_bias:
                parts.append(f"self_attn.{projection}.bias")
        if config.qk_norm:
            parts += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        parts += ["self_attn.o_proj.weight", "post_attention_layernorm.weight"]
        parts += [f"mlp.{projection}_proj.weight" for projection in ("gate", "up", "down")]
        body = [f"model.layers.{layer}.{part}" for layer in range(config.num_layers) for part in parts]
        return (EMBEDDING, *body, FINAL_NORM, *(() if config.tie_embeddings else (HEAD,)))

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(int(np.prod(_expected_shape(name, self.config))) for name in self.names)

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Return a new, writable, C-contiguous float32 array; linear weights are (out, in).

        `lm_head.weight` of a model with tied embeddings is the embedding.

        Raises:
            ArtifactError: the model has no such tensor, or the file is damaged.
        """
        if name == HEAD and self.config.tie_embeddings:
            name = EMBEDDING
        value = self._source.read(self._original(name))
        expected = _expected_shape(name, self.config)
        if value.shape != expected:
            raise ArtifactError(f"{self.path}: `{name}` is {value.shape}, the configuration says {expected}")
        return np.ascontiguousarray(value)

    def keep_layers(self, layers: Sequence[int]) -> Weights:
        """Return the model with only these layers, renumbered from 0.

        Args:
            layers: ascending indices into this model's layers.

        Raises:
            ArtifactError: an index is out of range, or they do not ascend.
        """
        kept = tuple(layers)
        ascending = all(earlier < later for earlier, later in itertools.pairwise(kept))
        if not kept or not ascending or kept[0] < 0 or kept[-1] >= self.config.num_layers:
            raise ArtifactError(
                f"cannot keep layers {list(kept)}: give ascending indices from 0 to {self.config.num_layers - 1}"
            )
        return replace(
            self,
            config=replace(self.config, num_layers=len(kept)),
            layers=tuple(self.layers[index] for index in kept),
        )

    def _original(self, name: str) -> str:
        if not name.startswith("model.layers."):
            return name
        index, _, rest = name.removeprefix("model.layers.").partition(".")
        if not index.isdecimal() or int(index) >= len(self.layers):
            raise ArtifactError(f"there is no tensor `{name}`: the model has {len(self.layers)} layers")
        return f"model.layers.{self.layers[int(index)]}.{rest}"


def open_weights(path: Path, layers: Sequence[int] | None = None) -> Weights:
    """Open a GGUF file or a Hugging Face directory.

    Args:
        layers: which to keep, see `Weights.keep_layers`; None keeps all.

    Raises:
        ArtifactError: nothing readable is there, the architecture is not of the llama family, or it lacks a layer.
    """
    weights = _open(path)
    return weights if layers is None else weights.keep_layers(layers)


def _open(path: Path) -> Weights:
    if path.is_dir():
        config = config_from_hf(path)
        return Weights(config, path, tuple(range(config.num_layers)), _HfSource(path))
    if path.is_file():
        from models.formats.gguf import GgufFile  # noqa: PLC0415 — only where a GGUF file is really read

        file = GgufFile(path)
        config = config_from_gguf(file)
        return Weights(config, path, tuple(range(config.num_layers)), _GgufSource(file, config))
    raise ArtifactError(f"no model at {path}: give a .gguf file or a directory with config.json and safetensors")


def rope_inverse_frequencies(config: ModelConfig) -> npt.NDArray[np.float64]:
    """Return the rotary frequencies, float64 (head_dim / 2,), with the model's scaling applied.

    `linear` divides by its factor. `llama3` (Llama 3.1's config: factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings) leaves short wavelengths, divides long ones and blends between.
    """
    half = np.arange(0, config.head_dim, 2, dtype=np.float64)
    frequencies: npt.NDArray[np.float64] = 1.0 / config.rope_theta ** (half / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return frequencies / factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original_tokens = float(scaling["original_max_position_embeddings"])
    turns = original_tokens * frequencies / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / factor)


class _HfSource:
    """Tensors of a Hugging Face directory; shards are opened when first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, SafetensorsFile] = {}
        index = directory / "model.safetensors.index.json"
        self._shard_of: dict[str, str] = {}
        if index.is_file():
            try:
                self._shard_of = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise ArtifactError(f"{index}: not a safetensors index: {error!r}; pull the model again") from error
            missing = sorted({shard for shard in self._shard_of.values() if not (directory / shard).is_file()})
            if missing:
                raise ArtifactError(f"{directory}: shards are missing: {', '.join(missing)}; pull the model again")
        else:
            single = self._open("model.safetensors")
            self._shard_of = dict.fromkeys(single.names, "model.safetensors")

    def read(self, name: str) -> npt.NDArray[np.float32]:
        shard = self._shard_of.get(name)
        if shard is None:
            raise ArtifactError(f"{self._directory}: has no tensor `{name}`")
        return self._open(shard).read(name)

    def _open(self, shard: str) -> SafetensorsFile:
        if shard not in self._files:
            if Path(shard).name != shard:
                raise ArtifactError(f"{self._directory}: the index points outside of the directory: {shard!r}")
            self._files[shard] = SafetensorsFile(self._directory / shard)
        return self._files[shard]


class _GgufSource:
    """Tensors of a GGUF file under Hugging Face names; undoes the row order that llama GGUFs give q and k."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config

    def read(self, name: str) -> npt.NDArray[np.float32]:
        value = self._file.read(self._gguf_name(name))
        if self._config.model_type == "llama":
            if ".q_proj." in name:
                return _from_pairs(value, self._config.num_heads)
            if ".k_proj." in name:
                return _from_pairs(value, self._config.num_kv_heads)
        return value

    def _gguf_name(self, name: str) -> str:
        if name in _GGUF_TOP:
            return _GGUF_TOP[name]
        index, _, rest = name.removeprefix("model.layers.").partition(".")
        part, _, kind = rest.rpartition(".")
        if part not in _GGUF_LAYER:
            raise ArtifactError(f"{self._file.path}: has no tensor `{name}`")
        return f"blk.{index}.{_GGUF_LAYER[part]}.{kind}"


def _from_pairs(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder each head's output rows from interleaved rotary pairs to halves."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    halves: npt.NDArray[np.float32] = pairs.swapaxes(1, 2).reshape(rows.shape)
    return halves


def _expected_shape(name: str, config: ModelConfig) -> tuple[int, ...]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    part, _, kind = name.rpartition(".")
    shapes = {
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    shape = shapes.get(part.rpartition(".")[2], (hidden,))
    return shape[:1] if kind == "bias" else shape
