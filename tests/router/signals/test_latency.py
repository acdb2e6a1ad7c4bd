"""Predictions: the formula by hand, and that they come true on replicas the prior knows nothing about."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router.signals.latency import LatencyModel
from router.signals.link import Link, LinkPrior
from router.signals.prefill import PrefillLine
from router.values.prediction import Awaited, Demand, InFlightLoad, SiblingLoad
from router.values.replica import ReplicaSnapshot, SpeedPrior
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import info
from tests.support.served import Bench

PRIOR = SpeedPrior(prefill_tokens_per_s=1000.0, decode_tokens_per_s=50.0, decode_batch_slope=0.1)
INFO = info("int8", prior=PRIOR, device="")
IDLE = ReplicaSnapshot(INFO, available=True, slots=4)


def test_an_idle_replica_is_prefill_and_decode():
    found = LatencyModel().predict(IDLE, None, Demand(500, 11))
    assert found.free
    assert found.wait_s == 0
    assert found.ttft_s == pytest.approx(0.505)
    assert found.tpot_s == pytest.approx(0.02)
    assert found.finish_s == pytest.approx(0.705)
    assert found.ttft_s < found.ttft_high_s < found.finish_high_s
    assert found.finish_with(1) == found.ttft_s
    assert found.finish_with(11) == pytest.approx(found.finish_s)
    assert found.finish_high_with(11) == pytest.approx(found.ttft_high_s + 10 * found.tpot_high_s)


def test_a_link_adds_its_round_trip_and_the_upload():
    link = Link("x", LinkPrior(rtt_s=0.1, uplink_bytes_per_s=1000.0)).snapshot()
    near = LatencyModel().predict(IDLE, None, Demand(500, 11, 2000))
    far = LatencyModel().predict(IDLE, link, Demand(500, 11, 2000))
    assert far.ttft_s - near.ttft_s == pytest.approx(2.1)
    assert far.ttft_high_s - near.ttft_high_s > 2.1


def test_a_batch_slows_every_step():
    busy = replace(IDLE, running=3, pending_decode_tokens=30)
    assert LatencyModel().predict(busy, None, Demand(10, 11)).tpot_s == pytest.approx(0.02 * 1.3)


def test_a_full_replica_waits_for_the_answer_with_the_least_left():
    model = LatencyModel()
    full = replace(IDLE, running=4, pending_decode_tokens=400)
    mine = InFlightLoad(requests=4, left_tokens=(10, 50, 100, 240))
    step_s = 0.02 * 1.3
    first, second = (model.predict(full, None, Demand(10, 20), mine, ahead) for ahead in (0, 1))
    assert not first.free
    assert first.wait_s == pytest.approx(10 * step_s)
    assert second.wait_s == pytest.approx(50 * step_s)
    assert model.predict(full, None, Demand(10, 20), mine, 4).wait_s == pytest.approx(240 * step_s + 20 * step_s / 4)


def test_without_own_figures_remainders_are_spread_evenly():
    full = replace(IDLE, running=4, pending_decode_tokens=400)
    found = LatencyModel().predict(full, None, Demand(10, 20))
    assert found.wait_s == pytest.approx(40 * 0.02 * 1.3)  # first of four uniform on [0, 200]: 200 / 5


def test_what_was_sent_counts_before_any_report_shows_it():
    model = LatencyModel()
    mine = InFlightLoad(requests=4, prefill_tokens=400, left_tokens=(20,) * 4, unopened=4, unopened_prefill_tokens=400)
    assert model.predict(replace(IDLE, slots=5), None, Demand(10, 20), mine).free
    assert not model.predict(replace(IDLE, running=1, slots=5), None, Demand(10, 20), mine).free


def test_old_reports_lose_weight():
    model = LatencyModel()
    full = replace(IDLE, running=8, pending_decode_tokens=800)
    assert model.predict(replace(full, age_s=60.0), None, Demand(10, 20)).free
    assert not model.predict(full, None, Demand(10, 20)).free


def test_a_line_finds_overhead_and_slope_that_the_prior_had_wrong():
    line = PrefillLine(PRIOR)
    for tokens in [20, 900, 40, 1500, 60, 300, 30, 1000] * 6:
        line.observe(tokens, 0.06 + tokens * 0.004)
    assert line.predict(30) == pytest.approx(0.06 + 0.12, rel=0.15)
    assert line.predict(1800) == pytest.approx(0.06 + 7.2, rel=0.1)


def test_a_line_is_not_moved_far_by_one_outlier():
    line = PrefillLine(PRIOR)
    for _ in range(10):
        line.observe(100, 0.105)
    before = line.predict(100)
    line.observe(100, 60.0)
    assert line.predict(100) < 2 * before
    for _ in range(10):
        line.observe(100, 0.105)
    assert line.predict(100) == pytest.approx(before, rel=0.25)


@settings(max_examples=200)
@given(
    points=st.lists(st.tuples(st.floats(0, 1e5), st.floats(1e-6, 1e4)), max_size=60),
    prefill=st.floats(0.1, 1e6),
)
def test_a_line_stays_a_prediction_whatever_is_observed(points, prefill):
    line = PrefillLine(SpeedPrior(prefill, 10.0))
    for tokens, seconds in points:
        line.observe(tokens, seconds)
        assert 0 < line.predict(1.0) < 1e9
        assert line.predict(1.0) <= line.predict(1000.0)


SMALL = info("pruned-int8", prior=dataclasses.replace(PRIOR, decode_tokens_per_s=100.0), device="")


def test_the_rungs_of_a_device_take_turns_and_their_steps_add_up():
    beside = SiblingLoad(SMALL, occupied=2, slots=4, left_tokens=[10, 20])
    found = LatencyModel().predict(IDLE, None, Demand(10, 11), siblings=[beside])
    assert found.tpot_s == pytest.approx(0.02 + 0.01 * 1.1)
    assert found.free


def test_the_rungs_of_a_device_divide_its_slots():
    beside = SiblingLoad(SMALL, occupied=4, slots=4, left_tokens=[10, 20, 30, 40])
    found = LatencyModel().predict(IDLE, None, Demand(10, 11), siblings=[beside])
    assert not found.free
    assert found.wait_s == pytest.approx(10 * (0.02 + 0.01 * 1.3))


def test_a_rungs_own_slots_may_be_fewer_than_its_devices():
    beside = SiblingLoad(SMALL, occupied=1, slots=8, left_tokens=[50])
    full = replace(IDLE, running=4, pending_decode_tokens=40)
    mine = InFlightLoad(requests=4, left_tokens=(5, 10, 15, 20))
    assert not LatencyModel().predict(full, None, Demand(10, 11), mine, siblings=[beside]).free


def test_what_a_token_costs_the_device_is_a_step_of_a_full_batch_by_its_slots():
    found = LatencyModel().predict(IDLE, None, Demand(500, 11, cached_tokens=400))
    assert found.token_device_s == pytest.approx(0.02 * 1.3 / 4)
    assert found.prefill_s == pytest.approx(0.105)
    assert found.ttft_s == pytest.approx(0.105)


def test_waits_that_take_longer_than_predicted_are_predicted_longer():
    full = replace(IDLE, running=4, pending_decode_tokens=400)
    model = Bench().model
    before = model.predict(full, None, Demand(10, 20))
    for _ in range(80):  # a whole queue, predicted before the first of it was served
        model.observe_wait(INFO, 0.5, 1.0, 1.0)
    after = model.predict(full, None, Demand(10, 20))
    assert after.wait_s == pytest.approx(2 * before.wait_s, rel=0.01)
    model.observe_wait(INFO, 0.0, 1.0, 5.0)  # nothing was predicted: nothing to learn
    assert model.predict(full, None, Demand(10, 20)) == after


def test_a_slower_pace_is_not_learnt_twice():
    full = replace(IDLE, running=4, pending_decode_tokens=400)
    bench = Bench()
    model = bench.model
    before, factor = model.predict(full, None, Demand(10, 20)), model.wait_factor(INFO)
    for _ in range(60):
        bench.serve(IDLE, Demand(10, 20), 0.02, 0.04, 20)
        model.observe_wait(INFO, before.wait_s, factor, 2 * before.wait_s)
    after = model.predict(full, None, Demand(10, 20))
    assert after.wait_s == pytest.approx(2 * before.wait_s, rel=0.1)


def test_replicas_that_are_gone_are_forgotten():
    bench = Bench()
    for _ in range(20):
        bench.serve(IDLE, Demand(10, 20), 0.02, 0.5, 20)
    assert bench.model.predict(IDLE, None, Demand(10, 11)).tpot_s > 0.3
    bench.model.keep_only(set())
    assert bench.model.predict(IDLE, None, Demand(10, 11)).tpot_s == pytest.approx(0.02)


def test_what_still_decodes_where_it_was_unloaded_takes_no_other_of_its_device_along():
    """Its speed was forgotten while its answer went on: who was sent to that device next got an internal error."""
    bench = Bench()
    rung, other = (
        ReplicaSnapshot(info("int8", replica_id=f"local/{name}", prior=PRIOR, device="cpu"), available=True, slots=4)
        for name in ("rung", "other")
    )
    bench.serve(other, Demand(10, 20), 0.02, 0.04, 20)
    began, waits = (bench.begin(rung, Demand(10, 20)) for _ in range(2))
    bench.first(began, 0.02)
    bench.model.keep_only({"local/other"})
    bench.clock.time_s += 0.1
    bench.serve(other, Demand(10, 20), 0.02, 0.04, 20)
    bench.first(waits, 0.1)  # sent there before it was unloaded
    bench.end(waits, 20, 1.0)
    bench.end(began, 20, 1.0)
    bench.model.keep_only({"local/other"})
    assert list(bench.model._speeds) == ["local/other"]


def test_what_was_computed_stands_as_long_as_the_speeds_in_it():
    model, nothing = LatencyModel(VirtualClock()), InFlightLoad()
    model.state(IDLE, None, nothing, (), 0.0)
    busy = replace(IDLE, running=1)
    state = model.state(busy, None, nothing, (), 0.2)
    assert model.state(busy, None, nothing, (), 0.24) is state
    assert model.state(busy, None, nothing, (), 0.26) is not state, "its speeds are those of second 0"


def test_a_prompt_that_is_overdue_is_evidence_before_it_ends():
    """Two rungs of a device that other work has slowed down: what comes next is told so at once."""
    bench = Bench()
    running = bench.begin(IDLE, Demand(1000, 20))
    told = running.work.told
    assert told is not None
    awaited = Awaited(running.sent_at_s, told.ttft_high_s)
    mine = InFlightLoad(1, 1000, (20,), awaited=awaited)
    sibling = SiblingLoad(INFO, 1, 4, (20,), 1000, awaited=awaited)

    def next_one():
        own = bench.model.predict(replace(IDLE, running=1), None, Demand(1000, 20), mine)
        beside = bench.model.predict(
            ReplicaSnapshot(SMALL, available=True, slots=4), None, Demand(500, 40), siblings=(sibling,)
        )
        return own, beside

    in_time = next_one()
    bench.clock.time_s += 0.9 * told.ttft_high_s
    assert next_one() == in_time
    bench.clock.time_s += 3.1 * told.ttft_high_s
    for before, late in zip(in_time, next_one(), strict=True):
        assert late.ttft_s == pytest.approx(4 * before.ttft_s)
        assert late.ttft_high_s == pytest.approx(4 * before.ttft_high_s)
        assert late.tpot_s == before.tpot_s
