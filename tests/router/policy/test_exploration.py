"""What is believed slow is tried now and then, by requests that have nothing to lose there."""

from __future__ import annotations

from typing import Any

import pytest

from router.policy.slo_utility import POLICY
from router.values.choice import Choice
from router.values.length import LengthCurve
from router.values.prediction import Prediction
from router.values.request import Objective
from router.values.settings import RouterSettings
from router.values.situation import Candidate, Situation
from tests.support.router_fakes import info


def predicted(pace_s: float, *, explore: bool = False, free: bool = True) -> Prediction:
    return Prediction(
        wait_s=0.0,
        ttft_s=0.2,
        ttft_high_s=0.3,
        tpot_s=pace_s,
        tpot_high_s=pace_s * 1.5,
        finish_s=0.2 + 99 * pace_s,
        finish_high_s=0.3 + 150 * pace_s,
        free=free,
        prefill_s=0.2,
        token_device_s=pace_s,
        explore=explore,
    )


def situation(objective: Objective, cloud: Prediction, **changes: Any) -> Situation:
    here, there = Candidate(info(), predicted(0.02)), Candidate(info("fp32", remote=True), cloud)
    fields: dict[str, Any] = {
        "objective": objective,
        "ttft_promised": False,
        "waited_s": 0.0,
        "wait_left_s": 30.0,
        "now_s": 1000.0,
        "waiting": 0,
        "candidates": (here, there),
        "best_quality": 1.0,
        "answer_tokens": 100,
        "open_ended": True,
        "emitted_tokens": 0,
        "answer_cap": None,
        "overloaded": False,
        "pinned": False,
        "only_remote_fits": False,
        "remote_served": True,
        "local_down": False,
        "remote_down": False,
        "settings": RouterSettings(),
        "length": LengthCurve.exactly(100),
    }
    return Situation(**{**fields, **changes})


def chosen(objective: Objective, cloud: Prediction, **changes: Any) -> tuple[bool, str]:
    choice = POLICY.decide(situation(objective, cloud, **changes))
    assert isinstance(choice, Choice)
    return choice.candidate.info.remote, choice.reason


def test_a_request_without_a_promise_tries_what_is_to_be_explored():
    assert chosen(Objective(ttft_s=3.0), predicted(0.2, explore=True)) == (True, "explore")
    assert not chosen(Objective(ttft_s=3.0), predicted(0.2))[0]


@pytest.mark.parametrize("objective", [Objective(deadline_s=60.0), Objective(tpot_s=0.05)])
def test_a_promise_that_might_be_lost_there_is_not_risked(objective):
    assert not chosen(objective, predicted(0.2, explore=True))[0]


def test_nobody_waits_to_explore():
    assert not chosen(Objective(ttft_s=3.0), predicted(0.2, explore=True, free=False))[0]
