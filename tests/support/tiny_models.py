"""Random models of a few thousand parameters, in every shape that the family has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from models.formats.config import ModelConfig
from models.graph.artifact import Prefix
from models.graph.fused import FusedModel
from models.graph.graph import write_graph
from models.measure.runner import OnnxRunner

SHAPES: dict[str, dict[str, Any]] = {
    "grouped, tied": {},
    "one group, untied": {"num_kv_heads": 2, "tie_embeddings": False},
    "odd width, as SmolLM2": {"hidden_size": 72, "num_heads": 9, "num_kv_heads": 3, "head_dim": 8},
    "biases, as Qwen2": {"attention_bias": True, "model_type": "qwen2"},
    "head norms and wide heads, as Qwen3": {"qk_norm": True, "head_dim": 32, "model_type": "qwen3"},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


def tiny_config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_context_tokens": 128,
        "tie_embeddings": True,
        "attention_bias": False,
        "qk_norm": False,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "model_type": "llama",
    }
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


class TinyWeights:
    """A `WeightSource` of random tensors; gains are far from 1, so that forgetting to fold one shows."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        self._seed = seed

    def tensor(self, name: str) -> np.ndarray:
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, wide = config.hidden_size, config.intermediate_size
        random = np.random.default_rng([self._seed, *name.encode()])
        if "norm" in name:
            width = config.head_dim if "q_norm" in name or "k_norm" in name else hidden
            return random.uniform(0.3, 2.0, width).astype(np.float32)
        if name.endswith(".bias"):
            return random.standard_normal(q if ".q_proj" in name else kv, np.float32)
        shapes = {
            "embed_tokens": (config.vocab_size, hidden),
            "lm_head": (config.vocab_size, hidden),
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
            "gate_proj": (wide, hidden),
            "up_proj": (wide, hidden),
            "down_proj": (hidden, wide),
        }
        shape = next(shape for part, shape in shapes.items() if part in name)
        return random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[1]))


def place(model: FusedModel, folder: Path, prefix: Prefix | None = None) -> OnnxRunner:
    """Finish a folder that holds a graph, as far as the runner needs it."""
    config = model.config
    manifest = {
        "num_layers": config.num_layers,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "prefix_token_ids": list(prefix.token_ids) if prefix else [],
        "settled_layer": prefix.settled_layer if prefix else None,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if prefix:
        np.savez(folder / "prefix.npz", k=prefix.k, v=prefix.v)
    return OnnxRunner(folder, threads=1)


def written(model: FusedModel, folder: Path) -> OnnxRunner:
    write_graph(model, folder)
    return place(model, folder)
