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


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aardfspppukm"), st.integers(0, 3), st.integers(1, 150)), max_size=60))
def test_pack_equals_a_list_of_arrays(actions: list[tuple[str, int, int]]) -> None:
    """Rows that come, grow, leave, are parked, come back whole or in part, while others are parked."""
    pack = KvPack(SHAPE)
    model: list[np.ndarray] = []
    parked: list[tuple[Parked, np.ndarray]] = []
    value = 0.0
    for action, pick, tokens in actions:
        value += 1000
        if action in "uk" and parked:
            index = pick % len(parked)
            there, expected = parked[index]
            keep = action == "k" and pack.free_slots > 0
            length = min(tokens, there.tokens)
            assert pack.unpark(there, length, keep=keep) == len(model)
            model.append(expected[:, :, :, :length])
            if not keep:
                del parked[index]
        elif action == "m" and parked:
            pack.forget(parked.pop(pick % len(parked))[0])
        elif action == "d" and pack.free_slots:
            assert pack.add_row() == len(model)
            model.append(block(0, 0))
        elif not model:
            continue
        elif action in {"a", "f"}:
            row = pick % len(model)
            if model[row].shape[3] + tokens <= SHAPE.context_tokens:
                pack.append(row, block(tokens, value))
                model[row] = np.concatenate([model[row], block(tokens, value)], axis=3)
        elif action in {"r", "p"}:
            row = pick % len(model)
            if action == "p":
                there, moved = pack.park(row)
                parked.append((there, model[row]))
            else:
                moved = pack.remove_row(row)
            assert moved == (len(model) - 1 if row != len(model) - 1 else None)
            model[row] = model[-1]
            model.pop()
        elif action == "s":
            row, other = pick % len(model), tokens % len(model)
            pack.swap_rows(row, other)
            model[row], model[other] = model[other], model[row]
        pack.release()
        assert pack.lengths == [rows.shape[3] for rows in model]
        assert pack.free_slots == SHAPE.slots - len(model) - len(parked)
        assert pack.parked_tokens == sum(rows.shape[3] for _, rows in parked)
        for row, expected in enumerate(model):
            np.testing.assert_array_equal(pack.past(row, 1)[:, :, :, : expected.shape[3]], expected)
    for there, expected in parked:  # one after the other: each comes back as it was
        for row in range(pack.rows, 0, -1):
            pack.remove_row(row - 1)
        row = pack.unpark(there, there.tokens, keep=False)
        np.testing.assert_array_equal(pack.past(row, 1)[:, :, :, : there.tokens], expected)


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
