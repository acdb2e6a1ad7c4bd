"""`slo-utility` never takes a candidate that another one beats in every way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy.registry import load_policy
from router.policy.slo_utility import fair_rank
from router.policy.worth import worth_of
from router.values.choice import Choice
from router.values.request import Objective
from router.values.settings import Fairness, RouterSettings
from router.values.situation import Candidate, Situation
from tests.router.policy.test_policies import candidate, situation
from tests.router.policy.test_worth import CURVE

MORE = st.sampled_from([1.0, 1.01, 1.2, 3.0])
OBJECTIVES = st.builds(
    Objective,
    ttft_s=st.sampled_from([None, 0.3, 3.0]),
    tpot_s=st.sampled_from([None, 0.03]),
    deadline_s=st.sampled_from([None, 1.0, 4.0, 30.0]),
    late_s=st.sampled_from([None, 5.0]),
)


def timed(one: Candidate, prefill_s: float, pace_s: float, wait_s: float, **changes: Any) -> Candidate:
    prediction = msgspec.structs.replace(
        one.prediction,
        wait_s=wait_s,
        free=wait_s == 0.0,
        prefill_s=prefill_s,
        ttft_s=wait_s + prefill_s,
        ttft_high_s=1.5 * (wait_s + prefill_s),
        tpot_s=pace_s,
        tpot_high_s=1.4 * pace_s,
        token_device_s=pace_s / 4,
    )
    return msgspec.structs.replace(one, prediction=prediction, slots=4, **changes)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Candidate, Candidate]:
    """A candidate, and one of the same side that is smaller, slower and dearer."""
    remote = draw(st.booleans())
    prefill_s, pace_s = draw(st.sampled_from([0.02, 0.3])), draw(st.sampled_from([0.005, 0.02, 0.1]))
    wait_s, price = draw(st.sampled_from([0.0, 0.0, 0.5])), draw(st.sampled_from([0.0, 0.2]))
    better = timed(candidate("fp32", remote=remote), prefill_s, pace_s, wait_s, price=price)
    name = draw(st.sampled_from(["int8", "pruned-fp32"]))
    slower = prefill_s * draw(MORE), pace_s * draw(MORE), wait_s + draw(st.sampled_from([0.0, 0.7]))
    return better, timed(candidate(name, remote=remote), *slower, price=price + draw(st.sampled_from([0.0, 0.1])))


@settings(max_examples=300, deadline=None)
@given(
    pair=pairs(),
    other=st.sampled_from([None, 0.0, 2.0]),
    objective=OBJECTIVES,
    promised=st.booleans(),
    waited_s=st.sampled_from([0.0, 0.5, 5.0]),
    overloaded=st.booleans(),
    waiting=st.sampled_from([0, 40]),
    swapped=st.booleans(),
)
def test_a_dominated_candidate_is_never_taken(
    pair: tuple[Candidate, Candidate], other: float | None, swapped: bool, promised: bool, **changes: Any
) -> None:
    better, worse = pair
    candidates = [worse, better] if swapped else [better, worse]
    if other is not None:
        candidates.insert(1, timed(candidate("int8", remote=not better.info.remote), 0.1, 0.02, other))
    promised = promised and changes["objective"].ttft_s is not None
    case = situation(*candidates, ttft_promised=promised, length=CURVE, **changes)
    choice = load_policy("slo-utility").decide(case)
    assert not isinstance(choice, Choice) or choice.candidate is not worse


def test_of_candidates_that_wait_alike_and_cost_more_than_they_are_worth_the_better_one_is_told() -> None:
    asked = Objective(deadline_s=4.0, late_s=5.0)
    better, worse = (timed(candidate(name), 0.02, 0.1, 0.0, price=0.95) for name in ("fp32", "int8"))
    choice = load_policy("slo-utility").decide(situation(worse, better, objective=asked, length=CURVE))
    assert isinstance(choice, Choice)
    assert choice.candidate is better


def case_of(one: Candidate, fairness: Fairness, **changes: Any) -> Situation:
    return situation(one, settings=RouterSettings(fairness=fairness), length=CURVE, **changes)


@pytest.mark.parametrize("pace_s", [0.002, 0.02, 0.2])
@pytest.mark.parametrize("callers", [0.0, 1.5, 4.0])
@pytest.mark.parametrize("excess", [1.0, 2.0, 50.0])
def test_fairness_bounds_the_factor_by_which_a_caller_is_put_back(pace_s: float, callers: float, excess: float) -> None:
    one = timed(candidate("int8"), 0.1, pace_s, 0.0)
    asked = {"caller_excess": excess, "objective": Objective(deadline_s=60.0)}
    free, fair = case_of(one, Fairness(callers=0.0), **asked), case_of(one, Fairness(callers=callers), **asked)
    worth = worth_of(one, free)
    factor = min(excess**32, callers) if callers else 1.0
    assert fair_rank(worth, fair) == pytest.approx(worth.rank / factor)
    assert fair_rank(worth, free) == worth.rank, "without a setting nobody is put back"
