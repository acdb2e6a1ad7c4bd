"""An engine without a model: it says a fixed text token by token, and notices every leak."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from cloud_tier.engine.protocol import (
    EngineChunk,
    EngineConfig,
    EngineInfo,
    EngineLoad,
    EngineOutage,
    EngineRequest,
    EngineState,
)
from models.text.chat import ChatTemplate, PromptEncoder
from models.text.tokenizer import Tokenizer
from router.base.clock import Clock
from router.base.errors import ConfigError, OverspillError, ReplicaBroken, ReplicaUnreachable
from router.values.chunk import FinishReason
from router.values.replica import ReplicaInfo, SpeedPrior

EOS = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and an end-of-turn token: ids and text are easy to tell apart, and no file is needed."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    return Tokenizer(backend, eos_ids=[backend.get_vocab()[EOS]], bos_id=None, adds_bos=False)


def byte_prompts() -> PromptEncoder:
    return PromptEncoder(byte_tokenizer(), ChatTemplate(TEMPLATE))


def replica_info(variant: str = "toy-fp32", rung: int = 0, context_tokens: int = 512) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=f"engine/{variant}",
        endpoint=f"engine/{variant}",
        tier="cloud",
        remote=False,
        family="toy",
        variant=variant,
        rung=rung,
        quality=1.0 - rung / 10,
        context_tokens=context_tokens,
        prior=SpeedPrior(1000.0, 100.0, source="a test"),
    )


class FakeEngine:
    """Says `says`, `chunk_tokens` at a time, with `gap_s` between chunks. `die` breaks every stream off."""

    says = "The capital of France is Paris."
    gap_s = 0.0
    chunk_tokens = 1
    cached_tokens = 0

    def __init__(self, config: EngineConfig | None = None, clock: Clock | None = None) -> None:
        self.config = config or EngineConfig(weights="none")
        self.tokenizer = byte_tokenizer()
        self.state = EngineState.STOPPED
        self.restarts = 0
        self.refuses: OverspillError | None = None
        self.seen: list[EngineRequest] = []
        self.open = 0
        self.most_open = 0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self._dead = asyncio.Event()
        self._info: EngineInfo | None = None
        self.ready_in_s: float | None = 2.5

    @property
    def ready(self) -> bool:
        return self.state is EngineState.READY

    @property
    def outage(self) -> EngineOutage | None:
        return None if self.ready else EngineOutage(f"the engine is {self.state.value}", self.ready_in_s)

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    async def start(self) -> None:
        self.state = EngineState.STARTING
        if self.refuses is not None:
            self.state = EngineState.STOPPED
            raise self.refuses
        await asyncio.sleep(0)
        self._dead.clear()
        self._info = EngineInfo(
            vocab_size=257,
            context_tokens=self.config.max_context_tokens or 512,
            max_running=4,
            tensor_parallel=1,
            load_s=0.1,
            pids=(1,),
        )
        self.state = EngineState.READY

    async def stop(self, drain_s: float = 0.0) -> None:
        self._end(EngineState.STOPPED)

    def die(self) -> None:
        """Every rank is gone; the supervisor has begun to restart them."""
        self._end(EngineState.RESTARTING)
        self.restarts += 1

    def revive(self) -> None:
        self._dead.clear()
        self.state = EngineState.READY

    def _end(self, state: EngineState) -> None:
        self.state = state
        self._dead.set()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        if not self.ready:
            raise ReplicaUnreachable(f"the engine is {self.state.value}")
        self.seen.append(request)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            ids = self.tokenizer.encode(self.says)
            endless = request.sampling.ignore_eos
            sent = 0
            while sent < request.max_tokens and (endless or sent < len(ids)):
                await self._next_step(sent, request)
                size = min(self.chunk_tokens, request.max_tokens - sent)
                piece = tuple(ids[(sent + i) % len(ids)] for i in range(size) if endless or sent + i < len(ids))
                cached_tokens = None if sent else self.cached_tokens
                sent += len(piece)
                last = FinishReason.LENGTH if sent == request.max_tokens else None
                yield EngineChunk(piece, last, cached_tokens)
            if sent < request.max_tokens:
                yield EngineChunk((), FinishReason.STOP, closed=True)
        finally:
            self.open -= 1

    async def _next_step(self, sent: int, request: EngineRequest) -> None:
        await asyncio.sleep(self.gap_s)
        waits = [asyncio.ensure_future(e.wait()) for e in (self.may_go_on, self._dead)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._dead.is_set():
            raise ReplicaBroken("rank 0 is gone") if sent else ReplicaUnreachable("rank 0 is gone")

    def limit_lines(self, lines: int | None) -> None:
        """It computes whatever it is asked."""

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=self.open,
            queued_prefill_tokens=3 * self.open,
            pending_decode_tokens=5 * self.open,
            kv_blocks_total=64,
            kv_blocks_free=64 - self.open,
            step_s=0.01,
            preemptions=2,
        )


def broken_config(*_: object) -> FakeEngine:
    """An engine whose configuration does not fit its model."""
    engine = FakeEngine()
    engine.refuses = ConfigError("tensor_parallel = 9: the model has 3 KV heads")
    return engine


def toy_model_directory(folder: Path) -> Path:
    """A Hugging Face directory with the smallest llama there is: enough to line up, not to answer."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (257, 16),
        "model.norm.weight": (16,),
        "model.layers.0.input_layernorm.weight": (16,),
        "model.layers.0.post_attention_layernorm.weight": (16,),
        "model.layers.0.self_attn.q_proj.weight": (16, 16),
        "model.layers.0.self_attn.k_proj.weight": (8, 16),
        "model.layers.0.self_attn.v_proj.weight": (8, 16),
        "model.layers.0.self_attn.o_proj.weight": (16, 16),
        "model.layers.0.mlp.gate_proj.weight": (32, 16),
        "model.layers.0.mlp.up_proj.weight": (32, 16),
        "model.layers.0.mlp.down_proj.weight": (16, 32),
    }
    draw = np.random.default_rng(0)
    weights = {name: draw.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, str(folder / "model.safetensors"))
    byte_tokenizer().save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
