"""The simple rules that every claim is compared with: each does what its name says, and no more."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import pytest

from router.policy.registry import load_policy
from router.values.choice import Choice
from router.values.request import Objective
from router.values.situation import Candidate, Situation
from tests.router.policy.test_policies import candidate, situation

FIRST_COME = ["random", "least-load", "peak-ewma", "lowest-latency", "min-completion", "threshold"]


def decide(policy: str, *candidates: Candidate, **changes: Any) -> Choice:
    choice = load_policy(policy).decide(situation(*candidates, **changes))
    assert isinstance(choice, Choice)
    return choice


def edge(load: float = 0.0, peak_latency_s: float = 0.0, **times: Any) -> Candidate:
    one = candidate("int8", **times)
    return msgspec.structs.replace(one, load=load, slots=4, peak_latency_s=peak_latency_s)


def cloud(load: float = 0.0, peak_latency_s: float = 0.0, **times: Any) -> Candidate:
    one = candidate("fp32", remote=True, **times)
    return msgspec.structs.replace(one, load=load, slots=8, peak_latency_s=peak_latency_s)


def small(**times: Any) -> Candidate:
    return candidate("pruned-fp32", remote=True, **times)


def test_least_load_counts_those_that_wait_for_each_slot() -> None:
    here, there = edge(load=0.75), cloud(load=0.5)
    assert decide("least-load", here, there).candidate is there
    assert decide("least-load", edge(), cloud()).candidate.info.remote is False


def test_peak_ewma_weighs_latency_by_what_is_outstanding() -> None:
    slow, quick = edge(load=0.0, peak_latency_s=4.0), cloud(load=0.25, peak_latency_s=1.0)
    assert decide("peak-ewma", slow, quick).candidate is quick, "4 · 1 is more than 1 · 3"
    busier = cloud(load=0.5, peak_latency_s=1.0)
    assert decide("peak-ewma", slow, busier).candidate is slow
    unknown = cloud(load=3.0, peak_latency_s=0.0)
    assert decide("peak-ewma", slow, unknown).candidate is unknown, "who never answered is tried"


def test_lowest_latency_is_the_soonest_first_token_and_min_completion_the_last() -> None:
    begins, ends = edge(ttft_s=0.1, tpot_s=0.1), cloud(ttft_s=0.5, tpot_s=0.01)
    assert decide("lowest-latency", begins, ends).candidate is begins
    assert decide("min-completion", begins, ends).candidate is ends
    queued = edge(ttft_s=0.1, wait_s=1.0)
    assert decide("lowest-latency", queued, ends).candidate is ends, "its queue is part of it"


def test_threshold_overflows_when_the_device_is_full() -> None:
    assert decide("threshold", edge(load=0.75), cloud()).candidate.info.remote is False
    full = edge(load=1.0, wait_s=0.2)
    overflow = decide("threshold", full, cloud(load=0.5))
    assert (overflow.candidate.info.remote, overflow.reason) == (True, "overflow")
    both = decide("threshold", edge(load=1.5, wait_s=0.2), cloud(load=1.2, wait_s=0.2))
    assert not both.candidate.info.remote


def test_random_spreads_evenly_and_is_the_same_for_the_same_request_time() -> None:
    here, there = edge(), cloud()
    picked = [decide("random", here, there, now_s=1000.0 + index * 0.37).candidate for index in range(400)]
    assert 150 < Counter(c.info.replica_id for c in picked)[here.info.replica_id] < 250
    again = [decide("random", here, there, now_s=1000.0 + index * 0.37).candidate for index in range(400)]
    assert all(a is b for a, b in zip(picked, again, strict=True))
    later = decide("random", here, there, now_s=1003.0, waited_s=3.0).candidate
    assert later is picked[0], "a request that waits does not draw again"


def test_the_earliest_deadline_goes_first() -> None:
    near, far = Objective(deadline_s=5.0), Objective(deadline_s=9.0)
    here = edge(wait_s=1.0)
    assert (
        decide("earliest-deadline", here, objective=near).rank > decide("earliest-deadline", here, objective=far).rank
    )
    waited = decide("earliest-deadline", here, objective=far, waited_s=6.0)
    assert waited.rank > decide("earliest-deadline", here, objective=near).rank, "due in 3 s"
    by_ttft = decide("earliest-deadline", here, objective=Objective(ttft_s=2.0))
    assert by_ttft.rank > waited.rank


def test_the_earliest_deadline_takes_whichever_slot_is_free_first() -> None:
    here, there = edge(wait_s=1.0), cloud(wait_s=1.0)
    choice = decide("earliest-deadline", here, there)
    assert set(choice.waits_for) == {here.info.replica_id, there.info.replica_id}
    assert decide("earliest-deadline", here, cloud()).candidate.info.remote


@pytest.mark.parametrize("policy", FIRST_COME)
def test_they_wait_in_order_of_arrival_for_what_they_picked(policy: str) -> None:
    busy = edge(load=2.0, wait_s=3.0)
    first = decide(policy, busy, now_s=1010.0, waited_s=10.0)
    second = decide(policy, busy, now_s=1010.0, waited_s=1.0)
    assert first.rank > second.rank
    assert set(first.waits_for) == {busy.info.replica_id}
    assert math.isinf(first.good_for_s)


@pytest.mark.parametrize("policy", [*FIRST_COME, "earliest-deadline"])
def test_they_neither_step_down_nor_give_up_nor_cap(policy: str) -> None:
    swamped, lesser = edge(load=9.0, wait_s=500.0, peak_latency_s=60.0), small()
    for objective in (Objective(ttft_s=0.1), Objective(deadline_s=0.5), Objective(ttft_s=3.0, tpot_s=0.001)):
        choice = decide(policy, swamped, lesser, objective=objective, ttft_promised=True, waited_s=20.0)
        assert choice.candidate is swamped, "the best rung, however busy"
        assert (choice.degraded, choice.max_tokens) == (False, None)


@pytest.mark.parametrize("policy", [*FIRST_COME, "earliest-deadline"])
def test_where_only_a_smaller_rung_is_left_it_is_told(policy: str) -> None:
    choice = decide(policy, small(), best_quality=1.0)
    assert (choice.degraded, choice.reason) == (True, "step-down")


@pytest.mark.parametrize("policy", [*FIRST_COME, "earliest-deadline"])
def test_they_favour_no_rung(policy: str) -> None:
    case: Situation = situation(edge(), cloud())
    assert load_policy(policy).ask(case) is None
