"""What a pairing is worth: the probabilities against Monte Carlo over the same distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from router.policy.slo_utility import POLICY
from router.policy.worth import (
    _UNASKED_LATE,
    FLOOR,
    Worth,
    deadline_chance,
    expected_pace_s,
    latest_starts_s,
    offers_of,
    whole_chance,
    worth_of,
    worths_of,
)
from router.values.length import EDGES, LengthCurve
from router.values.prediction import Prediction
from router.values.request import Objective
from router.values.settings import RouterSettings
from router.values.situation import Candidate, Situation
from tests.support.router_fakes import info

DRAWS = 200_000
MEDIAN, SPREAD = 150.0, 0.7
CURVE = LengthCurve.of([0.5 * math.erfc(math.log(edge / MEDIAN) / SPREAD / math.sqrt(2.0)) for edge in EDGES])


def candidate(pace_s: float = 0.02, prefill_s: float = 0.3, sigma: float = 0.3, **changes: Any) -> Candidate:
    prediction = Prediction(
        wait_s=0.0,
        ttft_s=prefill_s + 0.05,
        ttft_high_s=prefill_s * 1.5,
        tpot_s=pace_s,
        tpot_high_s=pace_s * 1.4,
        finish_s=5.0,
        finish_high_s=8.0,
        free=True,
        prefill_s=prefill_s,
        network_s=0.05,
        token_device_s=pace_s / 4,
        ttft_log_sigma=sigma,
        pace_log_sigma=sigma,
    )
    return msgspec.structs.replace(Candidate(info("int8"), prediction, slots=4), **changes)


def pace_s(one: Candidate) -> float:
    return expected_pace_s(one.prediction.tpot_s, one.prediction.token_device_s * one.slots)


def figures(judged: Sequence[Worth]) -> list[tuple[float, ...]]:
    return [(w.kept, w.kept_in_all, w.value, w.cost_s, w.lost, w.net, w.rank) for w in judged]


def situation(one: Candidate, length: LengthCurve = CURVE, **changes: Any) -> Situation:
    fields: dict[str, Any] = {
        "objective": Objective(),
        "ttft_promised": False,
        "waited_s": 0.0,
        "wait_left_s": 30.0,
        "candidates": (one,),
        "best_quality": one.info.quality,
        "answer_tokens": 50,
        "open_ended": True,
        "emitted_tokens": 0,
        "answer_cap": None,
        "overloaded": False,
        "pinned": False,
        "only_remote_fits": False,
        "remote_served": False,
        "local_down": False,
        "remote_down": False,
        "settings": RouterSettings(),
        "length": length,
        "now_s": 1000.0,
    }
    return Situation(**{**fields, **changes})


def drawn(one: Candidate, pace_s: float, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """First tokens and finishes of as many answers, from the beginning of their prefill."""
    rng, prediction = np.random.default_rng(seed), one.prediction
    lengths = np.maximum(rng.lognormal(math.log(MEDIAN), SPREAD, DRAWS), 1.0)
    slower = rng.lognormal(0.0, prediction.pace_log_sigma, DRAWS)
    return slower * prediction.prefill_s, slower * (prediction.prefill_s + (lengths - 1.0) * pace_s)


@pytest.mark.parametrize("deadline_s", [0.5, 1.5, 3.0, 6.0, 15.0])
@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5])
def test_a_deadline_is_kept_as_often_as_in_a_simulation(deadline_s: float, sigma: float) -> None:
    one = candidate(sigma=sigma)
    case = situation(one, objective=Objective(deadline_s=deadline_s), waited_s=0.2)
    _, finishes = drawn(one, pace_s(one))
    simulated = (finishes + 0.2 + 0.05 <= deadline_s).mean()
    assert worth_of(one, case).kept == pytest.approx(simulated, abs=0.03)


@pytest.mark.parametrize("late_s", [0.5, 4.0, 20.0])
def test_a_late_value_is_its_expectation(late_s: float) -> None:
    one = candidate()
    case = situation(one, objective=Objective(deadline_s=3.0, late_s=late_s))
    _, finishes = drawn(one, 0.02)
    value = np.clip(1.0 - (finishes + 0.05 - 3.0) / late_s, 0.0, 1.0).mean()
    assert deadline_chance(one.prediction, case, 0.05, 0.02) == pytest.approx(value, abs=0.04)


@pytest.mark.parametrize("ttft_s", [0.2, 0.35, 0.5, 1.0])
def test_a_ttft_is_kept_as_often_as_in_a_simulation(ttft_s: float) -> None:
    one = candidate()
    case = situation(one, objective=Objective(ttft_s=ttft_s), ttft_promised=True)
    firsts, _ = drawn(one, 0.02)
    assert worth_of(one, case).kept == pytest.approx((firsts + 0.05 <= ttft_s).mean(), abs=0.01)


def test_a_ttft_asks_nothing_of_the_length() -> None:
    one = candidate()
    asked = {"objective": Objective(ttft_s=0.5), "ttft_promised": True}
    short, long = (situation(one, LengthCurve.exactly(tokens), **asked) for tokens in (10, 3000))
    assert worth_of(one, short).kept == worth_of(one, long).kept
    of_short, of_long = latest_starts_s([one], short, 10.0, 3000.0)
    assert of_short == of_long > 0.0, "of a TTFT only prefill is work"


@pytest.mark.parametrize("tpot_s", [0.015, 0.02, 0.03])
def test_a_tpot_is_kept_as_often_as_in_a_simulation(tpot_s: float) -> None:
    one = candidate()
    paces = np.random.default_rng(1).lognormal(math.log(pace_s(one)), 0.3, DRAWS)
    case = situation(one, objective=Objective(tpot_s=tpot_s))
    assert worth_of(one, case).kept == pytest.approx((paces <= tpot_s).mean(), abs=0.01)


def test_who_nobody_promised_anything_is_worth_its_quality() -> None:
    one = candidate()
    assert worth_of(one, situation(one)).value == pytest.approx(one.info.quality)
    late = worth_of(one, situation(one, objective=Objective(ttft_s=3.0), waited_s=60.0))
    assert late.kept == pytest.approx(_UNASKED_LATE), "after the tier's default TTFT it is still worth something"
    asked = worth_of(one, situation(one, objective=Objective(ttft_s=3.0), waited_s=60.0, ttft_promised=True))
    assert asked.kept == 0.0


def test_the_cost_is_of_the_tokens_that_will_be_computed() -> None:
    """Also of an answer that its deadline ends."""
    one, known = candidate(), LengthCurve.exactly(1000)
    whole = worth_of(one, situation(one, known)).cost_s
    assert whole == pytest.approx(0.3 + 1000 * 0.005)
    ended = worth_of(one, situation(one, known, objective=Objective(deadline_s=2.35))).cost_s
    assert ended == pytest.approx(0.3 + 101 * 0.005)
    beside = candidate(favoured=False)
    mixed, mixing_cost = worth_of(beside, situation(beside, known)), RouterSettings().mixing_cost
    assert mixed.cost_s == pytest.approx(whole * mixing_cost)
    assert mixed.net == pytest.approx(mixed.value / mixing_cost)
    alone = candidate(favoured=False, idle=True)
    calm = worth_of(alone, situation(alone, known))
    assert (calm.cost_s, calm.net) == (pytest.approx(whole), calm.value), "nobody is there to be slowed"


def test_a_price_is_taken_from_the_value() -> None:
    one = candidate(price=0.3)
    judged = worth_of(one, situation(one))
    assert judged.value == pytest.approx(one.info.quality - 0.3)
    assert judged.net == judged.value
    assert judged.rank == pytest.approx(judged.value / judged.cost_s)


@pytest.mark.parametrize("objective", [Objective(deadline_s=4.0), Objective(deadline_s=4.0, late_s=3.0)])
def test_after_its_latest_start_a_promise_is_lost_and_before_it_is_not(objective: Objective) -> None:
    one = candidate(sigma=0.05, pace_s=0.02)
    one = msgspec.structs.replace(one, slots=1, prediction=msgspec.structs.replace(one.prediction, token_device_s=0.02))
    case = situation(one, objective=objective)
    latest_s, of_long_s = latest_starts_s([one], case, CURVE.quantile(FLOOR), CURVE.quantile(0.8))
    assert of_long_s < latest_s, "a longer answer has to begin sooner"
    hard = situation(one, objective=Objective(deadline_s=4.0 + (objective.late_s or 0.0)))
    assert worth_of(one, hard, wait_s=latest_s - 0.3).kept > FLOOR
    assert worth_of(one, hard, wait_s=latest_s + 0.3).kept < FLOOR


def test_the_pace_counts_those_who_will_join() -> None:
    alone = candidate()
    assert pace_s(alone) == pytest.approx(0.02)
    joined = msgspec.structs.replace(alone, slots=12)
    assert pace_s(joined) == pytest.approx(0.5 * 0.02 + 0.5 * 0.06)


@pytest.mark.parametrize("objective", [Objective(), Objective(deadline_s=30.0), Objective(tpot_s=9.0)])
@pytest.mark.parametrize("room", [1, 40, 150, 600])
def test_a_window_keeps_what_it_holds_whole_where_another_holds_more(objective: Objective, room: int) -> None:
    narrow, wide = candidate(longest_answer=room), candidate(longest_answer=12_000)
    case = situation(narrow, objective=objective, candidates=(narrow, wide), longest_answer=12_000)
    lengths = np.random.default_rng(5).lognormal(math.log(MEDIAN), SPREAD, DRAWS)
    assert worth_of(narrow, case).kept == pytest.approx((lengths <= room).mean(), abs=0.02)
    assert worth_of(wide, case).kept > 0.98
    assert worth_of(narrow, case).cost_s < worth_of(wide, case).cost_s, "an answer that is cut takes no more than that"


def test_what_every_window_cuts_is_no_reason_against_any() -> None:
    narrow = candidate(longest_answer=6)
    assert worth_of(narrow, situation(narrow, longest_answer=6)).kept == 1.0


def test_of_an_answer_that_goes_on_the_rest_has_to_fit() -> None:
    narrow = candidate(longest_answer=300)
    case = situation(narrow, longest_answer=9_000)
    begun = situation(narrow, longest_answer=9_000, emitted_tokens=250)
    rest = CURVE.left_within(250, 50)
    assert whole_chance(narrow, begun) == rest < whole_chance(narrow, case) == CURVE.within(300)


def test_what_others_lose_is_taken_off_where_it_would_begin_now_and_less_the_longer_it_waited() -> None:
    one, asked = candidate(at_stake=0.4), Objective(deadline_s=60.0)
    alone = worth_of(candidate(), situation(one, objective=asked))
    come = worth_of(one, situation(one, objective=asked))
    assert (come.kept, come.value, come.cost_s) == (alone.kept, alone.value, alone.cost_s)
    assert (come.lost, come.net) == (0.4, pytest.approx(alone.value - 0.4))
    assert come.rank * come.cost_s == pytest.approx(alone.value - 0.4)
    (later,) = worths_of([one], situation(one, objective=asked), wait_s=None)
    assert later.net == later.value, "who will run there then is not known"
    assert worth_of(one, situation(one, objective=asked, waited_s=15.0)).lost == pytest.approx(0.2), "of 30 s at most"
    assert worth_of(one, situation(one, objective=asked, waited_s=40.0)).lost == 0.0
    assert worth_of(one, situation(one, waited_s=1.5)).lost == pytest.approx(0.2), "of 3 s, the tier's default TTFT"
    assert worth_of(one, situation(one, waited_s=3.0)).lost == 0.0
    ruins = worth_of(candidate(at_stake=5.0), situation(one))
    assert 0.0 < ruins.rank < 1e-5
    assert ruins.kept_in_all < 0.0


def test_what_candidates_share_is_looked_up_once_and_changes_no_figure() -> None:
    several = [
        candidate(pace_s, prefill_s, sigma) for pace_s, prefill_s, sigma in ((0.02, 0.3, 0.3), (0.05, 0.1, 0.01))
    ]
    several = [
        msgspec.structs.replace(one, prediction=msgspec.structs.replace(one.prediction, wait_s=0.4)) for one in several
    ]
    asked = Objective(ttft_s=1.0, tpot_s=0.06, deadline_s=6.0, late_s=2.0)
    case = situation(several[0], objective=asked, ttft_promised=True, candidates=tuple(several))
    now, later = figures(worths_of(several, case)), figures(worths_of(several, case, wait_s=None))
    assert now == figures([worth_of(one, case) for one in several])
    assert later == figures([worth_of(one, case, wait_s=0.4) for one in several])
    assert later != now


def test_an_offer_is_of_an_idle_device_that_runs_this_rung_alone() -> None:
    one = candidate(slots=4)
    queued = msgspec.structs.replace(
        one, favoured=False, prediction=msgspec.structs.replace(one.prediction, wait_s=9.0, ttft_s=9.35, free=False)
    )
    case = situation(one, objective=Objective(deadline_s=4.0))
    assert offers_of([queued], case)[0] == offers_of([one], case)[0]
    assert offers_of([one], case)[0].device == one.info.device_key
    lost = situation(one, LengthCurve.exactly(5000), objective=Objective(deadline_s=1.0))
    assert offers_of([one], lost)[0].kept == 0.0
    assert offers_of([one], lost)[0].latest_s < 0.0


def test_an_idle_device_serves_its_best_rung_unless_others_are_to_come_while_that_answers() -> None:
    """The large rung's answer, alone for a moment, would slow all small ones that come after it, and they it."""
    large, small = (
        candidate(pace_s, info=info(name, device="shared"), idle=True, favoured=name == "pruned-fp32")
        for name, pace_s in (("fp32", 0.02), ("pruned-fp32", 0.008))
    )
    lone = situation(large, candidates=(large, small), arrivals_per_s=0.1)
    crowd = situation(large, candidates=(large, small), arrivals_per_s=2.0)
    assert (lone.calm, crowd.calm) == (True, False)
    chosen = [POLICY.decide(case) for case in (lone, crowd)]
    assert [choice.candidate.info.variant for choice in chosen] == [large.info.variant, small.info.variant]


def test_newcomers_of_many_devices_meet_an_answer_on_one_of_them_less_often() -> None:
    here, there = (candidate(info=info("fp32", device=name), idle=True) for name in ("here", "there"))
    alone = situation(here, arrivals_per_s=0.6)
    assert not alone.calm
    assert msgspec.structs.replace(alone, candidates=(here, there)).calm
