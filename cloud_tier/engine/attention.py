"""The KV cache as tensors, and attention over it.

Keys and values of all blocks lie in one tensor a layer, heads outermost: (KV heads, tokens, head_dim). A run of blocks
is a view of it. Query heads that share a KV head are folded into query rows, so grouped-query attention needs no
copies of the keys. A prompt chunk goes through fused attention; single tokens differ by device:

- CPU: a call for each sequence, over a view of its keys: there, copying pages costs many times the arithmetic.
- GPU: pages of all sequences gathered and padded, one fused call, because there the number of launches counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from cloud_tier.engine.messages import Segment

Run = tuple[int, int]  # token slots [start, end) of the cache


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros: masked slots that were never written are read times 0, and fresh memory may hold NaN.

    On a CPU the pages come from `calloc`, committed as they are first used; `torch.zeros` would write them all.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


class KvCache:
    """Keys and values of one rank's heads, for every layer.

    Attributes:
        keys, values: (layers, KV heads, slots, head_dim). The system commits the memory as slots are first used.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)

    def store(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write (tokens, KV heads, head_dim) at the slots (tokens,)."""
        self.keys[layer].index_copy_(1, slots, keys.transpose(0, 1))
        self.values[layer].index_copy_(1, slots, values.transpose(0, 1))

    def zero(self, start: int, end: int) -> None:
        """Overwrite the slots `[start, end)` of every layer."""
        self.keys[:, :, start:end] = 0
        self.values[:, :, start:end] = 0


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one sequence: rows `[start, end)` of the step, over the slots of `runs`.

    `mask` is additive, (group · rows, slots), over the last slots if it is narrower than `runs`.
    """

    start: int
    end: int
    runs: list[Run]
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Singles:
    """The sequences with one token in the step: their rows, and the slots they see."""

    rows: list[int]
    runs: list[list[Run]]
    row_index: torch.Tensor
    pages: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one step share."""

    chunks: list[_Chunk]
    singles: _Singles
    slots: torch.Tensor


class Attention:
    """Grouped-query attention of one rank.

    Args:
        heads: number of query heads and of KV heads on this rank.

    Attributes:
        cache: what it reads and writes.
        gathered: single tokens go the GPU's way.
    """

    def __init__(self, cache: KvCache, heads: tuple[int, int], block_tokens: int, *, gathered: bool) -> None:
        self.cache = cache
        self._num_heads, self._num_kv_heads = heads
        self._group = self._num_heads // self._num_kv_heads
        self._block_tokens = block_tokens
        self.gathered = gathered
        self._head_dim = cache.keys.shape[-1]
        self._device = cache.keys.device
        self._dtype = cache.keys.dtype
        # Fused attention on a CPU computes in float32: in 16 bits, plain products a head are 3 to 5 times faster.
        self._by_head = self._device.type == "cpu" and self._dtype != torch.float32

    def plan(self, segments: Sequence[Segment]) -> AttentionPlan:
        """Prepare a step: token slots and masks, once for all layers."""
        chunks: list[_Chunk] = []
        rows: list[int] = []
        single_runs: list[list[Run]] = []
        slots: list[int] = []
        row = 0
        for segment in segments:
            count = len(segment.tokens)
            runs = self._slot_runs(segment.runs, segment.start + count)
            slots += _tail(runs, count)
            if count == 1:
                rows.append(row)
                single_runs.append(runs)
            else:
                mask = self._causal_mask(0 if self._by_head else segment.start, count)
                chunks.append(_Chunk(row, row + count, runs, mask))
            row += count
        return AttentionPlan(chunks, self._plan_singles(rows, single_runs), torch.tensor(slots, device=self._device))

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks whose content nobody may read again."""
        for block in blocks:
            self.cache.zero(block * self._block_tokens, (block + 1) * self._block_tokens)

    def attend(
        self, layer: int, plan: AttentionPlan, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Store the step's keys and values and attend over everything before them.

        Args:
            queries: (tokens, query heads, head_dim), rotary embedding applied.
            keys, values: (tokens, KV heads, head_dim).

        Returns:
            (tokens, query heads · head_dim).
        """
        cache = self.cache
        cache.store(layer, plan.slots, keys, values)
        cached = cache.keys[layer], cache.values[layer]
        out = torch.empty_like(queries)
        for chunk in plan.chunks:
            out[chunk.start : chunk.end] = self._attend_chunk(chunk, queries[chunk.start : chunk.end], *cached)
        singles = plan.singles
        if singles.pages is not None and singles.mask is not None:
            out[singles.row_index] = self._attend_gathered(singles, queries[singles.row_index], *cached)
        else:
            for row, runs in zip(singles.rows, singles.runs, strict=True):
                out[row] = self._attend_single(runs, queries[row], *cached)
        return out.view(queries.shape[0], -1)

    def _slot_runs(self, blocks: list[tuple[int, int]], length: int) -> list[Run]:
        """Block runs → slot runs, cut to `length` positions."""
        size = self._block_tokens
        found: list[Run] = []
        for first, number in blocks:
            end = min(number * size, length)
            found.append((first * size, first * size + end))
            length -= end
            if length == 0:
                break
        return found

    def _causal_mask(self, before: int, count: int) -> torch.Tensor:
        """Additive mask of a chunk that sees `before` slots in full: (group · count, before + count)."""
        mask = torch.full((count, before + count), -torch.inf, dtype=self._dtype, device=self._device)
        return mask.triu_(before + 1).repeat(self._group, 1)

    def _plan_singles(self, rows: list[int], runs: list[list[Run]]) -> _Singles:
        index = torch.tensor(rows, dtype=torch.int64, device=self._device)
        if not self.gathered or not rows:
            return _Singles(rows, runs, index, None, None)
        lengths = [sum(end - start for start, end in one) for one in runs]
        # Padding repeats the first slot: masked out, but its values must be numbers, and it has been written.
        pages = torch.tensor([one[0][0] for one in runs]).unsqueeze(1).repeat(1, max(lengths))
        mask = torch.full((len(rows), 1, 1, max(lengths)), -torch.inf, dtype=self._dtype)
        for place, one in enumerate(runs):
            pages[place, : lengths[place]] = torch.cat([torch.arange(start, end) for start, end in one])
            mask[place, ..., : lengths[place]] = 0.0
        return _Singles(rows, runs, index, pages.to(self._device), mask.to(self._device))

    def _attend_chunk(
        self, chunk: _Chunk, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        count = queries.shape[0]
        kv_heads, group, head_dim = self._num_kv_heads, self._group, self._head_dim
        folded = queries.view(count, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
        keys, values = _joined(keys, chunk.runs), _joined(values, chunk.runs)
        if self._by_head:
            heads = range(kv_heads)
            out = torch.stack([self._attend_head(chunk, folded[0, h], keys[0, h], values[0, h]) for h in heads])
        else:
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=chunk.mask)
        return out.view(kv_heads, group, count, head_dim).permute(2, 0, 1, 3).reshape(count, -1, head_dim)

    def _attend_head(
        self, chunk: _Chunk, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """One KV head: (rows, head_dim) over (slots, head_dim). The mask covers the chunk's own positions alone."""
        scores = F.linear(query * self._head_dim**-0.5, keys)
        scores[:, -chunk.mask.shape[1] :] += chunk.mask
        return torch.softmax(scores, dim=-1) @ values

    def _attend_single(
        self, runs: list[Run], query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        query = query.view(1, self._num_kv_heads, self._group, self._head_dim)
        if len(runs) == 1:
            out = F.scaled_dot_product_attention(query, _joined(keys, runs), _joined(values, runs))
            return out.view(-1, self._head_dim)
        # Several runs: joining their scores is cheaper than joining their keys.
        query = query[0] * self._head_dim**-0.5
        scores = torch.cat([torch.matmul(query, keys[:, start:end].transpose(1, 2)) for start, end in runs], dim=-1)
        weights = torch.softmax(scores, dim=-1)
        out = torch.zeros_like(query)
        done = 0
        for start, end in runs:
            out += torch.matmul(weights[..., done : done + end - start], values[:, start:end])
            done += end - start
        return out.view(-1, self._head_dim)

    def _attend_gathered(
        self, singles: _Singles, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        batch = queries.shape[0]
        out = F.scaled_dot_product_attention(
            queries.view(batch, self._num_kv_heads, self._group, self._head_dim),
            keys[:, singles.pages].transpose(0, 1),
            values[:, singles.pages].transpose(0, 1),
            attn_mask=singles.mask,
        )
        return out.reshape(batch, -1, self._head_dim)


def _joined(cached: torch.Tensor, runs: list[Run]) -> torch.Tensor:
    """The slots of the runs as (1, KV heads, slots, head_dim): a view if there is one run."""
    if len(runs) == 1:
        return cached[:, runs[0][0] : runs[0][1]].unsqueeze(0)
    return torch.cat([cached[:, start:end] for start, end in runs], dim=1).unsqueeze(0)


def _tail(runs: list[Run], count: int) -> list[int]:
    """The last `count` slots of the runs."""
    found: list[int] = []
    for start, end in reversed(runs):
        take = min(count - len(found), end - start)
        found = [*range(end - take, end), *found]
        if len(found) == count:
            break
    return found
