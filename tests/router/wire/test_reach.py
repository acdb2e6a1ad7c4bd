"""Which tiers a tier reaches, as it is told: bounded, the nearest first, and what cannot be read left out."""

from __future__ import annotations

from router.wire.headers import MAX_HOPS
from router.wire.reach import beyond, decode_reach, encode_reach


def many(links: int, number: int) -> dict[str, int]:
    return {f"tier-of-{links}-{n:048}": links for n in range(number)}


def test_what_is_told_is_read_back() -> None:
    reach = {"itself-00": 0, "above-000": 1, "farther-0": 2}
    assert decode_reach(encode_reach(reach)) == reach
    assert decode_reach(f"itself-00=0, short=1, above-000=x, farther-0={MAX_HOPS + 1}, above-001=1") == {
        "itself-00": 0,
        "above-001": 1,
    }


def test_of_very_many_the_nearest_are_told() -> None:
    reach = beyond("itself-00", [many(3, 150), many(1, 150)])
    assert len(reach) == 200
    assert reach["itself-00"] == 0
    assert sorted(reach.values())[1:151] == [2] * 150
    assert decode_reach(encode_reach(reach)) == reach


def test_of_very_many_that_are_told_the_nearest_are_kept() -> None:
    told = ", ".join(f"near-{n:05}={n % 2 + 1}" for n in range(600))
    kept = decode_reach(told)
    assert (len(kept), set(kept.values())) == (200, {1})
