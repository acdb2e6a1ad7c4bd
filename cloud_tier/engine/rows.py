"""Attention on a CPU: every running sequence's keys and values lie side by side, in a row of its own.

The paged cache stays the truth that prefixes are shared from and preempted sequences resume from. A row is a copy of
one sequence's pages that grows with it: filled from the pages when the sequence comes (again) with something computed
before, and written back to them at the end of each step. Copying costs 1 % of computing, and buys attention over plain
views: all sequences with one token in the step go through one call a layer, however many there are.

Rows lie in a grid as wide as the longest sequence needs. Sequences much longer than the rest get a call of their own,
so that the others are not padded to their length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cloud_tier.engine.attention import KvCache, Run, last_slots, lazy_zeros, slot_runs
from cloud_tier.engine.messages import Segment

_FIRST_WIDTH = 256
_CALL_TOKENS = 300  # what a call costs beside its arithmetic, in keys of one sequence that could be read meanwhile


@dataclass(slots=True)
class _Row:
    """A sequence's place in the grid, and how many of its positions are filled."""

    index: int
    length: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one sequence: rows `[start, end)` of the step, which see `length` positions of a grid row.

    `mask` is additive, float32 (tokens, positions).
    """

    start: int
    end: int
    row: int
    length: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences with one token in the step, in the grid rows `[low, high)`, padded to `length` positions.

    Attributes:
        tokens: (rows,), the row of the step whose query goes with each grid row; any, where nobody's lies there.
        places: (sequences,), grid rows counted from `low` of the sequences.
        outputs: (sequences,), rows of the step that they are.
        mask: additive, (rows, 1, 1, positions).
    """

    low: int
    high: int
    length: int
    tokens: torch.Tensor
    places: torch.Tensor
    outputs: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What all layers of one step share.

    Attributes:
        alone: the step is one batch, its grid rows in the order of the step and none between them.
        targets: (tokens · 2 · KV heads,), where the new keys and values go in a layer of the grid.
        slots: (tokens,), where they go in the paged cache.
        lengths: the positions filled after the step, of every row in it.
    """

    chunks: list[_Chunk]
    batches: list[_Batch]
    alone: bool
    targets: torch.Tensor
    slots: torch.Tensor
    lengths: list[tuple[_Row, int]]


class RowAttention:
    """See `attention.Attention`.

    Args:
        heads: number of query heads and of KV heads on this rank.
        rows: sequences that hold blocks at once, and one for steps that belong to none.
    """

    def __init__(self, cache: KvCache, heads: tuple[int, int], block_tokens: int, rows: int) -> None:
        self.cache = cache
        self._num_heads, self._num_kv_heads = heads
        self._group = self._num_heads // self._num_kv_heads
        self._block_tokens = block_tokens
        self._head_dim = cache.keys.shape[-1]
        self._dtype = cache.keys.dtype
        self._num_rows = rows
        self._rows: dict[int, _Row] = {}
        self._width = _FIRST_WIDTH
        self._grid = self._empty_grid()

    def plan(self, segments: Sequence[Segment], released: Sequence[int] = ()) -> RowPlan:
        """See `Attention.plan`."""
        for handle in released:
            self._rows.pop(handle, None)
        self._fit(max(segment.start + len(segment.tokens) for segment in segments))
        chunks: list[_Chunk] = []
        singles: list[tuple[int, _Row]] = []
        slots: list[int] = []
        places: list[torch.Tensor] = []
        lengths: list[tuple[_Row, int]] = []
        token = 0
        for segment in segments:
            count, before = len(segment.tokens), segment.start
            length = before + count
            runs = slot_runs(segment.runs, self._block_tokens, length)
            slots += last_slots(runs, count)
            row = self._row(segment.handle, before, runs)
            lengths.append((row, length))
            if count == 1:
                singles.append((token, row))
            else:
                mask = torch.full((count, length), -torch.inf).triu_(before + 1)
                chunks.append(_Chunk(token, token + count, row.index, length, mask))
            places.append(row.index * 2 * self._num_kv_heads * self._width + torch.arange(before, length))
            token += count
        heads = torch.arange(2 * self._num_kv_heads) * self._width
        targets = (torch.cat(places).unsqueeze(1) + heads).flatten()
        batches = self._batches(singles)
        alone = not chunks and len(batches) == 1 and batches[0].outputs.equal(batches[0].places)
        return RowPlan(chunks, batches, alone, targets, torch.tensor(slots), lengths)

    def attend(self, layer: int, plan: RowPlan, queries: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """See `Attention.attend`."""
        self._grid[layer].view(-1, self._head_dim).index_copy_(
            0, plan.targets, new.to(self._dtype).reshape(-1, self._head_dim)
        )
        count = queries.shape[0]
        folded = queries.view(count, self._num_kv_heads, self._group, self._head_dim)
        if plan.alone:
            return self._attend_batch(layer, plan.batches[0], folded).to(queries.dtype).reshape(count, -1)
        out = torch.empty(folded.shape, dtype=queries.dtype)
        for chunk in plan.chunks:
            out[chunk.start : chunk.end] = self._attend_chunk(layer, chunk, folded[chunk.start : chunk.end])
        for batch in plan.batches:
            attended = self._attend_batch(layer, batch, folded[batch.tokens])
            out[batch.outputs] = attended[batch.places].to(out.dtype)
        return out.view(count, -1)

    def finish(self, plan: RowPlan) -> None:
        """Write the step's keys and values back to the pages, for prefixes to be shared."""
        layers = self._grid.shape[0]
        new = self._grid.view(layers, -1, self._head_dim)[:, plan.targets]
        new = new.view(layers, -1, 2 * self._num_kv_heads, self._head_dim).transpose(1, 2)
        for pages, part in zip((self.cache.keys, self.cache.values), new.chunk(2, dim=1), strict=True):
            pages.index_copy_(2, plan.slots, part)
        for row, length in plan.lengths:
            row.length = length

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """See `Attention.zero_blocks`. Rows may hold the same numbers: they are filled again."""
        for block in blocks:
            self.cache.zero(block * self._block_tokens, (block + 1) * self._block_tokens)
        if blocks:
            self._rows.clear()
            self._grid = self._empty_grid()

    def _attend_batch(self, layer: int, batch: _Batch, queries: torch.Tensor) -> torch.Tensor:
        """(grid rows, KV heads, group, head_dim) over the grid rows of the batch."""
        heads = self._num_kv_heads
        seen = self._grid[layer, batch.low : batch.high, :, : batch.length]
        return F.scaled_dot_product_attention(
            queries.to(self._dtype), seen[:, :heads], seen[:, heads:], attn_mask=batch.mask
        )

    def _attend_chunk(self, layer: int, chunk: _Chunk, queries: torch.Tensor) -> torch.Tensor:
        """(tokens, KV heads, group, head_dim) over one row, in float32: in 16 bits fused attention is slower here."""
        seen = self._grid[layer, chunk.row, :, : chunk.length].float().unsqueeze(1)
        keys, values = seen.expand(-1, self._group, -1, -1).chunk(2)
        attended = F.scaled_dot_product_attention(queries.permute(1, 2, 0, 3).float(), keys, values, chunk.mask)
        return attended.permute(2, 0, 1, 3)

    def _row(self, handle: int, before: int, runs: list[Run]) -> _Row:
        """Return the sequence's row with `before` positions filled, from the pages if need be."""
        row = self._rows.get(handle)
        if row is None:
            taken = {other.index for other in self._rows.values()}
            row = self._rows[handle] = _Row(min(set(range(self._num_rows)) - taken), 0)
        row.length = min(row.length, before)  # drafts that were refused lie behind
        if row.length != before:
            done = 0
            for start, end in runs:
                end = min(end, start + before - done)  # noqa: PLW2901
                if end <= start:
                    break
                filled = slice(done, done + end - start)
                heads = self._num_kv_heads
                self._grid[:, row.index, :heads, filled] = self.cache.keys[:, :, start:end]
                self._grid[:, row.index, heads:, filled] = self.cache.values[:, :, start:end]
                done += end - start
            row.length = before
        return row

    def _batches(self, singles: list[tuple[int, _Row]]) -> list[_Batch]:
        """Split into the cheapest calls: sequences much longer than the rest alone, the rest together."""
        if not singles:
            return []
        by_length = sorted(singles, key=lambda single: -single[1].length)
        costs: list[float] = []
        alone = 0.0
        for number, (_, row) in enumerate(by_length):
            rest = [other.index for _, other in by_length[number:]]
            span = max(rest) - min(rest) + 1
            costs.append(alone + _CALL_TOKENS + span * (row.length + 1))
            alone += _CALL_TOKENS + row.length + 1
        cut = costs.index(min(costs))
        return [self._batch([single]) for single in by_length[:cut]] + [self._batch(by_length[cut:])]

    def _batch(self, singles: list[tuple[int, _Row]]) -> _Batch:
        indices = [row.index for _, row in singles]
        low, high = min(indices), max(indices) + 1
        longest = max(row.length for _, row in singles) + 1
        tokens = torch.full((high - low,), singles[0][0])
        seen = torch.full((high - low,), longest)
        places = torch.tensor(indices) - low
        outputs = torch.tensor([token for token, _ in singles])
        tokens[places] = outputs
        seen[places] = torch.tensor([row.length + 1 for _, row in singles])
        hidden = torch.arange(longest) >= seen.unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return _Batch(low, high, longest, tokens, places, outputs, mask[:, None, None])

    def _empty_grid(self) -> torch.Tensor:
        """(layers, rows, key heads and value heads, width, head_dim); the system commits memory as it is first used."""
        shape = (self.cache.keys.shape[0], self._num_rows, 2 * self._num_kv_heads, self._width, self._head_dim)
        return lazy_zeros(shape, self._dtype, self.cache.keys.device)

    def _fit(self, length: int) -> None:
        """Widen the grid for a sequence of so many tokens; narrow it when all are short again."""
        longest = max([length, *(row.length for row in self._rows.values())])
        width = self._width
        while width < longest:
            width *= 2
        if width == self._width and (self._width == _FIRST_WIDTH or 8 * longest > self._width):
            return
        while width > _FIRST_WIDTH and 4 * longest <= width:
            width //= 2
        before, self._width = self._grid, width
        self._grid = self._empty_grid()
        for row in self._rows.values():
            self._grid[:, row.index, :, : row.length] = before[:, row.index, :, : row.length]
