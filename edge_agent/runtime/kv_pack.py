"""The KV cache of a runtime whose graph takes the past as plain tensors.

All open sequences live in one pack: for each layer a key and a value array (rows, kv_heads, past, head_dim), so that
the past of the first n rows is one contiguous tensor that the graph reads in place. Every such array has its own
stretch of one anonymous memory map: address space is reserved for the worst case, memory is used only where something
was written, and `release` returns it to the system at once.

A row that nobody computes any more can be parked: its positions move to the far end of the stretches, out of every
step, into the room of a slot that no row uses. Rows and parked ones together never need more than the slots planned.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
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


@dataclass(slots=True, eq=False)
class Parked:
    """Positions of a row that has left.

    Attributes:
        room: the slot's worth of each stretch, counted from its beginning, in which they lie without gaps.
        tokens: how many.
    """

    room: int
    tokens: int


class KvPack:
    """Rows of keys and values; the past dimension grows in steps for all rows together.

    Positions beyond a row's length hold zeros or leftovers, to be masked by the caller. A masked score counts nothing
    only while it is finite, so nothing is stored that is not, or so large that it outweighs the mask.

    Attributes:
        lengths: positions in use, one entry an open row.
        parked_tokens: positions of all parked rows.
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
        self._row_bytes = row_bytes
        self._parked: dict[int, Parked] = {}  # by room
        self.parked_tokens = 0
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

    @property
    def free_slots(self) -> int:
        """Slots that hold neither a row nor a parked one."""
        return self.shape.slots - self.rows - len(self._parked)

    def add_row(self) -> int:
        if not self.free_slots:
            raise RuntimeError(f"all {self.shape.slots} KV slots are taken")
        self._clear_room(self.rows)
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

    def park(self, row: int) -> tuple[Parked, int | None]:
        """Take a row out of the steps and keep its positions. Returns them, and the row that moved as of `remove_row`.

        Costs one copy of the row, and no slot beyond its own.

        Raises:
            MemoryError: nothing has changed.
        """
        last, tokens = self.rows - 1, self.lengths[row]
        moved = last if row != last else None
        parked = Parked(self._free_room(last), tokens)
        room = self._room_view(parked)
        if parked.room > last:
            room[:] = self._view[:, row, :, :tokens]
        else:  # the room is the last row's own
            leaving = np.empty(room.shape[1:], np.float32)
            for stretch, kept in zip(self._view, room, strict=True):
                leaving[:] = stretch[row, :, :tokens]
                stretch[row, :, : self.lengths[last]] = stretch[last, :, : self.lengths[last]]
                kept[:] = leaving
            self.lengths[row], row = self.lengths[last], last
        self.remove_row(row)
        self._parked[parked.room] = parked
        self.parked_tokens += tokens
        self._touched = True
        return parked, moved

    def unpark(self, parked: Parked, tokens: int, *, keep: bool) -> int:
        """Add a row that begins with the first `tokens` of parked positions.

        Args:
            keep: leave them parked as well, which takes a free slot; else they are forgotten.
        """
        self.reserve(tokens)
        if keep:
            row = self.add_row()
        else:
            self._move_to(parked, self.rows)
            row = self.rows
        room = self._room_view(parked)
        found = np.empty((self.shape.kv_heads, tokens, self.shape.head_dim), np.float32)
        if not keep:
            self.lengths.append(0)
        if parked.room != row:
            self._view[:, row, :, :tokens] = room[:, :, :tokens]
        else:  # the row begins in the room, and may overlap
            for stretch, kept in zip(self._view, room, strict=True):
                found[:] = kept[:, :tokens]
                stretch[row, :, :tokens] = found
        self.lengths[row] = tokens
        self._touched = True
        if not keep:
            self.forget(parked)
        return row

    def forget(self, parked: Parked) -> None:
        """Give a parked row's slot up."""
        del self._parked[parked.room]
        self.parked_tokens -= parked.tokens
        self._touched = True

    def forget_all(self) -> None:
        """Give every parked row's slot up."""
        self._parked.clear()
        self.parked_tokens = 0
        self._touched = True

    def _room_view(self, parked: Parked) -> Array:
        """Lay (2·layers, kv_heads, tokens, head_dim) over a room."""
        shape = self.shape
        position = shape.head_dim * _FLOAT_BYTES
        start = parked.room * self._row_bytes // _FLOAT_BYTES
        return np.lib.stride_tricks.as_strided(
            self._flat[start:],
            shape=(2 * shape.layers, shape.kv_heads, parked.tokens, shape.head_dim),
            strides=(self._stretch_bytes, parked.tokens * position, position, _FLOAT_BYTES),
        )

    def _free_room(self, least: int) -> int:
        """Return the last room from `least` on in which nothing is parked. There must be one."""
        return next(room for room in range(self.shape.slots - 1, least - 1, -1) if room not in self._parked)

    def _clear_room(self, room: int) -> None:
        """Move what is parked in a room to a free one behind it."""
        parked = self._parked.pop(room, None)
        if parked is not None:
            there = Parked(self._free_room(room + 1), parked.tokens)
            self._room_view(there)[:] = self._room_view(parked)
            parked.room = there.room
            self._parked[parked.room] = parked

    def _move_to(self, parked: Parked, room: int) -> None:
        """Put parked positions into a room; what is parked there changes places with them."""
        other = self._parked.get(room)
        if other is None or other is parked:
            return
        here, there = self._room_view(parked), self._room_view(other)
        leaving = np.empty(here.shape[1:], np.float32)
        parked.room, other.room = room, parked.room
        self._parked[parked.room], self._parked[other.room] = parked, other
        for mine, theirs, my_new, their_new in zip(
            here, there, self._room_view(parked), self._room_view(other), strict=True
        ):
            leaving[:] = mine
            their_new[:] = theirs
            my_new[:] = leaving

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
        """Clear all that a step can read and that is unsound or belongs to no row, parked ones included.

        Slow: after a failure only.
        """
        self.forget_all()
        for row in range(self.shape.slots):
            length = self.lengths[row] if row < self.rows else 0
            for stretch in self._view[:, row]:
                stretch[:, length:] = 0
                if not _is_sound(stretch[:, :length]):
                    stretch[:, :length] = 0

    def release(self) -> None:
        """Return the memory of a pack without rows to the system, but for what is parked."""
        if self.rows or not self._touched:
            return
        if self._map is not None and _DONT_NEED is not None:
            for start, end in self._gaps():
                self._map.madvise(_DONT_NEED, start, end - start)
        self._view = self._viewed(_GROWTH_TOKENS)
        self.past_tokens = _GROWTH_TOKENS
        self._touched = False

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Whole pages of the map between what is parked, as (first byte, byte after the last)."""
        size_bytes = 2 * self.shape.layers * self._stretch_bytes
        if not self._parked:
            yield 0, size_bytes
            return
        tokens_bytes = self.shape.kv_heads * self.shape.head_dim * _FLOAT_BYTES
        start = 0
        for stretch in range(0, size_bytes, self._stretch_bytes):
            for room in sorted(self._parked):
                kept = stretch + room * self._row_bytes
                first, end = _round_up(start, mmap.PAGESIZE), kept // mmap.PAGESIZE * mmap.PAGESIZE
                if first < end:
                    yield first, end
                start = kept + self._parked[room].tokens * tokens_bytes
        first = _round_up(start, mmap.PAGESIZE)
        if first < size_bytes:
            yield first, size_bytes

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
