"""The prefix cache of a simulated device: whole blocks, chained, by owner, within its room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.simulation.prefix_cache import BLOCK_TOKENS, PrefixCache
from router.simulation.run import simulate
from router.simulation.values import SimRequest
from router.simulation.world import DeviceSpec, NoiseSpec, RungSpec, World

TEXT = tuple(range(10 * BLOCK_TOKENS))


def test_whole_blocks_of_the_common_beginning_are_found_but_never_the_whole_prompt() -> None:
    cache = PrefixCache(10_000)
    assert cache.find("ann", TEXT) == 0
    cache.keep("ann", TEXT)
    assert cache.find("ann", TEXT) == 9 * BLOCK_TOKENS, "the last token is always computed"
    assert cache.find("ann", (*TEXT, 1, 2)) == len(TEXT)
    assert cache.find("ann", (*TEXT[:40], 7, *TEXT[41:])) == 2 * BLOCK_TOKENS
    assert cache.find("ben", TEXT) == 0, "another owner's"


def test_the_end_of_what_was_longest_unused_is_forgotten_first() -> None:
    cache = PrefixCache(12 * BLOCK_TOKENS)
    cache.keep("", TEXT)
    cache.keep("", tuple(range(5_000, 5_000 + 4 * BLOCK_TOKENS)))
    assert len(cache) == 12
    assert cache.find("", (*TEXT, 1)) == 8 * BLOCK_TOKENS


def test_sequences_that_run_take_the_room_and_give_it_back() -> None:
    cache = PrefixCache(10 * BLOCK_TOKENS)
    cache.keep("", TEXT)
    cache.hold(6 * BLOCK_TOKENS)
    assert len(cache) == 4
    cache.hold(-6 * BLOCK_TOKENS)
    cache.keep("", TEXT)
    assert len(cache) == 10


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 200), st.sampled_from(["find", "keep", "hold"])), max_size=40)
)
def test_what_is_cached_and_held_never_exceeds_the_room(steps: list[tuple[int, int, str]]) -> None:
    cache, held = PrefixCache(20 * BLOCK_TOKENS), 0
    for seed, length, what in steps:
        ids = tuple(range(seed * 1_000, seed * 1_000 + length))
        if what == "keep":
            cache.keep("", ids)
        elif what == "find":
            assert 0 <= cache.find("", ids) < length
        else:
            cache.hold(length - held)
            held = length
        assert len(cache) * BLOCK_TOKENS + held <= 20 * BLOCK_TOKENS or len(cache) == 0


@pytest.mark.parametrize("kv_tokens", [None, 100_000])
def test_a_later_turn_computes_only_what_is_new(kv_tokens: int | None) -> None:
    rung = RungSpec(variant="m", quality=1.0, prefill_tokens_per_s=1_000.0, step_ms=10.0)
    device = DeviceSpec(name="gpu", slots=2, rungs=(rung,), kv_tokens=kv_tokens)
    world = World(devices=(device,), noise=NoiseSpec(sigma=0.0, prior_error_sigma=0.0))
    first = SimRequest(0.0, 800, 80, token_ids=tuple(range(800)), answer_ids=tuple(range(800, 880)))
    second = SimRequest(100.0, 900, 20, token_ids=tuple(range(900)))
    one, two = simulate(world, [first, second]).rows
    assert one.ttft_s == pytest.approx(0.8)
    if kv_tokens is None:
        assert (one.cached_tokens, two.cached_tokens) == (None, None)
        assert two.ttft_s == pytest.approx(0.9)
    else:
        assert (one.cached_tokens, two.cached_tokens) == (0, 880)
        assert two.ttft_s == pytest.approx(0.02)
