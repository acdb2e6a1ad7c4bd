"""Tiny random models of every served architecture, as Hugging Face directories, and a core to run them on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers

from cloud_tier.engine.attention import PagedAttention
from cloud_tier.engine.core import EngineCore
from cloud_tier.engine.messages import Compute
from cloud_tier.engine.model import Computed, Model
from cloud_tier.engine.parallel import Group
from cloud_tier.engine.protocol import EngineConfig, EngineRequest
from cloud_tier.engine.worker import load_draft
from models.formats.weights import open_weights
from router.base.clock import MonotonicClock
from router.values.logprobs import DrawnToken
from router.values.sampling import SamplingParams
from tests.support import tiny_tokenizer

torch.set_num_threads(1)

VOCAB = 301
PIECES = 330
"""More than `tiny_tokenizer` has: what the models of `save_with_tokenizer` speak, padded as real ones are."""
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3-tied": ("Llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": _LINEAR_ROPE}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def reference(name: str) -> Any:
    """A random transformers model, the same every time."""
    family, options = ARCHITECTURES[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**_SHAPE, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def save_with_tokenizer(folder: Path) -> Path:
    """Save a random llama beside a byte-level tokenizer of its vocabulary: what it says is text."""
    path = folder / "speaking"
    config = transformers.LlamaConfig(**{**_SHAPE, "vocab_size": PIECES, "eos_token_id": 2, "bos_token_id": 1})
    torch.manual_seed(11)
    transformers.LlamaForCausalLM(config).eval().save_pretrained(path)
    tiny_tokenizer.backend().save(str(path / "tokenizer.json"))
    return path


def save(name: str, folder: Path) -> Path:
    """Save the random model as a Hugging Face directory."""
    path = folder / name
    reference(name).save_pretrained(path)
    return path


def save_with_nan_embedding(folder: Path, token: int) -> Path:
    """Save a llama whose embedding of one token is no number (its head is its own and sound)."""
    model = reference("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = torch.nan
    path = folder / "spoiled"
    model.save_pretrained(path)
    return path


def small(weights: Path, **options: Any) -> EngineConfig:
    """A configuration that fits the tiny models."""
    values: dict[str, Any] = {"kv_cache_tokens": 512, "token_budget": 24, "max_running": 6, "max_context_tokens": 200}
    return EngineConfig(weights=str(weights), **{**values, **options})


class Bench:
    """A core with its model, and the one that drafts, in this process; keeps the logits of every step."""

    def __init__(self, config: EngineConfig, *, gathered: bool = False) -> None:
        weights = open_weights(Path(config.weights), config.layers)
        context_tokens = min(config.max_context_tokens or 10**9, weights.config.max_context_tokens)
        self.model = Model(weights, config, Group(), context_tokens)
        if gathered:  # the GPU's way
            heads = self.model.config.num_heads, self.model.config.num_kv_heads
            self.model.attention = PagedAttention(self.model.attention.cache, heads, config.kv_block_tokens)
        self.draft = load_draft(config, self.model)
        self.drafting: list[Compute] = []
        self.logits: list[torch.Tensor] = []
        self.core = EngineCore(
            config,
            self._compute,
            vocab_size=weights.config.vocab_size,
            context_tokens=context_tokens,
            clock=MonotonicClock(),
            draft=None if self.draft is None else self._compute_draft,
        )
        self.answers: dict[int, list[int]] = {}
        self.failures: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.logprobs: dict[int, list[DrawnToken]] = {}
        self.prompt_logprobs: dict[int, list[DrawnToken]] = {}
        self.steps = 0

    def add(self, handle: int, prompt: list[int], max_tokens: int = 12, **options: Any) -> None:
        """Send one request; greedy unless `sampling` says otherwise."""
        sampling = options.pop("sampling", SamplingParams(temperature=0))
        self.answers[handle] = []
        self.core.add(handle, EngineRequest(f"r{handle}", tuple(prompt), sampling, max_tokens, **options))

    def step(self) -> None:
        """Run one step and check that no block went astray."""
        for brought in self.core.step():
            self.answers[brought.handle] += brought.token_ids
            self.logprobs.setdefault(brought.handle, []).extend(brought.logprobs)
            self.prompt_logprobs.setdefault(brought.handle, []).extend(brought.prompt_logprobs)
            if brought.failure is not None:
                self.failures[brought.handle] = brought.failure
            if brought.cached_tokens is not None:
                assert brought.handle not in self.cached, "told twice"
                self.cached[brought.handle] = brought.cached_tokens
        self.core.check()

    def run(self) -> dict[int, list[int]]:
        """Step until nothing is left to do; return every answer."""
        while self.core.busy or len(self.core.compiling):
            if not self.core.busy:
                time.sleep(0.001)
            self.step()
        return self.answers

    def _compute_draft(self, step: Compute) -> Computed:
        assert self.draft is not None
        self.drafting.append(step)
        return self.draft.forward(step.segments, released=step.released)

    def _compute(self, step: Compute) -> Computed:
        self.steps += 1
        computed = self.model.forward(step.segments, zero_blocks=step.zero_blocks, released=step.released)
        if computed.logits is not None:
            self.logits.append(computed.logits.clone())
        return computed


def prompt(length: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
