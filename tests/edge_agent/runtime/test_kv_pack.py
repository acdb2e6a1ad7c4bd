"""The KV pack against a plain list of arrays: whatever is opened, closed, swapped and grown, nothing is mixed up."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.runtime.kv_pack import KvPack, KvShape, Parked

SHAPE = KvShape(layers=2, kv_heads=2, head_dim=4, slots=4, context_tokens=400)


def block(tokens: int, value: float, rows: int = 1) -> np.ndarray:
    shape = (2 * SHAPE.layers, rows, SHAPE.kv_heads, tokens, SHAPE.head_dim)
    return (np.arange(np.prod(shape), dtype=np.float32) + value).reshape(shape)


class Twin:
    """A pack, and lists of arrays that hold what it should."""

    def __init__(self) -> None:
        self.pack = KvPack(SHAPE)
        self.rows: list[np.ndarray] = []
        self.parked: list[tuple[Parked, np.ndarray]] = []
        self._value = 0.0

    def act(self, action: str, pick: int, tokens: int) -> None:
        """One of the methods, on the row or the parked one that `pick` says, if there is one and room for it."""
        self._value += 1000
        if action == "add":
            self.add()
        elif action in {"unpark", "copy", "forget"}:
            if self.parked:
                getattr(self, action)(pick % len(self.parked), tokens)
        elif self.rows:
            getattr(self, action)(pick % len(self.rows), tokens)

    def add(self) -> None:
        if self.pack.free_slots:
            assert self.pack.add_row() == len(self.rows)
            self.rows.append(block(0, 0))

    def append(self, row: int, tokens: int) -> None:
        if self.rows[row].shape[3] + tokens <= SHAPE.context_tokens:
            self.pack.append(row, block(tokens, self._value))
            self.rows[row] = np.concatenate([self.rows[row], block(tokens, self._value)], axis=3)

    def remove(self, row: int, _: int) -> None:
        self._left(row, self.pack.remove_row(row))

    def park(self, row: int, _: int) -> None:
        expected = self.rows[row]
        parked, moved = self.pack.park(row)
        self._left(row, moved)
        self.parked.append((parked, expected))

    def _left(self, row: int, moved: int | None) -> None:
        assert moved == (len(self.rows) - 1 if row != len(self.rows) - 1 else None)
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def swap(self, row: int, tokens: int) -> None:
        other = tokens % len(self.rows)
        self.pack.swap_rows(row, other)
        self.rows[row], self.rows[other] = self.rows[other], self.rows[row]

    def unpark(self, index: int, tokens: int) -> None:
        parked, expected = self.parked.pop(index)
        self._came_back(parked, expected, min(tokens, parked.tokens), keep=False)

    def copy(self, index: int, tokens: int) -> None:
        parked, expected = self.parked[index]
        if self.pack.free_slots:
            self._came_back(parked, expected, min(tokens, parked.tokens), keep=True)

    def _came_back(self, parked: Parked, expected: np.ndarray, tokens: int, *, keep: bool) -> None:
        assert self.pack.unpark(parked, tokens, keep=keep) == len(self.rows)
        self.rows.append(expected[:, :, :, :tokens])

    def forget(self, index: int, _: int) -> None:
        self.pack.forget(self.parked.pop(index)[0])

    def check(self) -> None:
        assert self.pack.lengths == [rows.shape[3] for rows in self.rows]
        assert self.pack.free_slots == SHAPE.slots - len(self.rows) - len(self.parked)
        assert self.pack.parked_tokens == sum(rows.shape[3] for _, rows in self.parked)
        for row, expected in enumerate(self.rows):
            np.testing.assert_array_equal(self.pack.past(row, 1)[:, :, :, : expected.shape[3]], expected)

    def check_parked(self) -> None:
        """Take the parked ones back, one after the other, in place of the rows: each is as it was."""
        while self.parked:
            while self.rows:
                self.remove(len(self.rows) - 1, 0)
            self.unpark(0, SHAPE.context_tokens)
            self.check()


ACTIONS = ["add", "append", "append", "remove", "park", "park", "swap", "unpark", "copy", "forget"]


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), st.integers(1, 150)), max_size=60))
def test_pack_equals_a_list_of_arrays(actions: list[tuple[str, int, int]]) -> None:
    """Rows that come, grow, leave, are parked, come back whole or in part, while others are parked."""
    twin = Twin()
    for action, pick, tokens in actions:
        twin.act(action, pick, tokens)
        twin.pack.release()
        twin.check()
    twin.check_parked()


def test_the_past_of_the_first_rows_is_contiguous_and_in_place() -> None:
    pack = KvPack(SHAPE)
    for row in range(3):
        pack.add_row()
        pack.append(row, block(10 + row, row))
    past = pack.past(0, 3)
    assert past.shape == (4, 3, 2, 64, 4)
    assert all(layer.flags.c_contiguous for layer in past)
    pack.append(0, block(2, 5, rows=3))
    np.testing.assert_array_equal(past[:, 1, :, 11:13], block(2, 5, rows=3)[:, 1])


def test_too_many_rows_and_too_long_rows_are_refused() -> None:
    pack = KvPack(SHAPE)
    for _ in range(SHAPE.slots):
        pack.add_row()
    with pytest.raises(RuntimeError, match="all 4 KV slots"):
        pack.add_row()
    with pytest.raises(ValueError, match="window of 400"):
        pack.append(0, block(500, 0))


def test_the_longest_row_takes_its_padding_along() -> None:
    pack = KvPack(SHAPE)
    for tokens in (300, 10):
        pack.append(pack.add_row(), block(tokens, tokens))
    assert pack.past_tokens >= 300
    pack.remove_row(0)
    assert pack.past_tokens == 64
    np.testing.assert_array_equal(pack.past(0, 1)[:, :, :, :10], block(10, 10))


def test_memory_is_used_where_written_and_returned_on_release() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    shape = KvShape(layers=30, kv_heads=3, head_dim=64, slots=4, context_tokens=8192)
    pack = KvPack(shape)
    assert process.memory_info().rss - before < 4e6  # of 1.5 GB reserved
    # A view of one number: the block itself must not weigh in the balance.
    pack.append(pack.add_row(), np.broadcast_to(np.float32(1), (60, 1, 3, 1024, 64)))
    used = process.memory_info().rss - before
    assert used == pytest.approx(1024 * shape.bytes_per_token, rel=0.5)
    pack.remove_row(0)
    pack.release()
    assert process.memory_info().rss - before < 4e6


def test_parked_rows_stay_when_an_idle_pack_gives_its_memory_back() -> None:
    shape = KvShape(layers=4, kv_heads=4, head_dim=64, slots=4, context_tokens=1000)
    pack = KvPack(shape)
    rss = psutil.Process().memory_info
    new = np.ones((2 * shape.layers, 1, shape.kv_heads, 900, shape.head_dim), np.float32)
    before = rss().rss
    for _ in range(4):
        pack.append(pack.add_row(), new)
    parked = [pack.park(0)[0] for _ in range(4)]
    full = rss().rss
    for extra in parked[1:]:
        pack.forget(extra)
    pack.release()
    assert full - rss().rss > 0.6 * (full - before)
    row = pack.unpark(parked[0], 900, keep=False)
    np.testing.assert_array_equal(pack.past(row, 1)[:, :, :, :900], new)


def test_parking_needs_no_slot_and_no_width_of_others() -> None:
    """A short row beside a parked long one is computed as if it were alone; a full pack takes nobody more."""
    pack = KvPack(SHAPE)
    for tokens in (300, 10):
        pack.append(pack.add_row(), block(tokens, tokens))
    long, moved = pack.park(0)
    assert (moved, pack.past_tokens, pack.lengths) == (1, 64, [10])
    pack.add_row()
    pack.add_row()
    with pytest.raises(RuntimeError, match="KV slots"):
        pack.add_row()
    pack.forget(long)
    pack.add_row()
