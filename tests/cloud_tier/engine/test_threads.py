"""How many threads compute, found out by trials: on idle cores, beside neighbours, and when they come and go."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from cloud_tier.engine.threads import Threads

Took = Callable[[int, int], float]


def run(threads: Threads, steps: int, took: Took, tokens: Callable[[int], int] = lambda _: 8) -> Counter[int]:
    """Steps by the number of threads that computed them."""
    chosen: Counter[int] = Counter()
    for step in range(steps):
        number = threads.choose(tokens(step))
        chosen[number] += 1
        threads.note(tokens(step), took(number, tokens(step)))
    return chosen


def idle(cores: int) -> Took:
    return lambda number, tokens: (1 + tokens / 50) / min(number, cores) + 0.02 * number


def crowded(number: int, tokens: int) -> float:
    return (1 + tokens / 50) * (1.0 if number == 1 else 6.0)


def test_a_single_number_is_always_taken() -> None:
    assert run(Threads([3]), 500, crowded) == {3: 500}


@pytest.mark.parametrize("tokens", [1, 300], ids=["decoding", "prompts"])
def test_idle_cores_are_found_within_a_few_steps_and_kept(tokens: int) -> None:
    threads = Threads([1, 2])
    run(threads, 20, idle(2), lambda _: tokens)
    assert run(threads, 1000, idle(2), lambda _: tokens)[2] > 980


def test_beside_a_neighbour_a_core_is_left_and_trials_become_rare() -> None:
    threads = Threads([1, 2])
    assert run(threads, 5000, crowded)[2] < 50


def test_a_neighbour_that_comes_is_noticed_soon_and_one_that_goes_in_the_end() -> None:
    threads = Threads([1, 2])
    run(threads, 2000, idle(2))
    assert run(threads, 60, crowded)[2] < 20
    run(threads, 5000, crowded)
    run(threads, 1100, idle(2))
    assert run(threads, 100, idle(2))[2] > 90


def test_of_many_numbers_the_best_is_climbed_to() -> None:
    numbers = [1, 2, 4, 8, 15, 16]
    for best in (1, 4, 8, 16):

        def took(number: int, tokens: int, best: int = best) -> float:
            return 1 + abs(numbers.index(number) - numbers.index(best))

        threads = Threads(numbers)
        run(threads, 1500, took)
        assert run(threads, 1000, took)[best] > 900


def test_steps_of_other_lengths_are_not_compared() -> None:
    lengths = [1, 4, 16, 40]
    assert run(Threads([1, 2]), 400, lambda _, tokens: tokens, lambda step: lengths[step % 4]) == {1: 400}


def test_noise_does_not_make_it_leave_what_is_better() -> None:
    chance = random.Random(1)

    def noisy(number: int, tokens: int) -> float:
        return idle(2)(number, tokens) * chance.lognormvariate(0.0, 0.1) * (5 if chance.random() < 0.02 else 1)

    threads = Threads([1, 2])
    run(threads, 100, noisy)
    assert run(threads, 5000, noisy)[2] > 4500


def test_prompts_and_decoding_are_judged_apart() -> None:
    threads = Threads([1, 2])

    def took(number: int, tokens: int) -> float:
        return idle(2)(number, tokens) if tokens > 64 else crowded(number, tokens)

    run(threads, 400, took, lambda step: 200 if step // 20 % 2 else 8)
    assert threads.choose(200) == 2
    assert threads.choose(8) == 1


def test_what_decoding_found_out_holds_for_the_first_prompts() -> None:
    threads = Threads([1, 2])
    run(threads, 20, idle(2), lambda _: 1)
    assert threads.choose(200) == 2
