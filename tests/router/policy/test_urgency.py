"""Who can wait lets those go first who cannot; where nobody can, the value a second decides alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.urgency import PATIENT, Urgency, urgency_of
from router.policy.worth import worths_of
from router.simulation.run import simulate
from router.simulation.values import SimRequest
from router.simulation.world import DeviceSpec, NoiseSpec, RungSpec, World
from router.values.request import Objective
from tests.router.policy.test_worth import candidate, situation

RUNG = RungSpec(variant="m", quality=1.0, prefill_tokens_per_s=2000, step_ms=10, batch_slope=0.1)
WORLD = World(devices=(DeviceSpec(name="edge", slots=4, rungs=(RUNG,)),), noise=NoiseSpec(prior_error_sigma=0.0))


def judged(waiting: int, objective: Objective, **changes: Any) -> Urgency:
    case = situation(candidate(), objective=objective, waiting=waiting, **changes)
    return urgency_of(worths_of(case.candidates, case), case)


def test_one_that_waits_alone_can_wait_for_others_that_come() -> None:
    """Else all who stand in a line would move when the second one comes."""
    alone, two = (judged(waiting, Objective(deadline_s=60.0)) for waiting in (1, 2))
    assert alone.factor == two.factor == PATIENT.factor < 1.0
    assert two.grows_in_s < alone.grows_in_s < 60.0


def test_one_with_much_time_lets_one_with_little_go_first_while_all_can_be_served() -> None:
    patient, pressed = judged(8, Objective(deadline_s=60.0)), judged(8, Objective(deadline_s=6.0))
    assert patient.factor < pressed.factor <= 1.0
    assert patient.grows_in_s < 60.0, "it is judged again in time"


def test_where_nobody_can_wait_for_all_others_value_a_second_decides() -> None:
    crowd = 1_000
    assert judged(crowd, Objective(deadline_s=60.0)).factor == judged(crowd, Objective(deadline_s=6.0)).factor == 1.0


def test_the_longest_wait_is_a_limit_too() -> None:
    """Who asked for no time is turned away after `max_wait_ms`."""
    assert judged(8, Objective(), wait_left_s=30.0).factor < 1.0
    assert judged(8, Objective(), wait_left_s=0.5).factor == 1.0


@given(deadline_s=st.floats(1.0, 120.0), waiting=st.integers(1, 500), more=st.integers(0, 500))
def test_the_more_others_wait_the_more_urgent_it_is(deadline_s: float, waiting: int, more: int) -> None:
    few, many = (judged(number, Objective(deadline_s=deadline_s)) for number in (waiting, waiting + more))
    assert 0.0 < few.factor <= many.factor <= 1.0
    assert few.grows_in_s > 0.0


def asked(at_s: float, index: int) -> SimRequest:
    """A chat: none of them is much longer than another."""
    return SimRequest(at_s, 60 + 11 * index % 40, 20 + 7 * index % 20, Objective(deadline_s=9.0))


@pytest.mark.parametrize("seed", range(3))
def test_a_burst_that_can_wait_is_not_put_back_behind_newcomers_until_it_is_lost(seed: int) -> None:
    """First come, first served keeps all of it; by value a second alone a fifth is lost."""
    before = [asked(0.5 * i, i) for i in range(30)]
    burst = [asked(16.0 + 0.001 * i, i) for i in range(36)]
    after = [asked(16.5 + 0.12 * i, i) for i in range(80)]
    settings = msgspec.structs.replace(WORLD.router, max_queue=128)
    result = simulate(WORLD, [*before, *burst, *after], settings, seed=seed)
    assert result.kept_share > 0.93
