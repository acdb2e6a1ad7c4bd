"""The shape of a llama-family model, read from a Hugging Face config.json or from GGUF metadata."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from router.base.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from models.formats.gguf import GgufFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


_REMEDY = "it is damaged or not of a kind that is served here: pull the model again, or choose another"


class Unfit(ValueError):
    """No model can have these values."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions and conventions of one model.

    Attributes:
        head_dim: width of one head; Qwen3's differs from hidden_size / num_heads.
        rope_scaling: None, or `rope_type` `linear` (factor) or `llama3` (factor, low_freq_factor,
            high_freq_factor, original_max_position_embeddings).
        attention_bias: q, k and v projections have biases (o never has one).
        qk_norm: q and k heads are RMS-normalised before the rotary embedding.
        eos_token_ids: any of these ends generation.
        model_type: `llama`, `qwen2` or `qwen3`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_context_tokens: int
    tie_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    model_type: str

    def __post_init__(self) -> None:
        """Raise `Unfit` for what no model can have."""
        if self.num_heads < 1:
            raise Unfit(f"a model needs at least one query head, not {self.num_heads}")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise Unfit(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads")
        if self.head_dim < 2 or self.head_dim % 2:
            raise Unfit(f"head_dim {self.head_dim} is odd: the rotary embedding needs pairs")
        if self.num_layers < 1:
            raise Unfit(f"a model needs at least one layer, not {self.num_layers}")


def config_from_hf(directory: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json`, which may name more end-of-turn tokens).

    Raises:
        ArtifactError: it is missing or damaged, or the architecture or a feature of it cannot be served.
    """
    path = directory / "config.json"
    tree = read_json(path)
    model_type = str(tree.get("model_type"))
    _refuse_unknown(tree, model_type, path)
    try:
        heads = int(tree["num_attention_heads"])
        hidden = int(tree["hidden_size"])
        default_head_dim = 128 if model_type == "qwen3" else hidden // max(1, heads)
        return ModelConfig(
            vocab_size=int(tree["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(tree["intermediate_size"]),
            num_layers=int(tree["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(tree.get("num_key_value_heads") or heads),
            head_dim=int(tree.get("head_dim") or default_head_dim),
            rms_norm_eps=float(tree.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(tree),
            rope_scaling=_rope_scaling(tree.get("rope_parameters") or tree.get("rope_scaling"), path),
            max_context_tokens=int(tree["max_position_embeddings"]),
            tie_embeddings=bool(tree.get("tie_word_embeddings", False)),
            attention_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3",
            bos_token_id=_first(tree.get("bos_token_id")),
            eos_token_ids=eos_ids_of(directory, tree),
            model_type=model_type,
        )
    except KeyError as error:
        raise ArtifactError(f"{path}: the key {error} is missing; {_REMEDY}") from error
    except Unfit as error:
        raise ArtifactError(f"{path}: {error}; {_REMEDY}") from error
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{path}: a value has the wrong type: {error}; {_REMEDY}") from error


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the configuration out of GGUF metadata.

    Raises:
        ArtifactError: the architecture or a feature of it cannot be served, or a key is missing.
    """
    data = file.metadata
    arch = str(data.get("general.architecture"))
    if arch not in ARCHITECTURES:
        raise ArtifactError(f"{file.path}: architecture `{arch}` cannot be served; known: {', '.join(ARCHITECTURES)}")
    if "rope_freqs.weight" in file.tensors:
        raise ArtifactError(
            f"{file.path}: its rotary scaling is stored as a tensor; use the Hugging Face directory of this model"
        )
    try:
        hidden, heads = int(data[f"{arch}.embedding_length"]), int(data[f"{arch}.attention.head_count"])
        return ModelConfig(
            vocab_size=file.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            intermediate_size=int(data[f"{arch}.feed_forward_length"]),
            num_layers=int(data[f"{arch}.block_count"]),
            num_heads=heads,
            num_kv_heads=int(data.get(f"{arch}.attention.head_count_kv", heads)),
            head_dim=int(data.get(f"{arch}.attention.key_length", hidden // max(1, heads))),
            rms_norm_eps=_shortest(data[f"{arch}.attention.layer_norm_rms_epsilon"]),
            rope_theta=_shortest(data.get(f"{arch}.rope.freq_base", 10000.0)),
            rope_scaling=_gguf_rope_scaling(data, arch, file.path),
            max_context_tokens=int(data[f"{arch}.context_length"]),
            tie_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            bos_token_id=_first(data.get("tokenizer.ggml.bos_token_id")),
            eos_token_ids=gguf_eos_ids(data),
            model_type=arch,
        )
    except KeyError as error:
        raise ArtifactError(f"{file.path}: the GGUF metadata lack {error}; {_REMEDY}") from error
    except Unfit as error:
        raise ArtifactError(f"{file.path}: {error}; {_REMEDY}") from error
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{file.path}: a value has the wrong type: {error}; {_REMEDY}") from error


def gguf_eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a sequence, a turn or a message, the end of a sequence first."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return tuple(dict.fromkeys(int(metadata[key]) for key in keys if key in metadata))


def eos_ids_of(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Join the end-of-sequence ids of a config.json tree and of `generation_config.json` beside it, ascending."""
    generation = directory / "generation_config.json"
    found: set[int] = set()
    for tree in (config, read_json(generation) if generation.is_file() else {}):
        value = tree.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(int(token) for token in found))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ArtifactError: the file is missing, unreadable, or holds something else.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ArtifactError(f"{path}: holds a {type(tree).__name__}, not an object")
    return tree


def _refuse_unknown(tree: Mapping[str, Any], model_type: str, path: Path) -> None:
    if model_type not in ARCHITECTURES:
        raise ArtifactError(f"{path}: model_type `{model_type}` cannot be served; known: {', '.join(ARCHITECTURES)}")
    refused = {
        "quantization_config": tree.get("quantization_config") is not None,
        "hidden_act": tree.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(tree.get("mlp_bias")),
        "attention_bias": bool(tree.get("attention_bias")) and model_type != "qwen2",
        "use_sliding_window": bool(tree.get("use_sliding_window")),
    }
    for key, is_refused in refused.items():
        if is_refused:
            raise ArtifactError(f"{path}: `{key}` = {tree.get(key)!r} cannot be served by the built-in decoder")


def _rope_theta(tree: Mapping[str, Any]) -> float:
    """`rope_parameters` is transformers 5's home of the value, the top level was transformers 4's."""
    nested = tree.get("rope_parameters") or {}
    return float(nested.get("rope_theta", tree.get("rope_theta", 10000.0)))


def _rope_scaling(tree: Mapping[str, Any] | None, path: Path) -> dict[str, Any] | None:
    if not tree:
        return None
    kind = str(tree.get("rope_type", tree.get("type", "default")))
    if kind == "default":
        return None
    if kind not in _ROPE_KEYS:
        raise ArtifactError(f"{path}: rotary scaling `{kind}` cannot be served; known: default, linear, llama3")
    return {"rope_type": kind, **{key: float(tree[key]) for key in _ROPE_KEYS[kind]}}


def _gguf_rope_scaling(data: Mapping[str, Any], arch: str, path: Path) -> dict[str, Any] | None:
    kind = data.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    return _rope_scaling({"rope_type": kind, "factor": data.get(f"{arch}.rope.scaling.factor", 1.0)}, path)


def _shortest(value: float) -> float:
    """Undo the widening of a float32: 9.999999747378752e-06 was written as 1e-05."""
    short = float(f"{value:.7g}")
    return short if struct.pack("<f", short) == struct.pack("<f", value) else float(value)


def _first(value: object) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value is None else int(str(value))
