"""A link learns its round trip and throughput, and is not fooled by small bodies or one lucky buffer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.signals.link import Link


def test_the_first_round_trip_replaces_the_prior():
    link = Link("x", rtt_prior_s=1.0)
    link.observe_rtt(0.02)
    found = link.snapshot()
    assert (found.rtt_s, found.rtt_hi_s) == (0.02, 0.04)


def test_a_steady_round_trip_narrows_its_upper_estimate():
    link = Link("x")
    for _ in range(100):
        link.observe_rtt(0.03)
    found = link.snapshot()
    assert found.rtt_s == pytest.approx(0.03)
    assert found.rtt_hi_s == pytest.approx(0.03, rel=0.01)
    for index in range(200):
        link.observe_rtt(0.03 if index % 2 else 0.13)
    assert link.snapshot().rtt_hi_s > 0.13


def test_throughput_converges_and_a_single_burst_moves_it_little():
    link = Link("x", uplink_prior_bytes_per_s=1e6)
    for _ in range(40):
        link.observe_transfer(100_000, 1.0)
    found = link.snapshot()
    assert found.uplink_bytes_per_s == pytest.approx(1e5, rel=0.05)
    link.observe_transfer(100_000, 1e-9)
    assert link.snapshot().uplink_bytes_per_s < 1.3e5


def test_what_says_nothing_is_ignored():
    link = Link("x")
    before = link.snapshot()
    for value in (-1.0, math.nan, math.inf, 3600.0):
        link.observe_rtt(value)
    link.observe_transfer(100, 10.0)
    link.observe_transfer(100_000, 0.0)
    link.observe_transfer(100_000, -0.5)
    link.observe_transfer(100_000, math.nan)
    assert link.snapshot() == before


def test_a_request_costs_its_round_trip_and_its_upload():
    found = Link("x", rtt_prior_s=0.1, uplink_prior_bytes_per_s=1000.0).snapshot()
    assert found.request_s(500) == pytest.approx(0.6)
    assert found.request_hi_s(500) == pytest.approx(0.2 + 0.75)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_priors_must_be_positive(bad):
    with pytest.raises(ValueError, match="uplink_prior_bytes_per_s"):
        Link("x", uplink_prior_bytes_per_s=bad)


@given(st.lists(st.tuples(st.floats(), st.integers(0, 10**9)), max_size=40))
def test_estimates_stay_positive_and_finite(observed):
    link = Link("x")
    for seconds, size in observed:
        link.observe_rtt(seconds)
        link.observe_transfer(size, seconds)
    found = link.snapshot()
    assert 0 <= found.rtt_s <= found.rtt_hi_s < 1000
    assert 0 < found.uplink_bytes_per_s < math.inf
