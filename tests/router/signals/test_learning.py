"""What predictions learn: speeds on shared devices, changes, ageing, prefix hits, figures kept nine times in ten."""

from __future__ import annotations

import dataclasses
import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router.signals.link import Link
from router.values.prediction import Demand, InFlightLoad, SiblingLoad
from router.values.replica import ReplicaSnapshot, SpeedPrior
from tests.support.router_fakes import info
from tests.support.served import Bench

PRIOR = SpeedPrior(prefill_tokens_per_s=1000.0, decode_tokens_per_s=50.0, decode_batch_slope=0.1)
INFO = info("int8", prior=PRIOR, device="")
SMALL = info("pruned-int8", prior=dataclasses.replace(PRIOR, decode_tokens_per_s=100.0), device="")
IDLE = ReplicaSnapshot(INFO, available=True, slots=4)
SMALL_IDLE = ReplicaSnapshot(SMALL, available=True, slots=4)
ASK = Demand(500, 40)


def pace(bench: Bench, snapshot: ReplicaSnapshot = IDLE) -> float:
    return bench.model.predict(snapshot, None, ASK).tpot_s


def noisy(bench: Bench, rng: random.Random, count: int, slower: float = 1.0, gap_s: float = 1.0) -> list[float]:
    """Serve `count` requests at the prior's speeds by `slower`; returns the relative errors of what each was told."""
    errors = []
    for _ in range(count):
        ttft_s = slower * 0.505 * rng.lognormvariate(0.0, 0.3)
        step_s = slower * 0.02 * rng.lognormvariate(0.0, 0.3)
        told = bench.serve(IDLE, ASK, ttft_s, step_s, 40)
        bench.clock.time_s += gap_s
        errors.append(max(abs(told.tpot_s / (slower * 0.02) - 1), abs(told.ttft_s / (slower * 0.505) - 1)))
    return errors


def test_the_pace_is_learnt_whatever_the_batch():
    bench = Bench()
    for _ in range(30):
        bench.serve(IDLE, ASK, 0.5, 0.05, 20)
    assert pace(bench) == pytest.approx(0.05, rel=0.05)


def test_a_batch_that_changes_while_an_answer_runs_is_no_error():
    """Two overlap for half of the first one's time: at the prior's own steps, nothing is to be learnt."""
    bench = Bench()
    for _ in range(20):
        first = bench.begin(IDLE, ASK)
        bench.first(first, 0.505)
        bench.clock.time_s += 20 * 0.02
        second = bench.begin(replace(IDLE, running=1), ASK, mine=InFlightLoad(1, 0, (20,)))
        bench.first(second, 0.0)
        bench.end(first, 41, 20 * 0.022)
        bench.end(second, 41, 20 * 0.02)
    assert bench.model._speeds[INFO.replica_id].pace.log(bench.clock.now_s()) == pytest.approx(0.0, abs=0.02)


def test_rungs_that_run_beside_each_other_are_both_learnt_right():
    """Both are as their priors say; while they share the device, an answer of either takes both steps."""
    bench = Bench()
    for _ in range(40):
        large, small = bench.begin(IDLE, ASK), bench.begin(SMALL_IDLE, ASK)
        bench.first(large, 0.5)
        bench.first(small, 0.0)
        bench.end(small, 41, 40 * 0.03)
        bench.end(large, 41, 0.0)
    now_s = bench.clock.now_s()
    for rung in (INFO, SMALL):
        assert bench.model._speeds[rung.replica_id].pace.log(now_s) == pytest.approx(0.0, abs=0.05)


def test_the_slow_one_of_two_rungs_is_found_where_they_also_run_alone():
    bench = Bench()
    for index in range(120):
        small = bench.begin(SMALL_IDLE, ASK)
        bench.first(small, 0.4)
        if index % 2:
            large = bench.begin(IDLE, ASK)
            bench.first(large, 0.0)
            bench.end(large, 41, 40 * 0.05)
        bench.end(small, 41 if index % 2 else 31, 0.0 if index % 2 else 30 * 0.01)
    now_s = bench.clock.now_s()
    assert math.exp(bench.model._speeds[SMALL.replica_id].pace.log(now_s)) == pytest.approx(1.0, rel=0.15)
    assert math.exp(bench.model._speeds[INFO.replica_id].pace.log(now_s)) == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize("seed", range(4))
def test_twice_as_slow_and_back_are_each_learnt_within_20_requests(seed):
    bench, rng = Bench(), random.Random(seed)
    noisy(bench, rng, 100)
    for slower in (2.0, 1.0, 2.0):
        errors = noisy(bench, rng, 60, slower)
        settled = sorted(errors[20:])
        assert settled[len(settled) // 2] < 0.2, f"at {slower}: {errors}"


def test_what_was_slow_for_two_minutes_is_believed_to_recover():
    bench, rng = Bench(), random.Random(1)
    noisy(bench, rng, 200)
    noisy(bench, rng, 40, slower=4.0)
    assert pace(bench) > 0.05
    bench.clock.time_s += 60.0
    assert pace(bench) < 0.045


def test_an_avoided_replica_asks_to_be_explored_now_and_then_and_only_while_it_is_believed_slow():
    bench, rng = Bench(), random.Random(1)
    noisy(bench, rng, 200)
    assert not bench.model.predict(IDLE, None, ASK).explore
    bench.clock.time_s += 60.0
    assert not bench.model.predict(IDLE, None, ASK).explore, "nothing is wrong with it"
    noisy(bench, rng, 40, slower=4.0)
    assert not bench.model.predict(IDLE, None, ASK).explore
    bench.clock.time_s += 25.0
    assert bench.model.predict(IDLE, None, ASK).explore
    attempt = bench.begin(IDLE, ASK)
    assert not bench.model.predict(IDLE, None, ASK).explore, "one is on its way"
    bench.first(attempt, 0.5)
    bench.end(attempt, 40, 0.8)


def test_exploration_is_at_most_one_request_in_fifty():
    bench, rng = Bench(), random.Random(1)
    noisy(bench, rng, 50)
    noisy(bench, rng, 40, slower=6.0)
    explored = 0
    for _ in range(600):  # it stays slow, is stale each time, and other replicas serve
        bench.clock.time_s += 30.0
        if bench.model.predict(IDLE, None, ASK).explore:
            explored += 1
            bench.serve(IDLE, ASK, 3.0, 0.12, 40)
        else:
            bench.serve(SMALL_IDLE, ASK, 0.5, 0.01, 40)
    assert 2 <= explored <= 16


def test_prefix_hits_do_not_corrupt_the_prefill_line():
    bench, rng = Bench(), random.Random(2)
    for index in range(120):
        tokens, hit = rng.choice([200, 600, 1200]), index % 2
        cached = round(0.9 * tokens) if hit else 0
        attempt = bench.begin(IDLE, Demand(tokens, 20))
        bench.first(attempt, 0.005 + (tokens - cached) / 1000, cached)
        bench.end(attempt, 20, 19 * 0.02)
    speeds = bench.model._speeds[INFO.replica_id]
    learnt_s = speeds.line.predict(1000) * math.exp(speeds.prefill.log(bench.clock.now_s()))
    assert learnt_s == pytest.approx(1.005, rel=0.1)


def test_high_means_nine_times_in_ten_for_first_tokens_pace_and_finish():
    rng, bench = random.Random(3), Bench()
    kept, total = {"ttft": 0, "tpot": 0, "finish": 0}, 0
    for index in range(1600):
        tokens = max(2, round(rng.lognormvariate(4.0, 0.8)))
        ttft_s = 0.505 * rng.lognormvariate(0.0, 0.4)
        step_s = 0.03 * rng.lognormvariate(0.0, 0.3)
        told = bench.serve(IDLE, Demand(500, 75, answer_high_tokens=120), ttft_s, step_s, tokens)
        if index >= 200:
            total += 1
            kept["ttft"] += ttft_s <= told.ttft_high_s
            kept["tpot"] += step_s <= told.tpot_high_s
            kept["finish"] += ttft_s + (tokens - 1) * step_s <= told.finish_high_s
    shares = {name: count / total for name, count in kept.items()}
    assert all(0.87 <= share <= 0.93 for share in shares.values()), shares


def test_answers_that_the_deadline_cut_do_not_shrink_the_upper_finish():
    """All that run longer than 4 s are cut there; the figure still holds for nine in ten of what would have been."""
    rng, bench = random.Random(4), Bench()
    kept = total = 0
    for index in range(1500):
        tokens = max(2, round(rng.lognormvariate(4.6, 0.8)))
        step_s, ttft_s = 0.02 * rng.lognormvariate(0.0, 0.2), 0.505
        finish_s = ttft_s + (tokens - 1) * step_s
        attempt = bench.begin(IDLE, Demand(500, 100, answer_high_tokens=150))
        bench.first(attempt, ttft_s)
        whole = finish_s <= 4.0
        out = tokens if whole else max(2, int((4.0 - ttft_s) / step_s))
        bench.end(attempt, out, (out - 1) * step_s, cut=not whole)
        if index >= 300:
            total += 1
            kept += finish_s <= attempt.work.told.finish_high_s
    assert 0.85 <= kept / total <= 0.95


def test_each_band_of_load_keeps_its_own_upper_figure():
    rng, bench = random.Random(5), Bench()
    busy = replace(IDLE, running=3, pending_decode_tokens=60)
    kept: dict[bool, list[bool]] = {False: [], True: []}
    for index in range(1200):
        full = index % 3 == 0
        sigma, step_s = (0.6, 0.05) if full else (0.15, 0.02)
        actual_s = step_s * rng.lognormvariate(0.0, sigma)
        told = bench.serve(busy if full else IDLE, ASK, 0.5, actual_s, 40)
        if index >= 240:
            kept[full].append(actual_s <= told.tpot_high_s)
    for full, inside in kept.items():
        assert 0.86 <= sum(inside) / len(inside) <= 0.94, full


def test_the_downlink_bounds_the_pace_of_a_slow_link():
    link = msgspec.structs.replace(Link("x").snapshot(), downlink_bytes_per_s=10_000.0, token_bytes=300.0)
    bench = Bench()
    assert bench.model.predict(IDLE, link, ASK).tpot_s == pytest.approx(0.03)
    assert bench.model.predict(replace(IDLE, running=1), link, ASK).tpot_s == pytest.approx(0.06)


def test_prompts_on_other_rungs_of_the_device_come_first():
    bench = Bench()
    behind = SiblingLoad(SMALL, occupied=1, slots=4, left_tokens=[20], prefill_tokens=400)
    alone = bench.model.predict(IDLE, None, ASK)
    assert bench.model.predict(IDLE, None, ASK, siblings=[behind]).ttft_s == pytest.approx(alone.ttft_s + 0.4)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(1e-4, 1e3), st.floats(1e-5, 1e2), st.integers(1, 2000), st.floats(0, 1e4), st.booleans()),
        max_size=30,
    )
)
def test_predictions_stay_predictions_whatever_is_observed(observed):
    bench = Bench()
    for ttft_s, step_s, tokens, gap_s, cut in observed:
        attempt = bench.begin(IDLE, Demand(300, 50, answer_high_tokens=90))
        bench.first(attempt, ttft_s)
        bench.end(attempt, tokens, (tokens - 1) * step_s, cut=cut)
        bench.clock.time_s += gap_s
        found = bench.model.predict(IDLE, None, ASK)
        assert 0 < found.ttft_s <= found.ttft_high_s < 1e7
        assert 0 < found.tpot_s <= found.tpot_high_s < 1e6
        assert 0 < found.finish_s <= found.finish_high_s < 1e9
