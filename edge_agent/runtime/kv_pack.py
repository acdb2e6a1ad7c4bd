"""The KV cache of a runtime whose graph takes the past as plain tensors.

All open sequences live in one pack: for each layer a key and a value array (rows, kv_heads, past, head_dim), so that
the past of the first n rows is one contiguous tensor that the graph reads in place. Every such array has its own
stretch of one anonymous memory map: address space is reserved for the worst case, memory is used only where something
was written, and `release` returns it to the system at once.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

_FLOAT_BYTES = 4
_GROWTH_TOKENS = 64
_LARGEST = 1e6  # models that run in float16 stay below 65,504; a score of such keys stays below the mask of 1e9
_NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)
_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)


@dataclass(frozen=True, slots=True)
class KvShape:
    """Sizes of a cache: `slots` rows of at most `context_tokens` positions."""

    layers: int
    kv_heads: int
    head_dim: int
    slots: int
    context_tokens: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * _FLOAT_BYTES


class KvPack:
    """Rows of keys and values; the past dimension grows in steps for all rows together.

    Positions beyond a row's length hold zeros or leftovers, to be masked by the caller. A masked score counts nothing
    only while it is finite, so nothing is stored that is not, or so large that it outweighs the mask.

    Attributes:
        lengths: positions in use, one entry an open row.
    """

    def __init__(self, shape: KvShape, memory: Callable[[int], Array] | None = None) -> None:
        """Lay the pack out.

        Args:
            memory: gives zeroed float32 memory of a number of elements that the runtime can read in place; None maps
                pages that cost nothing until they are used, and that `release` can return.
        """
        self.shape = shape
        self.lengths: list[int] = []
        self._past_max = max(shape.context_tokens, _GROWTH_TOKENS)
        row_bytes = shape.kv_heads * self._past_max * shape.head_dim * _FLOAT_BYTES
        self._stretch_bytes = _round_up(shape.slots * row_bytes, mmap.PAGESIZE)
        size_bytes = 2 * shape.layers * self._stretch_bytes
        self._map = _lazy_pages(size_bytes) if memory is None else None
        self._flat: Array = (
            np.frombuffer(self._map, dtype=np.float32) if self._map is not None else memory(size_bytes // _FLOAT_BYTES)  # type: ignore[misc]
        )
        self._touched = False
        self._view = self._viewed(_GROWTH_TOKENS)
        self.past_tokens = _GROWTH_TOKENS

    def _viewed(self, past_tokens: int) -> Array:
        """Lay (2·layers, slots, kv_heads, past, head_dim) over the map; even stretches are keys, odd are values."""
        shape = self.shape
        position = shape.head_dim * _FLOAT_BYTES
        head = past_tokens * position
        return np.lib.stride_tricks.as_strided(
            self._flat,
            shape=(2 * shape.layers, shape.slots, shape.kv_heads, past_tokens, shape.head_dim),
            strides=(self._stretch_bytes, shape.kv_heads * head, head, position, _FLOAT_BYTES),
        )

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def past(self, row: int, rows: int) -> Array:
        """The stored past of `rows` rows from `row` on: (2·layers, rows, kv_heads, past_tokens, head_dim), in place.

        Each [i] is contiguous.
        """
        return self._view[:, row : row + rows]

    def add_row(self) -> int:
        if self.rows >= self.shape.slots:
            raise RuntimeError(f"all {self.shape.slots} KV slots are taken")
        self.lengths.append(0)
        return self.rows - 1

    def remove_row(self, row: int) -> int | None:
        """Drop a row; the last row takes its place. Returns the row that moved, None if none had to."""
        last = self.rows - 1
        if row != last:
            length = self.lengths[last]
            self._view[:, row, :, :length] = self._view[:, last, :, :length]
            self.lengths[row] = length
        self.lengths.pop()
        self._shrink()
        return last if row != last else None

    def swap_rows(self, one: int, other: int) -> None:
        """Exchange two rows."""
        length = max(self.lengths[one], self.lengths[other])
        kept = self._view[:, one, :, :length].copy()
        self._view[:, one, :, :length] = self._view[:, other, :, :length]
        self._view[:, other, :, :length] = kept
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` positions in every row.

        Raises:
            ValueError: more than the context window.
        """
        if tokens > self._past_max:
            raise ValueError(f"{tokens} positions exceed the window of {self.shape.context_tokens}")
        if tokens > self.past_tokens:
            # A quarter more than needed: copying on growth then costs little per token, whatever the length.
            self._relayout(min(self._past_max, _round_up(tokens + tokens // 4, _GROWTH_TOKENS)))

    def append(self, row: int, new: Array) -> list[int]:
        """Store new positions behind the last ones of `row` and the rows after it.

        Args:
            new: (2·layers, rows, kv_heads, tokens, head_dim).

        Returns:
            Offsets of the rows whose new positions no sound model computes; zeros were stored for them.
        """
        tokens = new.shape[3]
        self.reserve(max(self.lengths[row : row + new.shape[1]]) + tokens)
        unsound: list[int] = []
        for offset in range(new.shape[1]):
            start = self.lengths[row + offset]
            sound = _is_sound(new[:, offset])
            self._view[:, row + offset, :, start : start + tokens] = new[:, offset] if sound else 0
            self.lengths[row + offset] = start + tokens
            if not sound:
                unsound.append(offset)
        self._touched = True
        return unsound

    def scrub(self) -> None:
        """Clear all that a step can read and that is unsound or belongs to no row. Slow: after a failure only."""
        for row in range(self.shape.slots):
            length = self.lengths[row] if row < self.rows else 0
            for stretch in self._view[:, row]:
                stretch[:, length:] = 0
                if not _is_sound(stretch[:, :length]):
                    stretch[:, :length] = 0

    def release(self) -> None:
        """Return the memory of an empty pack to the system."""
        if self.rows or not self._touched:
            return
        if self._map is not None and _DONT_NEED is not None:
            self._map.madvise(_DONT_NEED)
        self._view = self._viewed(_GROWTH_TOKENS)
        self.past_tokens = _GROWTH_TOKENS
        self._touched = False

    def _shrink(self) -> None:
        """Once the longest row has left, stop dragging its padding through every step."""
        longest = max(self.lengths, default=0)
        wanted = _round_up(longest + longest // 4 + 1, _GROWTH_TOKENS)
        if wanted * 2 <= self.past_tokens:
            self._relayout(wanted)

    def _relayout(self, past_tokens: int) -> None:
        old = self._view
        new = self._viewed(past_tokens)
        keep = max(self.lengths, default=0)
        if keep:
            # Old and new layout overlap. One buffer for all, made before anything moves: memory may be what is short.
            kept = np.empty((self.rows, self.shape.kv_heads, keep, self.shape.head_dim), np.float32)
            for stretch_old, stretch_new in zip(old, new, strict=True):
                kept[:] = stretch_old[: self.rows, :, :keep]
                stretch_new[: self.rows, :, :keep] = kept
        self.past_tokens = past_tokens
        self._view = new


def _is_sound(values: Array) -> bool:
    """Whether all are within what a model computes; NaN is not."""
    return not values.size or bool(values.min() > -_LARGEST and values.max() < _LARGEST)


def _lazy_pages(size_bytes: int) -> mmap.mmap:
    # Private: pages of a shared map would stay in memory after MADV_DONTNEED.
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _NO_HUGE_PAGES is not None:
        pages.madvise(_NO_HUGE_PAGES)  # a 2 MiB page for a 20 KiB row would undo the lazy use of memory
    return pages


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
