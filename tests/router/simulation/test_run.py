"""The simulator runs the real dispatcher: the same every time, within what its devices can do, at exact times."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from router.simulation.run import simulate
from router.simulation.values import SimRequest
from router.simulation.world import DeviceSpec, LinkSpec, NoiseSpec, RungSpec, World, two_tiers
from router.values.request import Locality, Objective
from router.values.settings import RouterSettings

LARGE = RungSpec(variant="large", quality=1.0, prefill_tokens_per_s=1000, step_ms=10, batch_slope=0.5)
SURE = NoiseSpec(sigma=0.0, prior_error_sigma=0.0)
EDGE = DeviceSpec(name="edge", slots=2, rungs=(LARGE,))
ALONE = World(devices=(EDGE,), noise=SURE)
CLOUD = DeviceSpec(name="cloud", slots=2, rungs=(LARGE,), remote=True, link=LinkSpec(rtt_ms=40, uplink_mbps=8))


def burst(n: int, gap_s: float, **objective: Any) -> list[SimRequest]:
    return [SimRequest(i * gap_s, 50 + 37 * i % 400, 20 + 53 * i % 200, Objective(**objective)) for i in range(n)]


def test_one_request_alone_takes_its_prefill_and_one_step_a_token() -> None:
    row = simulate(ALONE, [SimRequest(5.0, 100, 11)]).rows[0]
    assert (row.outcome, row.variant, row.tokens, row.whole, row.kept) == ("completed", "large", 11, True, True)
    assert row.ttft_s == pytest.approx(0.1, abs=1e-9)
    assert row.finish_s == pytest.approx(0.1 + 10 * 0.01, abs=1e-9)
    assert (row.value, row.quality) == (1.0, 1.0)


def test_two_at_once_prefill_one_after_the_other_and_decode_together() -> None:
    rows = simulate(ALONE, [SimRequest(0.0, 100, 11), SimRequest(0.0, 200, 11)]).rows
    assert [row.ttft_s for row in rows] == pytest.approx([0.1, 0.3], abs=1e-9)
    # Both start to decode at 0.3 s: ten rounds of 15 ms for the first, then nothing is left of the second either.
    assert [row.finish_s for row in rows] == pytest.approx([0.45, 0.45], abs=1e-9)


def test_a_prefill_pauses_the_decode_of_others() -> None:
    rows = simulate(ALONE, [SimRequest(0.0, 100, 11), SimRequest(0.15, 50, 1)]).rows
    assert rows[1].finish_s == pytest.approx(0.05, abs=1e-9)
    assert rows[0].finish_s == pytest.approx(0.2 + 0.05, abs=1e-9)


def test_a_prefill_in_chunks_leaves_decode_a_share() -> None:
    """Alone the prefill takes 50 ms; at 0.5 of its speed 100 ms, in which decode goes on at 0.25 of its own."""
    device = msgspec.structs.replace(EDGE, prefill_share=0.5, decode_share=0.25)
    world = World(devices=(device,), noise=SURE)
    rows = simulate(world, [SimRequest(0.0, 100, 21), SimRequest(0.15, 50, 1)]).rows
    assert rows[0].ttft_s == pytest.approx(0.1, abs=1e-9)
    assert rows[1].finish_s == pytest.approx(0.1, abs=1e-9)
    assert rows[0].finish_s == pytest.approx(0.3 + 0.75 * 0.1, abs=1e-9)


def test_devices_of_one_machine_slow_each_other_down_while_both_compute() -> None:
    """The second device takes 0.4 s at half its speed, in which the first does at 0.8 what takes 0.32 s alone."""
    edge = msgspec.structs.replace(EDGE, machine="box", beside=0.8)
    cloud = msgspec.structs.replace(CLOUD, machine="box", beside=0.5, link=LinkSpec(rtt_ms=0, uplink_mbps=1e6))
    world = World(devices=(edge, cloud), noise=SURE)
    here, there = (Objective(locality=where) for where in (Locality.LOCAL_ONLY, Locality.CLOUD_ONLY))
    rows = simulate(world, [SimRequest(0.0, 100, 91, here), SimRequest(0.0, 100, 11, there)]).rows
    assert [row.finish_s for row in rows] == pytest.approx([1.0 + 0.08, 0.4], abs=1e-4)


def test_the_link_adds_its_round_trip_and_the_bytes_on_it() -> None:
    world = World(devices=(CLOUD,), noise=SURE)
    row = simulate(world, [SimRequest(0.0, 100, 11, prompt_bytes=10_000)]).rows[0]
    assert row.tier == "cloud"
    assert row.ttft_s == pytest.approx(0.04 + 0.01 + 0.1, abs=1e-9)
    assert row.finish_s == pytest.approx(0.15 + 0.1, abs=1e-9)


def test_the_same_seed_gives_the_same_rows_and_another_one_does_not() -> None:
    requests = burst(60, 0.4, deadline_s=6.0)
    first, again, other = (simulate(two_tiers(), requests, seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert [row.finish_s for row in first.rows] != [row.finish_s for row in other.rows]


@pytest.mark.parametrize("policy", ["quality-in-objective", "local-first", "cloud-first", "smallest-rung"])
def test_no_device_computes_for_longer_than_time_passed_nor_runs_more_than_its_slots(policy: str) -> None:
    world = two_tiers()
    result = simulate(world, burst(80, 0.1, deadline_s=8.0), RouterSettings(policy=policy), seed=3)
    assert len(result.rows) == 80
    assert {row.outcome for row in result.rows} <= {"completed", "degraded", "shed", "evicted", "unavailable"}
    for use, device in zip(result.devices, world.devices, strict=True):
        assert 0.0 < use.busy_s <= result.lasted_s + 1e-9
        assert 1 <= use.most_running <= device.slots
    assert all(row.kept <= row.whole for row in result.rows)
    assert all(row.finish_s <= 8.0 + 1e-6 for row in result.rows if row.kept)


def test_work_that_its_deadline_ends_gives_its_slot_back_at_once() -> None:
    """One slot, and a request that cannot finish: the next one starts the moment the first is over."""
    world = World(devices=(msgspec.structs.replace(EDGE, slots=1),), noise=SURE)
    late = SimRequest(0.0, 100, 10_000, Objective(deadline_s=1.0))
    rows = simulate(world, [late, SimRequest(0.5, 100, 11)]).rows
    assert not rows[0].whole
    assert rows[0].finish_s <= 1.0 + 1e-9
    assert rows[1].whole
    assert rows[1].finish_s <= 0.5 + 0.2 + 1e-9


def test_the_true_length_is_not_told_but_ends_the_answer() -> None:
    """Two requests that differ only in their answers are decided and predicted alike."""
    short, long = (simulate(ALONE, [SimRequest(0.0, 100, n, max_tokens=400)]).rows[0] for n in (20, 300))
    told = ("predicted_ttft_s", "predicted_ttft_high_s", "predicted_finish_s", "predicted_finish_high_s", "reason")
    assert [getattr(short, name) for name in told] == [getattr(long, name) for name in told]
    assert (short.tokens, long.tokens) == (20, 300)


def test_a_cap_of_the_callers_own_makes_a_whole_answer() -> None:
    row = simulate(ALONE, [SimRequest(0.0, 100, 300, max_tokens=25)]).rows[0]
    assert (row.tokens, row.whole, row.kept) == (25, True, True)


def test_what_a_request_is_worth_is_its_weight_times_quality_if_kept() -> None:
    asked = SimRequest(0.0, 100, 11, Objective(ttft_s=1.0, tpot_s=0.02), weight=3.0)
    assert simulate(ALONE, [asked]).rows[0].value == 3.0
    too_fast = dataclasses.replace(asked, objective=Objective(tpot_s=0.0099))
    assert simulate(ALONE, [too_fast]).rows[0].value == 0.0
