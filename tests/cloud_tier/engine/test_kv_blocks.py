"""KV blocks: none is ever lost or held twice over, prefixes are shared only when the tokens really agree."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_tier.engine.kv_blocks import BlockPool, BlockTable


def _filled(pool: BlockPool, tokens: list[int], room: int = 0) -> BlockTable:
    table = pool.open(pool.cached_prefix(tokens), pool.blocks_for(len(tokens)), room)
    assert table is not None
    pool.register(table, tokens, len(tokens))
    return table


def _owners_share_nothing(tables: list[BlockTable]) -> bool:
    owners: dict[int, set[str]] = {}
    for table in tables:
        for block in table.ids:
            owners.setdefault(block, set()).add(table.salt)
    return all(len(sharing) == 1 for sharing in owners.values())


@pytest.mark.slow
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(2, 40), block_tokens=st.sampled_from([1, 4, 16]))
def test_blocks_are_conserved_whatever_happens(seed: int, num_blocks: int, block_tokens: int) -> None:
    draw = random.Random(seed)
    pool = BlockPool(num_blocks, block_tokens)
    live: list[tuple[BlockTable, list[int]]] = []
    for _ in range(60):
        action = draw.random()
        if action < 0.5:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, num_blocks * block_tokens + 1))]
            free, owner = pool.num_free, draw.choice(["", "a", "b"])
            prefix = pool.cached_prefix(tokens, owner)
            table = pool.open(prefix, pool.blocks_for(len(tokens)), draw.randrange(num_blocks), owner)
            if table is None:
                assert pool.num_free == free
                continue
            live.append((table, tokens))
            pool.register(table, tokens, draw.randrange(len(tokens) + 1))
        elif live and action < 0.75:
            table, tokens = draw.choice(live)
            wanted = len(table.ids) + draw.randrange(4)
            grown = pool.grow(table, wanted, draw.randrange(num_blocks))
            assert not grown or len(table.ids) == wanted
            tokens += [draw.randrange(2) for _ in range(len(table.ids) * block_tokens - len(tokens))]
        elif live:
            table, tokens = live.pop(draw.randrange(len(live)))
            pool.register(table, tokens, len(tokens))
            if draw.random() < 0.3:
                pool.distrust(table)
                assert not {block for block, _ in pool.cached_prefix(tokens, table.salt)} & set(table.ids)
            pool.close(table)
            if draw.random() < 0.5:
                pool.zeroed()
        pool.check([table for table, _ in live])
        assert _owners_share_nothing([table for table, _ in live])
        for table, _ in live:
            assert [block for first, size in table.runs for block in range(first, first + size)] == table.ids
    for table, _ in live:
        pool.close(table)
    pool.check([])
    assert pool.num_free == num_blocks
    assert pool.open([], num_blocks, 0) is not None  # every block can be had again, cached or once reserved


def test_distrusted_blocks_are_zeroed_once_free_and_what_followed_them_is_forgotten() -> None:
    pool = BlockPool(16, 4)
    first = _filled(pool, list(range(16)))
    pool.close(first)
    second = pool.open(pool.cached_prefix([*range(8), 50]), 3, 0)
    sharer = pool.open(pool.cached_prefix([*range(8), 60]), 3, 0)
    assert second is not None
    assert sharer is not None
    shared, own = second.ids[:2], second.ids[2]
    pool.distrust(second)
    assert pool.cached_prefix(list(range(16))) == [], "also the two blocks that first computed after the shared ones"
    assert pool.to_zero == []
    pool.close(second)
    assert pool.to_zero == [own], "the sharer still reads the other two"
    pool.close(sharer)
    assert sorted(pool.to_zero) == sorted([own, *shared])
    pool.zeroed()
    assert pool.to_zero == []
    again = _filled(pool, list(range(16)))
    pool.close(again)
    assert len(pool.cached_prefix(list(range(16)))) == 3
    pool.check([])


def test_a_prompt_shares_the_blocks_of_its_known_beginning() -> None:
    pool = BlockPool(16, 4)
    first = _filled(pool, list(range(12)))
    second = pool.open(pool.cached_prefix([*range(8), 99, 98, 97]), 3, 0)
    assert second is not None
    assert second.ids[:2] == first.ids[:2]
    assert second.ids[2] not in first.ids
    pool.close(first)
    pool.check([second])


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_fully_known_prompt_leaves_its_last_token_to_compute(length: int) -> None:
    pool = BlockPool(16, 4)
    pool.close(_filled(pool, list(range(length))))
    assert len(pool.cached_prefix(list(range(length)))) * 4 == length - 4
    assert len(pool.cached_prefix(list(range(length + 1)))) * 4 == length


def test_a_digest_that_collides_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloud_tier.engine.kv_blocks._digest", lambda parent, ids: b"same")
    pool = BlockPool(16, 4)
    _filled(pool, [1, 2, 3, 4, 5])
    assert pool.cached_prefix([9, 9, 9, 9, 9]) == []


def test_the_blocks_released_longest_ago_are_taken_first() -> None:
    pool = BlockPool(4, 4)
    old, new = _filled(pool, [0] * 8), _filled(pool, [1] * 8)
    pool.close(old)
    pool.close(new)
    pool.open([], 2, 0)
    assert pool.cached_prefix([0] * 9) == []
    assert len(pool.cached_prefix([1] * 9)) == 2


def test_sequences_that_grow_side_by_side_stay_in_one_run_each() -> None:
    pool = BlockPool(64, 4)
    tables = [pool.open([], 1, 16) for _ in range(4)]
    for size in range(2, 17):
        for table in tables:
            assert table is not None
            assert pool.grow(table, size, 16 - size)
    assert [len(table.runs) for table in tables if table] == [1, 1, 1, 1]


def test_a_reservation_yields_when_nothing_else_is_free() -> None:
    pool = BlockPool(8, 4)
    greedy, other = pool.open([], 1, 8), pool.open([], 7, 0)
    assert greedy is not None
    assert other is not None
    assert not pool.grow(greedy, 2, 1)
    pool.check([greedy, other])


def test_nothing_is_shared_when_prefix_caching_is_off() -> None:
    pool = BlockPool(8, 4, prefix_caching=False)
    pool.close(_filled(pool, [0] * 8))
    assert pool.cached_prefix([0] * 9) == []


def test_other_owners_find_nothing_of_a_prompt() -> None:
    pool = BlockPool(16, 4)
    tokens = list(range(9))
    table = pool.open(pool.cached_prefix(tokens, "a"), 3, 0, "a")
    assert table is not None
    pool.register(table, tokens, 9)
    pool.close(table)
    assert [len(pool.cached_prefix(tokens, owner)) for owner in ("a", "b", "")] == [2, 0, 0]


def test_what_is_computed_in_the_slack_costs_nobody_a_prefix() -> None:
    """Lines of a batch fill the cache many times over; the chat beside them goes on where it was."""
    pool = BlockPool(16, 4)
    chat = list(range(16))
    pool.close(_filled(pool, chat))
    lines = [[100 + number] * 12 for number in range(40)]
    for line in lines:
        pool.close(_filled(pool, line), in_slack=True)
    assert len(pool.cached_prefix([*chat, 1])) == 4
    assert len(pool.cached_prefix([*lines[-1], 1])) == 3, "among themselves lines keep the newest"
    pool.close(_filled(pool, [*chat, 7]), in_slack=True)  # a line that begins like the chat
    for line in lines:
        pool.close(_filled(pool, line), in_slack=True)
    assert len(pool.cached_prefix([*chat, 1])) == 4
    for number in range(8):
        pool.close(_filled(pool, [200 + number] * 12))
    assert len(pool.cached_prefix([*chat, 1])) < 4, "what others wait for takes the oldest"
    pool.check([])
