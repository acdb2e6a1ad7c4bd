"""A link learns its round trip and throughput, ages, and is not fooled by small bodies or one lucky buffer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.signals.link import Link, LinkPrior
from tests.support.served import SetClock


def link(clock: SetClock | None = None, **prior) -> Link:
    return Link("x", LinkPrior(**prior), clock or SetClock())


def test_the_first_round_trip_replaces_the_prior():
    found = link(rtt_s=1.0)
    found.observe_rtt(0.02)
    assert (found.snapshot().rtt_s, found.snapshot().rtt_hi_s) == (0.02, 0.04)


def test_a_steady_round_trip_narrows_its_upper_estimate():
    found = link()
    for _ in range(100):
        found.observe_rtt(0.03)
    assert found.snapshot().rtt_s == pytest.approx(0.03)
    assert found.snapshot().rtt_hi_s == pytest.approx(0.03, rel=0.01)
    for index in range(200):
        found.observe_rtt(0.03 if index % 2 else 0.13)
    assert found.snapshot().rtt_hi_s > 0.13


def test_an_unheard_round_trip_is_less_certain():
    clock = SetClock()
    found = link(clock)
    for index in range(100):
        found.observe_rtt(0.03 if index % 2 else 0.05)
    before = found.snapshot()
    clock.time_s += 60.0
    assert found.snapshot().rtt_s == before.rtt_s
    assert found.snapshot().rtt_hi_s - before.rtt_s == pytest.approx(3 * (before.rtt_hi_s - before.rtt_s))


def test_throughput_converges_and_a_single_burst_moves_it_little():
    found = link(uplink_bytes_per_s=1e6)
    for _ in range(40):
        found.observe_transfer(100_000, 1.0)
    assert found.snapshot().uplink_bytes_per_s == pytest.approx(1e5, rel=0.05)
    found.observe_transfer(100_000, 1e-9)
    assert found.snapshot().uplink_bytes_per_s < 1.3e5


def test_an_uplink_that_turns_slow_is_found_at_once_and_one_that_was_is_tried_again():
    clock = SetClock()
    found = link(clock, uplink_bytes_per_s=1e6)
    for _ in range(60):
        found.observe_transfer(100_000, 0.1)
        clock.time_s += 1.0
    for _ in range(10):
        found.observe_transfer(100_000, 1.0)
        clock.time_s += 1.0
    assert found.snapshot().uplink_bytes_per_s == pytest.approx(1e5, rel=0.2)
    assert found.snapshot().pessimism_log > 1.0
    narrow = found.snapshot()
    clock.time_s += 90.0
    aged = found.snapshot()
    assert aged.uplink_bytes_per_s > 5e5
    assert aged.uplink_low_bytes_per_s / aged.uplink_bytes_per_s < narrow.uplink_low_bytes_per_s / 1e5


def test_what_says_nothing_is_ignored():
    found = link()
    before = found.snapshot()
    for value in (-1.0, math.nan, math.inf, 3600.0):
        found.observe_rtt(value)
        found.observe_connect(value)
    found.observe_transfer(100, 10.0)
    found.observe_transfer(100_000, 0.0)
    found.observe_transfer(100_000, -0.5)
    found.observe_transfer(100_000, math.nan)
    found.observe_answer(100, 1, 10.0)
    assert found.snapshot() == before


def test_a_request_costs_its_round_trip_and_its_upload():
    found = link(rtt_s=0.1, uplink_bytes_per_s=1000.0).snapshot()
    assert found.request_s(500) == pytest.approx(0.6)
    assert found.request_hi_s(500) > 0.2 + 0.5


def test_a_cold_connection_pays_for_its_handshakes_first_believed_then_measured():
    found = link(rtt_s=0.1, connect_round_trips=2)
    warm, cold = found.snapshot(), found.snapshot(warm=False)
    assert cold.request_s(0) - warm.request_s(0) == pytest.approx(0.2)
    for _ in range(20):
        found.observe_connect(0.35)
    assert found.snapshot(warm=False).setup_s == pytest.approx(0.35)
    assert found.snapshot().setup_s == 0


def test_the_way_back_is_shared_by_the_streams_on_it():
    found = link(downlink_bytes_per_s=30_000.0).snapshot()
    assert found.token_s(1) == pytest.approx(0.01)
    assert found.token_s(4) == pytest.approx(0.04)


def test_a_stream_that_got_more_than_was_believed_possible_raises_the_downlink_for_a_while():
    clock = SetClock()
    found = link(clock, downlink_bytes_per_s=1e4)
    for _ in range(30):
        found.observe_answer(50_000, 100, 1.0)
    assert found.snapshot().downlink_bytes_per_s == pytest.approx(5e4)
    assert found.snapshot().token_bytes == pytest.approx(500, rel=0.01)
    clock.time_s += 3600.0
    assert found.snapshot().downlink_bytes_per_s == pytest.approx(1e4, rel=0.1)


def test_bytes_of_a_metered_link_cost_money_both_ways():
    found = link(price_per_byte=1e-6).snapshot()
    assert found.metered
    assert found.price(1_000_000, 1000) == pytest.approx(1.0 + 1000 * found.token_bytes / 1e6)
    assert not link().snapshot().metered
    assert link().snapshot().price(10**9, 10**6) == 0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["rtt_s", "uplink_bytes_per_s", "downlink_bytes_per_s", "token_bytes"])
def test_priors_must_be_positive(name, bad):
    with pytest.raises(ValueError, match=name):
        link(**{name: bad})


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_a_price_is_not_negative(bad):
    with pytest.raises(ValueError, match="price_per_byte"):
        link(price_per_byte=bad)


@given(st.lists(st.tuples(st.floats(), st.integers(0, 10**9)), max_size=40))
def test_estimates_stay_positive_and_finite(observed):
    clock = SetClock()
    found = link(clock)
    for seconds, size in observed:
        found.observe_rtt(seconds)
        found.observe_transfer(size, seconds)
        found.observe_connect(seconds)
        found.observe_answer(size, 20, seconds)
        clock.time_s += 5.0
    now = found.snapshot(warm=False)
    assert 0 <= now.rtt_s <= now.rtt_hi_s < 1000
    assert 0 < now.uplink_low_bytes_per_s <= now.uplink_bytes_per_s < math.inf
    assert 0 < now.downlink_bytes_per_s < math.inf
    assert 0 <= now.setup_s <= 120


def test_a_body_that_packs_makes_an_uplink_faster_and_stays_what_is_worth_packing() -> None:
    link = Link("http://cloud", LinkPrior(uplink_bytes_per_s=100_000.0))
    assert link.slow
    for _ in range(60):
        link.observe_transfer(10_000, 0.1, 30_000)
    assert link.slow, "the link is what it was"
    assert link.snapshot().uplink_bytes_per_s == pytest.approx(300_000.0, rel=0.02)
    for _ in range(60):
        link.observe_transfer(30_000, 0.3, 30_000)
    assert link.snapshot().uplink_bytes_per_s == pytest.approx(100_000.0, rel=0.02)


def test_a_link_as_fast_as_is_believed_of_any_is_not_slow() -> None:
    link = Link("http://cloud")
    assert not link.slow
    for _ in range(60):
        link.observe_transfer(100_000, 0.5)
    assert link.slow
