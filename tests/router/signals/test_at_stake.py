"""What those who run lose by a prompt beside them: against lengths drawn one by one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from router.signals.at_stake import AtStake
from router.signals.in_flight import Attempt
from router.values.choice import Choice
from router.values.length import EDGES, LengthCurve
from router.values.prediction import Prediction, TtftFeatures
from router.values.request import Objective
from router.values.situation import Candidate
from tests.support.router_fakes import info

MEAN, PACE_S = 100.0, 0.02
CURVE = LengthCurve.of([math.exp(-edge / MEAN) for edge in EDGES])
DRAWS = np.random.default_rng(5).exponential(MEAN, 400_000)
TOLD = Prediction(0.0, 0.5, 0.6, PACE_S, 0.03, 2.5, 4.0, free=True, prefill_s=0.4, network_s=0.1)


def running(objective: Objective, *, out: int = 0, pace_s: float = PACE_S, quality: float = 1.0) -> Attempt:
    """An answer that was accepted and sent at second 0, and whose first token came at 0.5."""
    choice = Choice(Candidate(replace(info(), quality=quality), TOLD), "test", degraded=False)
    work, replica = TtftFeatures(100.0, 0.0), None
    attempt = Attempt(
        replica,  # type: ignore[arg-type]
        choice,
        0.0,
        work,
        prompt_tokens=100,
        expected_tokens=100,
        length=CURVE,
        objective=objective,
    )
    attempt.ends_s = math.inf if objective.ends_s is None else objective.ends_s
    if out:
        attempt.first_at_s, attempt.tokens = 0.5, out
        attempt.last_at_s = 0.5 + (out - 1) * pace_s
    return attempt


def lost(*attempts: Attempt, held_up_s: float, priority: int = 0, now_s: float | None = None) -> float:
    moment_s = max(attempt.last_at_s for attempt in attempts) if now_s is None else now_s
    return AtStake(attempts, moment_s).lost(held_up_s, priority)


@pytest.mark.parametrize("held_up_s", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("out", [2, 40, 120])
def test_a_deadline_is_lost_as_often_as_by_lengths_that_are_drawn(out: int, held_up_s: float) -> None:
    attempt = running(Objective(deadline_s=4.0), out=out)
    lengths = DRAWS[out < DRAWS]
    ends_s = attempt.last_at_s + (lengths - out) * PACE_S
    drawn = (ends_s <= 4.0).mean() - (ends_s + held_up_s <= 4.0).mean()
    assert lost(attempt, held_up_s=held_up_s) == pytest.approx(drawn, abs=0.03)


@pytest.mark.parametrize("pace_s", [0.02, 0.039, 0.05])
@pytest.mark.parametrize("held_up_s", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("deadline_s", [None, 6.0])
def test_so_is_a_tpot_alone_and_with_a_deadline(pace_s: float, held_up_s: float, deadline_s: float | None) -> None:
    out = 30
    attempt = running(Objective(tpot_s=0.04, deadline_s=deadline_s), out=out, pace_s=pace_s)
    lengths = DRAWS[out < DRAWS]

    def kept(more_s: float) -> float:
        decode_s = attempt.last_at_s - 0.5 + more_s + (lengths - out) * pace_s
        in_time = 0.5 + decode_s <= (deadline_s or math.inf)
        return float((in_time & (decode_s <= 0.04 * (lengths - 1.0))).mean())

    assert lost(attempt, held_up_s=held_up_s) == pytest.approx(kept(0.0) - kept(held_up_s), abs=0.04)


def test_before_its_first_token_its_own_prompt_is_still_to_come() -> None:
    attempt = running(Objective(deadline_s=1.5))
    fits = (1.5 - 0.5) / PACE_S
    drawn = math.exp(-(fits - 0.4 / PACE_S) / MEAN) - math.exp(-fits / MEAN)
    assert lost(attempt, held_up_s=0.4, now_s=0.0) == pytest.approx(drawn, abs=0.03)


def test_nothing_is_at_stake_without_a_promise_or_where_it_is_lost_or_safe() -> None:
    unasked, lost_long_ago = running(Objective(ttft_s=1.0), out=10), running(Objective(deadline_s=0.6), out=40)
    safe = running(Objective(deadline_s=900.0), out=10)
    unknown = running(Objective(deadline_s=2.0), out=10)
    unknown.length = None
    for attempt in (unasked, lost_long_ago, safe, unknown):
        assert lost(attempt, held_up_s=1.0) == pytest.approx(0.0, abs=1e-6)
    assert AtStake([], 0.0).lost(1.0, 0) == 0.0


def test_quality_and_priority_weigh() -> None:
    asked: dict[str, Any] = {"deadline_s": 3.0}
    one = lost(running(Objective(**asked), out=20), held_up_s=0.5)
    assert one > 0.05
    assert lost(running(Objective(**asked), out=20, quality=0.75), held_up_s=0.5) == pytest.approx(0.75 * one)
    above = running(Objective(**asked, priority=2), out=20)
    assert lost(above, held_up_s=0.5) == pytest.approx(4.0 * one)
    assert lost(above, held_up_s=0.5, priority=3) == pytest.approx(0.5 * one)
    late = running(Objective(**asked, late_s=2.0), out=20)
    assert lost(late, held_up_s=0.5) == pytest.approx(lost(running(Objective(deadline_s=4.0), out=20), held_up_s=0.5))


@pytest.mark.parametrize("count", [3, 4, 5, 64])
def test_of_many_a_few_stand_for_all(count: int) -> None:
    attempts = [running(Objective(deadline_s=3.0), out=20) for _ in range(count)]
    assert lost(*attempts, held_up_s=0.5) == pytest.approx(count * lost(attempts[0], held_up_s=0.5))
