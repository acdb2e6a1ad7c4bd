"""How many sequences a server runs at once, seen from what runs and what waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.upstream.servers.seen_slots import SeenSlots


def saw(*polls: tuple[int | None, int | None]) -> int:
    seen = SeenSlots()
    for running, waiting in polls:
        seen.saw(running, waiting)
    return seen.slots


def test_what_waits_for_one_poll_waits_for_a_step_of_the_engine() -> None:
    assert saw((1, 3), (4, 0)) == 64
    assert saw((None, None), (0, 5), (0, 5)) == 64, "nothing runs: it does not wait for a slot"


def test_what_waits_for_two_polls_shows_how_many_run() -> None:
    assert saw((8, 3), (8, 2)) == 8
    assert saw((8, 3), (4, 2), (8, 1)) == 8


def test_more_are_tried_once_nothing_waits_any_more() -> None:
    assert saw((8, 3), (8, 2), (8, 0)) == 11
    assert saw((8, 3), (8, 2), (7, 0)) == 8, "there is a slot left"
    assert saw((100, 0)) == 100


def test_declared_slots_hold_until_fewer_are_seen_to_run_and_are_found_again() -> None:
    seen = SeenSlots()
    assert seen.of(200) == 200
    seen.saw(4, 9)
    assert seen.of(200) == 200, "it may wait for a step"
    seen.saw(4, 9)
    assert seen.of(200) == 4
    assert seen.of(2) == 2
    for _ in range(30):
        seen.saw(seen.slots, 0)
    assert seen.of(200) == 200


@given(st.lists(st.tuples(st.none() | st.integers(0, 500), st.none() | st.integers(0, 500)), max_size=50))
def test_there_is_always_one(polls: list[tuple[int | None, int | None]]) -> None:
    assert saw(*polls) >= 1


@given(st.integers(1, 300))
def test_a_full_server_is_found_out_whatever_its_number(number: int) -> None:
    """A router keeps as many there as it believes in; the server runs `number` of them."""
    seen, worst = SeenSlots(), 0
    for poll in range(60):
        running = min(seen.slots, number)
        seen.saw(running, seen.slots - running)
        if poll >= 40:
            worst = max(worst, abs(seen.slots - number))
    assert worst <= number / 4 + 2
