"""The KV cache as tensors, and attention over its pages.

Keys and values of all blocks lie in one tensor a layer, heads outermost: (KV heads, tokens, head_dim). A run of blocks
is a view of it. Query heads that share a KV head are folded into query rows, so grouped-query attention needs no
copies of the keys. A prompt chunk goes through fused attention; the pages of all sequences with a single token are
gathered and padded for one fused call, because on a GPU the number of launches counts. A CPU, where copying costs many
times the arithmetic, attends over rows instead: see `rows`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from cloud_tier.engine.messages import Segment

Run = tuple[int, int]  # token slots [start, end) of the cache


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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
        self.keys = lazy_zeros(shape, dtype, device)
        self.values = lazy_zeros(shape, dtype, device)

    def store(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write (tokens, KV heads, head_dim) at the slots (tokens,)."""
        self.keys[layer].index_copy_(1, slots, keys.transpose(0, 1))
        self.values[layer].index_copy_(1, slots, values.transpose(0, 1))

    def zero(self, start: int, end: int) -> None:
        """Overwrite the slots `[start, end)` of every layer."""
        self.keys[:, :, start:end] = 0
        self.values[:, :, start:end] = 0


class Attention(Protocol):
    """Grouped-query attention of one rank, over its KV cache.

    Attributes:
        cache: the keys and values that prefixes are shared from.
    """

    cache: KvCache

    def plan(self, segments: Sequence[Segment], released: Sequence[int]) -> Any:
        """Prepare a step: where its tokens go and what they see, once for all layers.

        Args:
            released: handles of sequences that lost their blocks since the last step.
        """
        ...

    def attend(self, layer: int, plan: Any, queries: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Store the step's keys and values and attend over everything before them.

        Args:
            queries: (tokens, query heads, head_dim), rotary embedding applied.
            new: (tokens, 2 · KV heads, head_dim), keys and then values.

        Returns:
            (tokens, query heads · head_dim).
        """
        ...

    def finish(self, plan: Any) -> None:
        """Note that all layers of the step have run."""
        ...

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks whose content nobody may read again."""
        ...


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one sequence: rows `[start, end)` of the step, over the slots of `runs`.

    `mask` is additive, (group · rows, slots).
    """

    start: int
    end: int
    runs: list[Run]
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Singles:
    """The sequences with one token in the step: their rows, and the slots they see, padded to the longest."""

    rows: torch.Tensor
    pages: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """What all layers of one step share."""

    chunks: list[_Chunk]
    singles: _Singles | None
    slots: torch.Tensor


class PagedAttention:
    """Attention over the blocks themselves.

    Args:
        heads: number of query heads and of KV heads on this rank.
    """

    def __init__(self, cache: KvCache, heads: tuple[int, int], block_tokens: int) -> None:
        self.cache = cache
        self._num_heads, self._num_kv_heads = heads
        self._group = self._num_heads // self._num_kv_heads
        self._block_tokens = block_tokens
        self._head_dim = cache.keys.shape[-1]
        self._device = cache.keys.device
        self._dtype = cache.keys.dtype

    def plan(self, segments: Sequence[Segment], released: Sequence[int] = ()) -> PagedPlan:
        """See `Attention.plan`."""
        del released  # pages are named by every segment: nothing is remembered of a sequence
        chunks: list[_Chunk] = []
        rows: list[int] = []
        single_runs: list[list[Run]] = []
        slots: list[int] = []
        row = 0
        for segment in segments:
            count = len(segment.tokens)
            runs = slot_runs(segment.runs, self._block_tokens, segment.start + count)
            slots += last_slots(runs, count)
            if count == 1:
                rows.append(row)
                single_runs.append(runs)
            else:
                chunks.append(_Chunk(row, row + count, runs, self._causal_mask(segment.start, count)))
            row += count
        singles = self._plan_singles(rows, single_runs) if rows else None
        return PagedPlan(chunks, singles, torch.tensor(slots, device=self._device))

    def attend(self, layer: int, plan: PagedPlan, queries: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """See `Attention.attend`."""
        cache = self.cache
        cache.store(layer, plan.slots, *new.chunk(2, dim=1))
        cached = cache.keys[layer], cache.values[layer]
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for chunk in plan.chunks:
            out[chunk.start : chunk.end] = self._attend_chunk(chunk, queries[chunk.start : chunk.end], *cached)
        singles = plan.singles
        if singles is not None:
            out[singles.rows] = self._attend_gathered(singles, queries[singles.rows], *cached)
        return out.view(queries.shape[0], -1)

    def finish(self, plan: PagedPlan) -> None:
        """See `Attention.finish`."""

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """See `Attention.zero_blocks`."""
        for block in blocks:
            self.cache.zero(block * self._block_tokens, (block + 1) * self._block_tokens)

    def _causal_mask(self, before: int, count: int) -> torch.Tensor:
        """Additive mask of a chunk that sees `before` slots in full: (group · count, before + count)."""
        mask = torch.full((count, before + count), -torch.inf, dtype=self._dtype, device=self._device)
        return mask.triu_(before + 1).repeat(self._group, 1)

    def _plan_singles(self, rows: list[int], runs: list[list[Run]]) -> _Singles:
        index = torch.tensor(rows, dtype=torch.int64, device=self._device)
        lengths = [sum(end - start for start, end in one) for one in runs]
        # Padding repeats the first slot: masked out, but its values must be numbers, and it has been written.
        pages = torch.tensor([one[0][0] for one in runs]).unsqueeze(1).repeat(1, max(lengths))
        mask = torch.full((len(rows), 1, 1, max(lengths)), -torch.inf, dtype=self._dtype)
        for place, one in enumerate(runs):
            pages[place, : lengths[place]] = torch.cat([torch.arange(start, end) for start, end in one])
            mask[place, ..., : lengths[place]] = 0.0
        return _Singles(index, pages.to(self._device), mask.to(self._device))

    def _attend_chunk(
        self, chunk: _Chunk, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        count = queries.shape[0]
        kv_heads, group, head_dim = self._num_kv_heads, self._group, self._head_dim
        folded = (
            queries.reshape(count, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
        )
        keys, values = _joined(keys, chunk.runs), _joined(values, chunk.runs)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=chunk.mask)
        return out.view(kv_heads, group, count, head_dim).permute(2, 0, 1, 3).reshape(count, -1, head_dim)

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


def slot_runs(blocks: list[tuple[int, int]], block_tokens: int, length: int) -> list[Run]:
    """Block runs → slot runs, cut to `length` positions."""
    found: list[Run] = []
    for first, number in blocks:
        if length == 0:
            break
        end = min(number * block_tokens, length)
        found.append((first * block_tokens, first * block_tokens + end))
        length -= end
    return found


def last_slots(runs: list[Run], count: int) -> list[int]:
    """The last `count` slots of the runs."""
    found: list[int] = []
    for start, end in reversed(runs):
        take = min(count - len(found), end - start)
        found = [*range(end - take, end), *found]
        if len(found) == count:
            break
    return found


def _joined(cached: torch.Tensor, runs: list[Run]) -> torch.Tensor:
    """The slots of the runs as (1, KV heads, slots, head_dim): a view if there is one run."""
    if len(runs) == 1:
        return cached[:, runs[0][0] : runs[0][1]].unsqueeze(0)
    return torch.cat([cached[:, start:end] for start, end in runs], dim=1).unsqueeze(0)
