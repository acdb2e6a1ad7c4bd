"""The line of those who wait for a credit: oldest first within a key, keys by turns, the vanished forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.signals.credit_line import CreditLine
from router.values.credits import Asker


def device(name: str | int, key: str = "k") -> Asker:
    return Asker(key, str(name))


def order(line: CreditLine, *devices: Asker) -> list[str]:
    return [one.instance for one in sorted(devices, key=line.ahead)]


def test_one_key_is_served_in_the_order_of_asking() -> None:
    line = CreditLine()
    devices = [device(index) for index in range(5)]
    for one in devices:
        line.join(one)
        line.join(one)  # asking again keeps the place
    assert [line.ahead(one) for one in devices] == [0, 1, 2, 3, 4]
    line.leave(devices[1])
    assert [line.ahead(one) for one in devices if one in line] == [0, 1, 2, 3]
    assert len(line) == 4


def test_keys_take_turns_whatever_their_size() -> None:
    line = CreditLine()
    crowd = [device(index, "crowd") for index in range(100)]
    for one in crowd:
        line.join(one)
    lonely = device("lonely", "other")
    line.join(lonely)
    assert line.ahead(lonely) <= 1


def test_a_key_whose_devices_give_up_does_not_fall_behind() -> None:
    line = CreditLine()
    crowd = [device(index, "crowd") for index in range(1000)]
    for one in crowd:
        line.join(one)
    for one in crowd[:-1]:
        line.leave(one)
    others = [device(index, "other") for index in range(10)]
    for one in others:
        line.join(one)
    assert line.ahead(crowd[-1]) <= 1


def test_who_is_served_often_goes_behind_who_was_served_less() -> None:
    line = CreditLine()
    greedy, modest = device("greedy", "a"), device("modest", "b")
    line.join(greedy)
    line.granted(greedy, 5)
    line.join(greedy)
    line.join(modest)
    assert order(line, greedy, modest) == ["modest", "greedy"]


def test_a_place_can_be_given_back() -> None:
    line = CreditLine()
    first, second, third = device(1), device(2), device(3)
    for one in (first, second, third):
        line.join(one)
    place = line.granted(first, 1)
    line.join(first, place)
    assert order(line, first, second, third) == ["1", "2", "3"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.sampled_from(["join", "leave", "grant"]))))
def test_places_are_a_permutation_whatever_happens(steps: list[tuple[int, int, str]]) -> None:
    line = CreditLine()
    inside: dict[Asker, None] = {}
    for key, name, what in steps:
        one = device(name, f"k{key}")
        if what == "join":
            line.join(one)
            inside[one] = None
        elif one in inside:
            line.leave(one) if what == "leave" else line.granted(one, 1 + name)
            del inside[one]
        assert sorted(line.ahead(other) for other in inside) == list(range(len(inside)))
        assert len(line) == len(inside)
        for key_of in {other.caller for other in inside}:  # first come, first served within a key
            assert line.length_of(key_of) == sum(other.caller == key_of for other in inside)


@given(st.integers(2, 5), st.integers(5, 40))
def test_keys_that_keep_asking_get_equal_shares(keys: int, rounds: int) -> None:
    line = CreditLine()
    devices = [device(index, f"k{index % keys}") for index in range(keys * (1 + keys))]
    for one in devices:
        line.join(one)
    served = dict.fromkeys([f"k{index}" for index in range(keys)], 0)
    for _ in range(rounds * keys):
        first = min(devices, key=line.ahead)
        line.granted(first, 1)
        served[first.caller] += 1
        line.join(first)
    assert max(served.values()) - min(served.values()) <= 1
