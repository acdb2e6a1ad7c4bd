"""The peer that judges by the whole distribution: where it goes, who goes first, and what starting a rung costs."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from benchmarks.late_binding.expected_value import POLICY, starting_rungs
from router.signals.latency import LatencyModel
from router.values.choice import Choice, Hopeless
from router.values.length import LengthCurve
from router.values.prediction import Demand, SiblingLoad
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import Objective
from router.values.settings import RouterSettings
from router.values.situation import Candidate, Situation
from tests.support.router_fakes import info

PRIOR = SpeedPrior(prefill_tokens_per_s=1000.0, decode_tokens_per_s=50.0, decode_batch_slope=0.15)
LARGE = info("fp32", prior=PRIOR, device="")
SMALL = info("pruned-fp32", prior=dataclasses.replace(PRIOR, decode_tokens_per_s=125.0), device="")
SLOTS = 4


def device(large: int, small: int, prompt_tokens: int = 100) -> tuple[Candidate, Candidate]:
    """Both rungs of a device as the model of latencies predicts them, with so many sequences on each."""
    model, running = LatencyModel(), {LARGE.replica_id: large, SMALL.replica_id: small}

    def one(own: ReplicaInfo, other: ReplicaInfo) -> Candidate:
        here, there = running[own.replica_id], running[other.replica_id]
        snapshot = ReplicaSnapshot(own, available=True, slots=SLOTS, running=here, pending_decode_tokens=50 * here)
        beside = [SiblingLoad(other, occupied=there, slots=SLOTS, left_tokens=[50] * there)] if there else []
        prediction = model.predict(snapshot, None, Demand(prompt_tokens, 50), siblings=beside)
        return Candidate(own, prediction, idle=not running[LARGE.replica_id] + running[SMALL.replica_id], slots=SLOTS)

    return one(LARGE, SMALL), one(SMALL, LARGE)


def decide(candidates: tuple[Candidate, ...], objective: Objective, tokens: int = 50) -> Choice | Hopeless:
    return POLICY.decide(
        Situation(
            objective=objective,
            ttft_promised=objective.ttft_s is not None,
            waited_s=0.0,
            wait_left_s=30.0,
            candidates=candidates,
            best_quality=1.0,
            answer_tokens=tokens,
            open_ended=True,
            emitted_tokens=0,
            answer_cap=None,
            overloaded=False,
            pinned=False,
            only_remote_fits=False,
            remote_served=False,
            local_down=False,
            remote_down=False,
            settings=RouterSettings(),
            length=LengthCurve.exactly(tokens),
            now_s=1000.0,
        )
    )


def chosen(found: Choice | Hopeless) -> Choice:
    assert isinstance(found, Choice)
    return found


@pytest.mark.parametrize(
    ("large", "small", "starting"),
    [(0, 0, set()), (0, 1, {LARGE}), (0, 3, {LARGE}), (1, 0, {SMALL}), (3, 0, {SMALL}), (1, 1, set()), (1, 2, set())],
)
def test_an_empty_rung_beside_one_that_runs_is_known_by_its_pace(
    large: int, small: int, starting: set[ReplicaInfo]
) -> None:
    assert starting_rungs(device(large, small)) == {rung.replica_id for rung in starting}
    assert not starting_rungs(device(large, small)[:1]), "which is alone on its device, as far as anybody knows"


def test_it_takes_the_better_rung_until_its_promise_is_too_unlikely() -> None:
    idle = device(0, 0)
    assert chosen(decide(idle, Objective(deadline_s=5.0))).candidate.info is LARGE
    assert chosen(decide(idle, Objective(deadline_s=0.8))).candidate.info is SMALL
    assert chosen(decide(idle, Objective(tpot_s=0.015))).candidate.info is SMALL
    assert chosen(decide(idle, Objective())).candidate.info is LARGE


def test_who_starts_a_rung_beside_another_goes_after_those_who_do_not() -> None:
    beside, starts = device(1, 1), device(0, 2)
    joins, begins = (chosen(decide(of, Objective())) for of in (beside, starts))
    assert joins.candidate.info is begins.candidate.info is LARGE
    assert begins.rank == pytest.approx(joins.rank / 2)


def test_of_two_who_wait_the_shorter_goes_first_and_each_waits_for_one_rung_of_the_device() -> None:
    full = device(SLOTS, 0)
    short, long = (chosen(decide(full, Objective(deadline_s=60.0), tokens)) for tokens in (20, 400))
    assert not short.starts
    assert list(short.waits_for) == [LARGE.replica_id]
    assert short.rank > long.rank


def test_what_only_a_prompt_before_it_delays_waits_for_that_and_what_is_lost_is_refused() -> None:
    large, small = device(1, 0)
    behind_s = large.prediction.ttft_s + 10.0
    behind = tuple(replace(c, prediction=replace(c.prediction, ttft_s=behind_s)) for c in (large, small))
    waits = chosen(decide(behind, Objective(ttft_s=1.0)))
    assert waits.not_now
    assert not waits.starts
    lost = decide((large, small), Objective(deadline_s=0.05))
    assert isinstance(lost, Hopeless)
    assert lost.deadline_lost
