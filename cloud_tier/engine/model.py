"""The decoder of the Llama family (Llama 2/3, SmolLM2, Qwen2, Qwen3) on one tensor-parallel rank.

All tokens of a step, of all its sequences, go through every matrix product together; only attention tells them apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F

from cloud_tier.engine.attention import Attention, KvCache, PagedAttention
from cloud_tier.engine.linear import Int8Linear, Linear, Normed, PackedLinear, Product, linear
from cloud_tier.engine.messages import Compute, Segment
from cloud_tier.engine.parallel import Group
from cloud_tier.engine.rope import rope_tables, rotate_
from cloud_tier.engine.rotate import Rotation
from cloud_tier.engine.rows import RowAttention
from cloud_tier.engine.sharding import Shard, Span, shard, split
from cloud_tier.engine.threads import Threads
from models.formats.weights import rope_inverse_frequencies

if TYPE_CHECKING:
    from cloud_tier.engine.protocol import EngineConfig
    from models.formats.weights import ModelConfig, Weights


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's share. `qkv` is query, key, value rows stacked, behind their norm; `gate_up` likewise."""

    qkv: Product
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Product
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class Computed:
    """What one step brought.

    Attributes:
        logits: float32 (rows, vocab): of each segment that draws, in their order, one for its last token and one
            for each of `earlier`; None on ranks other than 0, or if none draws.
        finite: one for each segment: its hidden states and logits are all numbers. Empty on ranks other than 0.
    """

    logits: torch.Tensor | None
    finite: list[bool]


def _never() -> bool:
    return False


class Deserted(Exception):
    """Nobody waits for the step any more: it was left between two layers, and nothing of it counts."""


def _go_on(deserted: Callable[[], bool]) -> None:
    if deserted():
        raise Deserted


class Model:
    """One rank's share of the weights, its KV cache, and the forward pass.

    Attributes:
        config: the model's own, after layers were dropped.
        context_tokens: positions the rotary tables cover: prompt and answer together.
        group: the ranks that hold the other shares.
        attention: over this rank's heads.
    """

    def __init__(self, weights: Weights, engine: EngineConfig, group: Group, context_tokens: int) -> None:
        self.config = weights.config
        self.context_tokens = context_tokens
        self.group = group
        # W8A8 computes in float32 between its products, and keeps keys and values in half of that.
        int8 = engine.dtype == "int8"
        self._dtype = torch.float32 if int8 else getattr(torch, engine.dtype)
        self._device = torch.device("cuda", group.rank) if engine.device == "cuda" else torch.device("cpu")
        self._threads = Threads(engine.threads)
        config = self.config
        self._shard = shard(
            group.rank,
            group.ranks,
            heads=(config.num_heads, config.num_kv_heads),
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
        )
        self._vocab_widths = [split(config.vocab_size, group.ranks, rank).size for rank in range(group.ranks)]
        plain = _Loader(weights, self._shard, self._dtype, self._device)
        loader = _Int8Loader(plain, config.hidden_size) if int8 else plain
        self._embedding = loader.embedding
        self._head = loader.head()
        self._layers = [loader.layer(index) for index in range(config.num_layers)]
        cos, sin = rope_tables(rope_inverse_frequencies(config), context_tokens)
        self._cos, self._sin = (table.to(self._device, self._dtype) for table in (cos, sin))
        blocks = engine.kv_cache_tokens // engine.kv_block_tokens + 1  # the last one is for `EngineCore.probe`
        slots = blocks * engine.kv_block_tokens
        cache = KvCache(
            (config.num_layers, self._shard.kv_heads.size, slots, config.head_dim),
            torch.bfloat16 if int8 else self._dtype,
            self._device,
        )
        heads = self._shard.query_heads.size, self._shard.kv_heads.size
        self.attention: Attention
        if engine.device == "cuda":
            self.attention = PagedAttention(cache, heads, engine.kv_block_tokens)
        else:
            self.attention = RowAttention(cache, heads, engine.kv_block_tokens, engine.max_running + 1)

    @torch.inference_mode()
    def forward(
        self,
        segments: Sequence[Segment],
        zero_blocks: Sequence[int] = (),
        released: Sequence[int] = (),
        deserted: Callable[[], bool] = _never,
    ) -> Computed:
        """Run one step.

        Args:
            zero_blocks: KV blocks to overwrite first.
            released: handles of sequences that lost their blocks since the last step.
            deserted: asked between layers whether nobody waits for the step any more. A GPU, which is given all its
                work at once, does not ask.

        Raises:
            Deserted: nobody does.
        """
        if self._device.type != "cpu":
            return self._forward(segments, zero_blocks, released, _never)
        tokens, began_s = sum(len(segment.tokens) for segment in segments), time.perf_counter()
        wanted = self._threads.choose(tokens)
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)
        computed = self._forward(segments, zero_blocks, released, deserted)
        self._threads.note(tokens, time.perf_counter() - began_s)
        return computed

    def run(self, step: Compute, deserted: Callable[[], bool] = _never) -> Computed:
        """Run one step, as it is told; see `forward`."""
        return self.forward(step.segments, step.zero_blocks, step.released, deserted)

    @property
    def device(self) -> torch.device:
        """Where the weights lie, and what is computed from them."""
        return self._embedding.device

    def _forward(
        self,
        segments: Sequence[Segment],
        zero_blocks: Sequence[int],
        released: Sequence[int],
        deserted: Callable[[], bool],
    ) -> Computed:
        self.attention.zero_blocks(zero_blocks)
        device = self._device
        ids = torch.tensor([token for segment in segments for token in segment.tokens], device=device)
        positions = torch.tensor(
            [position for s in segments for position in range(s.start, s.start + len(s.tokens))], device=device
        )
        plan = self.attention.plan(segments, released)
        cos, sin = self._cos[positions], self._sin[positions]
        x = self._embed(ids)
        for index, layer in enumerate(self._layers):
            _go_on(deserted)
            x += self._attend(index, layer, plan, x, (cos, sin))
            x += self._feed_forward(layer, x)
        _go_on(deserted)  # of many sequences the logits cost as much as some layers
        self.attention.finish(plan)
        logits = self._logits(x, segments)
        return Computed(logits, self._finite(x, logits, segments) if self.group.rank == 0 else [])

    @property
    def _eps(self) -> float:
        eps: float = self.config.rms_norm_eps
        return eps

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids (tokens,) → (tokens, hidden): every rank looks up its own part of the vocabulary, the rest is 0."""
        if self.group.ranks == 1:
            return F.embedding(ids, self._embedding)
        vocab = self._shard.vocab
        foreign = (ids < vocab.start) | (ids >= vocab.end)
        own = (ids - vocab.start).masked_fill_(foreign, 0)
        return self.group.sum(F.embedding(own, self._embedding).masked_fill_(foreign.unsqueeze(1), 0.0))

    def _attend(
        self,
        index: int,
        layer: _Layer,
        plan: Any,
        x: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        heads, kv_heads = self._shard.query_heads.size, self._shard.kv_heads.size
        qkv = layer.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self.config.head_dim)
        turned = qkv[:, : heads + kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            for part, gain in ((turned[:, :heads], layer.q_norm), (turned[:, heads:], layer.k_norm)):
                part.copy_(F.rms_norm(part, part.shape[-1:], gain, self._eps))
        rotate_(turned, *tables)
        out = self.attention.attend(index, plan, qkv[:, :heads], qkv[:, heads:])
        return self.group.sum(layer.o(out))

    def _feed_forward(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return self.group.sum(layer.down(F.silu(gate) * up))

    def _logits(self, x: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor | None:
        last: list[int] = []
        row = 0
        for segment in segments:
            row += len(segment.tokens)
            if segment.draws:
                last += range(row - 1 - segment.earlier, row)
        if not last:
            return None
        logits = self._head(x[last]).float()
        return self.group.gather_last(logits, self._vocab_widths, self._shard.vocab_width)

    def _finite(self, x: torch.Tensor, logits: torch.Tensor | None, segments: Sequence[Segment]) -> list[bool]:
        """Tell for each segment whether its hidden states (tokens, hidden) and its logits are all numbers.

        A key or value that is no number makes every hidden state computed from it none: nothing else need be looked at.
        """
        rows = torch.isfinite(x).all(dim=-1)
        draws = None if logits is None else torch.isfinite(logits.amax(dim=-1))
        if bool(rows.all() if draws is None else rows.all() & draws.all()):
            return [True] * len(segments)
        counts = [len(segment.tokens) for segment in segments]
        finite = [bool(part.all()) for part in torch.split(rows, counts)]
        if draws is not None:
            drawing = [place for place, s in enumerate(segments) if s.draws for _ in range(1 + s.earlier)]
            for place, is_finite in zip(drawing, draws.tolist(), strict=True):
                finite[place] &= is_finite
        return finite


class _Loader:
    """Reads one rank's part of every weight."""

    def __init__(self, weights: Weights, part: Shard, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._config: ModelConfig = weights.config
        self._part = part
        self._dtype = dtype
        self._device = device

    @cached_property
    def embedding(self) -> torch.Tensor:
        return self._rows("model.embed_tokens.weight", self._part.vocab)

    def head(self) -> Product:
        """The last norm and the matrix behind it."""
        if self._config.tie_embeddings:
            return self._normed("model.norm.weight", linear(self.embedding))
        return self._normed("model.norm.weight", linear(self._rows("lm_head.weight", self._part.vocab)))

    def layer(self, index: int) -> _Layer:
        prefix = f"model.layers.{index}."
        attention, feed_forward = prefix + "self_attn.", prefix + "mlp."
        config, part = self._config, self._part
        queries, keys = part.query_heads.times(config.head_dim), part.kv_heads.times(config.head_dim)
        spans = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        qkv = torch.cat([self._rows(f"{attention}{name}.weight", span) for name, span in spans.items()])
        names = ("gate_proj", "up_proj")
        gate_up = torch.cat([self._rows(f"{feed_forward}{name}.weight", part.intermediate) for name in names])
        bias = None
        if config.attention_bias:
            bias = torch.cat([self._rows(f"{attention}{name}.bias", span) for name, span in spans.items()])
        return _Layer(
            qkv=self._normed(prefix + "input_layernorm.weight", linear(qkv, bias)),
            q_norm=self._whole(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=self._whole(attention + "k_norm.weight") if config.qk_norm else None,
            o=linear(self._columns(attention + "o_proj.weight", queries)),
            gate_up=self._normed(prefix + "post_attention_layernorm.weight", linear(gate_up)),
            down=linear(self._columns(feed_forward + "down_proj.weight", part.intermediate)),
        )

    def _normed(self, gain: str, product: Linear | PackedLinear) -> Normed:
        return Normed(self._whole(gain), self._config.rms_norm_eps, product)

    def _whole(self, name: str) -> torch.Tensor:
        return self._place(self._weights.tensor(name))

    def _rows(self, name: str, span: Span) -> torch.Tensor:
        return self._place(self._weights.tensor(name)[span.start : span.end])

    def _columns(self, name: str, span: Span) -> torch.Tensor:
        return self._place(self._weights.tensor(name)[:, span.start : span.end])

    def _place(self, array: np.ndarray[Any, np.dtype[np.float32]]) -> torch.Tensor:
        return torch.from_numpy(np.array(array, order="C")).to(self._device, self._dtype)


class _Int8Loader:
    """Turns and rounds what a `_Loader` reads in float32: see `rotate`."""

    def __init__(self, loader: _Loader, hidden_size: int) -> None:
        self._loader = loader
        self._rotation = Rotation(hidden_size)

    @property
    def embedding(self) -> torch.Tensor:
        return self._rotation.rows(self._loader.embedding)

    def head(self) -> Product:
        return self._behind(self._loader.head())

    def layer(self, index: int) -> _Layer:
        layer = self._loader.layer(index)
        o, down = (cast("Linear", product).weight for product in (layer.o, layer.down))
        return replace(
            layer,
            qkv=self._behind(layer.qkv),
            o=Int8Linear.pack(self._rotation.columns(o)),
            gate_up=self._behind(layer.gate_up),
            down=Int8Linear.pack(self._rotation.columns(down), turned=True),
        )

    def _behind(self, product: Product) -> Product:
        """A matrix behind a norm, whose gain it takes in, and whose input is turned."""
        normed = cast("Normed", product)
        plain = cast("Linear", normed.linear)  # in float32
        return Int8Linear.pack(self._rotation.rows(plain.weight * normed.gain), plain.bias, eps=normed.eps)
