"""Drawing from many: in constant time, those with room first, and nobody twice."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from router.dispatch.replicas.peers import Peers

NAMES = [f"r{n}" for n in range(50)]


def peers(*, with_room: int = 50, usable: int = 50) -> Peers:
    found = Peers("any")
    for at, name in enumerate(NAMES):
        found.add(name)
        found.seen(name, usable=at < usable, room=at < with_room)
    return found


def test_those_with_room_are_drawn_first_and_then_those_that_can_be_asked() -> None:
    for seed in range(50):
        drawn = list(peers(with_room=2, usable=10).draw(random.Random(seed)))
        assert set(drawn[:2]) <= {"r0", "r1"}
        assert len(drawn) == len(set(drawn))


def test_one_with_room_among_many_is_found() -> None:
    assert all(next(peers(with_room=1).draw(random.Random(seed))) == "r0" for seed in range(50))


def test_names_of_no_use_are_not_drawn() -> None:
    drawn = [name for seed in range(50) for name in peers(with_room=3).draw(random.Random(seed), {"r0", "r1"})]
    assert not {"r0", "r1"} & set(drawn)
    assert "r2" in drawn


def test_a_few_are_all_looked_at() -> None:
    few = Peers("any")
    for name in ("a", "b", "c"):
        few.add(name)
        few.seen(name, usable=False, room=False)
    assert sorted(few.draw(random.Random(0))) == ["a", "b", "c"]


def test_one_seed_draws_alike() -> None:
    chances = random.Random(7), random.Random(7)
    assert [list(peers().draw(chances[0])) for _ in range(20)] == [list(peers().draw(chances[1])) for _ in range(20)]


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), st.booleans()), max_size=60))
def test_what_was_seen_last_is_what_is_drawn_from(seen: list[tuple[str, bool, bool]]) -> None:
    found = peers()
    usable, room = set(NAMES), set(NAMES)
    for name, can_be_asked, has_room in seen:
        found.seen(name, usable=can_be_asked, room=has_room)
        (usable.add if can_be_asked else usable.discard)(name)
        (room.add if can_be_asked and has_room else room.discard)(name)
    assert set(found._usable) == usable
    assert set(found._with_room) == room
    assert len(found) == len(NAMES)
