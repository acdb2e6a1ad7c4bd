"""The KV pack against a plain list of arrays: whatever is opened, closed, swapped and grown, nothing is mixed up."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.runtime.kv_pack import KvPack, KvShape

SHAPE = KvShape(layers=2, kv_heads=2, head_dim=4, slots=4, context_tokens=400)


def block(tokens: int, value: float, rows: int = 1) -> np.ndarray:
    shape = (2 * SHAPE.layers, rows, SHAPE.kv_heads, tokens, SHAPE.head_dim)
    return (np.arange(np.prod(shape), dtype=np.float32) + value).reshape(shape)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("aardfs"), st.integers(0, 3), st.integers(1, 150)), max_size=40))
def test_pack_equals_a_list_of_arrays(actions: list[tuple[str, int, int]]) -> None:
    pack = KvPack(SHAPE)
    model: list[np.ndarray] = []
    value = 0.0
    for action, pick, tokens in actions:
        value += 1000
        if action == "d" and len(model) < SHAPE.slots:
            assert pack.add_row() == len(model)
            model.append(block(0, 0))
        elif not model:
            continue
        elif action in {"a", "f"}:
            row = pick % len(model)
            if model[row].shape[3] + tokens <= SHAPE.context_tokens:
                pack.append(row, block(tokens, value))
                model[row] = np.concatenate([model[row], block(tokens, value)], axis=3)
        elif action == "r":
            row = pick % len(model)
            moved = pack.remove_row(row)
            assert moved == (len(model) - 1 if row != len(model) - 1 else None)
            model[row] = model[-1]
            model.pop()
        else:
            row, other = pick % len(model), tokens % len(model)
            pack.swap_rows(row, other)
            model[row], model[other] = model[other], model[row]
        assert pack.lengths == [rows.shape[3] for rows in model]
        for row, expected in enumerate(model):
            np.testing.assert_array_equal(pack.past(row, 1)[:, :, :, : expected.shape[3]], expected)


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
