"""The torch reference decoder: the arithmetic of the ONNX graph, with the KV cache as explicit inputs and outputs.

It computes what calibration, pruning and parity need; serving is the business of the runtimes and the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from models.graph.fused import FusedLayer, FusedModel, half_turn, rope_tables
from models.graph.rotate import hadamard

MASKED = -1e9  # finite: a fully masked row must not become NaN


class Step(NamedTuple):
    """Outputs of one pass: logits (B, L, V) and, per layer, the new keys and values (B, G, S, D)."""

    logits: torch.Tensor
    new_k: list[torch.Tensor]
    new_v: list[torch.Tensor]


class Inputs(NamedTuple):
    """Inputs of one pass, the same as the graph's.

    Attributes:
        input_ids: int64 (B, S).
        position_ids: int64 (B, S).
        attention_bias: float32 (B, 1, S, P+S), 0 where a query may look and -1e9 elsewhere.
        logits_at: int64 (B, L), indices into S.
        past_k, past_v: per layer, float32 (B, G, P, D).
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_bias: torch.Tensor
    logits_at: torch.Tensor
    past_k: Sequence[torch.Tensor]
    past_v: Sequence[torch.Tensor]


class Frame(NamedTuple):
    """Rotary cosines and sines (B, 1, S, D), and the attention bias repeated per query row (B, 1, n·S, P+S)."""

    cos: torch.Tensor
    sin: torch.Tensor
    bias: torch.Tensor


Tap = Callable[[int, str, torch.Tensor], None]
"""Called with (layer, matrix name, input of that matrix (B, S, in)); `down_raw` is `down` before its Hadamard."""


@dataclass(frozen=True)
class _Tensors:
    """One layer's weights as torch tensors that share memory with the fused model."""

    source: FusedLayer
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Decoder:
    """Runs a `FusedModel` on the CPU.

    Args:
        dtype: of all arithmetic. In float64 what is rounded to float32 afterwards is the same on every processor; each
            matrix is widened while it is used.
    """

    def __init__(self, model: FusedModel, dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        self._dtype = dtype
        self._embedding = torch.from_numpy(model.embedding)
        self._head = torch.from_numpy(model.head)
        self._layers = [
            _Tensors(layer, *(torch.from_numpy(matrix) for _, matrix in layer.matrices())) for layer in model.layers
        ]
        self._turn = torch.from_numpy(half_turn(model.config.head_dim)).to(dtype)
        self._rope: tuple[torch.Tensor, torch.Tensor] = self._tables(512)

    def _tables(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rope_tables(self.model.config, positions)
        return torch.from_numpy(cos), torch.from_numpy(sin)

    @torch.inference_mode()
    def __call__(self, inputs: Inputs, tap: Tap | None = None) -> Step:
        """Run one pass; `tap` sees the input of every matrix multiplication."""
        frame = self.frame(inputs)
        x = self.embed(inputs)
        new_k, new_v = [], []
        for index in range(len(self._layers)):
            x, k, v = self._block(_Site(index, tap), x, frame, (inputs.past_k[index], inputs.past_v[index]))
            new_k.append(k)
            new_v.append(v)
        return Step(self._logits(x, inputs.logits_at, tap), new_k, new_v)

    def frame(self, inputs: Inputs) -> Frame:
        """What all layers of one pass share: rotary tables at its positions and the bias per query row."""
        highest = int(inputs.position_ids.max()) + 1
        if highest > len(self._rope[0]):
            self._rope = self._tables(1 << highest.bit_length())
        cos, sin = (table[inputs.position_ids][:, None] for table in self._rope)
        return Frame(cos, sin, inputs.attention_bias.repeat(1, 1, self.model.group_size, 1))

    @torch.inference_mode()
    def embed(self, inputs: Inputs) -> torch.Tensor:
        """The residual stream in front of the first layer, (B, S, H)."""
        return self._embedding[inputs.input_ids].to(self._dtype)

    @torch.inference_mode()
    def layer(self, index: int, x: torch.Tensor, frame: Frame, inputs: Inputs) -> torch.Tensor:
        """The residual stream behind one layer."""
        return self._block(_Site(index, None), x, frame, (inputs.past_k[index], inputs.past_v[index]))[0]

    @torch.inference_mode()
    def logits(self, x: torch.Tensor, logits_at: torch.Tensor) -> torch.Tensor:
        """Logits (B, L, V) of the residual stream behind the last layer."""
        return self._logits(x, logits_at, None)

    def _logits(self, x: torch.Tensor, logits_at: torch.Tensor, tap: Tap | None) -> torch.Tensor:
        rows = torch.gather(x, 1, logits_at[:, :, None].expand(-1, -1, x.shape[-1]))
        rows = self._norm(rows, self.model.head_gain)
        return _Site(len(self._layers), tap).see("head", rows) @ self._head.to(self._dtype)

    def _block(
        self, site: _Site, x: torch.Tensor, frame: Frame, past: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = self._layers[site.layer]
        mixed, k, v = self._attention(site, layer, x, frame, past)
        x = x + mixed
        return x + self._mlp(site, layer, x), k, v

    def _norm(self, x: torch.Tensor, gain: np.ndarray) -> torch.Tensor:
        variance = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.model.config.rms_norm_eps) * torch.from_numpy(gain)

    def _attention(
        self,
        site: _Site,
        layer: _Tensors,
        x: torch.Tensor,
        frame: Frame,
        past: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config, n = self.model.config, self.model.group_size
        groups, dim = config.num_kv_heads, config.head_dim
        batch, length, _ = x.shape
        cos, sin, bias = frame
        normed = site.see("qkv", self._norm(x, layer.source.attention_gain))
        qkv = normed @ layer.qkv.to(self._dtype)
        if layer.source.qkv_bias is not None:
            qkv = qkv + torch.from_numpy(layer.source.qkv_bias)
        qkv = qkv.reshape(batch, length, (n + 2) * groups, dim).transpose(1, 2)
        qk, v = qkv[:, :-groups], qkv[:, -groups:]
        gains = layer.source.head_gains(groups, n)
        if gains is not None:
            qk = self._norm(qk, gains)
        qk = qk * cos + (qk @ self._turn) * sin
        q, k = qk[:, :-groups].reshape(batch, groups, n * length, dim), qk[:, -groups:]
        keys, values = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        weights = F.softmax(q @ keys.transpose(-1, -2) + bias, dim=-1)
        mixed = (weights @ values).reshape(batch, groups * n, length, dim).transpose(1, 2)
        mixed = site.see("o", mixed.reshape(batch, length, groups * n * dim))
        return mixed @ layer.o.to(self._dtype), k, v

    def _mlp(self, site: _Site, layer: _Tensors, x: torch.Tensor) -> torch.Tensor:
        normed = site.see("gate_up", self._norm(x, layer.source.mlp_gain))
        gate, up = (normed @ layer.gate_up.to(self._dtype)).chunk(2, -1)
        hidden = site.see("down_raw", F.silu(gate) * up)
        block = layer.source.down_block
        if block:
            turned = hidden.reshape(*hidden.shape[:-1], -1, block) @ torch.tensor(hadamard(block), dtype=self._dtype)
            hidden = turned.reshape(hidden.shape)
        return site.see("down", hidden) @ layer.down.to(self._dtype)

    def fresh(self, ids: Sequence[int], past: tuple[np.ndarray, np.ndarray] | None = None) -> Inputs:
        """Inputs for one whole sequence (B = 1), asking for the logits of every position.

        Args:
            past: k and v of earlier positions, each (layers, G, P, D).
        """
        config = self.model.config
        empty = torch.zeros(1, config.num_kv_heads, 0, config.head_dim)
        if past is None:
            past_k = past_v = [empty] * len(self._layers)
        else:
            past_k, past_v = ([torch.from_numpy(layer[None]) for layer in part] for part in past)
        begin, length = past_k[0].shape[2], len(ids)
        at = torch.arange(length)
        visible = torch.arange(begin + length)[None, :] <= (begin + at)[:, None]
        bias = torch.where(visible, 0.0, MASKED)
        return Inputs(torch.tensor([list(ids)]), begin + at[None], bias[None, None], at[None], past_k, past_v)


def greedy(decoder: Decoder, ids: Sequence[int], limit: int, eos_ids: frozenset[int]) -> list[int]:
    """The float32 model's own answer to a prompt, at most `limit` tokens, without the end-of-sequence token."""
    answer: list[int] = []
    past: tuple[np.ndarray, np.ndarray] | None = None
    feed = list(ids)
    while len(answer) < limit:
        step = decoder(decoder.fresh(feed, past))
        new = [torch.cat(part).numpy() for part in (step.new_k, step.new_v)]
        past = (new[0], new[1]) if past is None else (_joined(past[0], new[0]), _joined(past[1], new[1]))
        token = int(step.logits[0, -1].argmax())
        if token in eos_ids:
            break
        answer.append(token)
        feed = [token]
    return answer


def _joined(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return np.concatenate([old, new], axis=2)


def packed(model: FusedModel, sequences: Sequence[Sequence[int]]) -> Inputs:
    """Inputs that run several whole sequences side by side in one row, none seeing another.

    One wide pass costs much less than several narrow ones. Logits are asked for at every 8th position
    that is not the first of its sequence.
    """
    config = model.config
    empty = torch.zeros(1, config.num_kv_heads, 0, config.head_dim)
    owner = torch.tensor([index for index, ids in enumerate(sequences) for _ in ids])
    position = torch.tensor([at for ids in sequences for at in range(len(ids))])
    visible = (owner[:, None] == owner) & (position[:, None] >= position)
    bias = torch.where(visible, 0.0, MASKED)[None, None]
    ids = torch.tensor([[token for ids in sequences for token in ids]])
    at = torch.nonzero(position > 0).flatten()[::8][None]
    past = [empty] * len(model.layers)
    return Inputs(ids, position[None], bias, at, past, past)


class _Site(NamedTuple):
    """Where in the model a tap is: it passes tensors through and shows them."""

    layer: int
    tap: Tap | None

    def see(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.tap is not None:
            self.tap(self.layer, name, x)
        return x


def prefix_kv(model: FusedModel, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of the first tokens, each float32 (layers, G, len(ids), D)."""
    decoder = Decoder(model)
    step = decoder(decoder.fresh(ids))
    k, v = (np.ascontiguousarray(torch.cat(part).numpy()) for part in (step.new_k, step.new_v))
    return k, v
