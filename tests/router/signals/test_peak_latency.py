"""The peak-sensitive average of response times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.signals.peak_latency import PeakLatency

NAME = "local/a"


def test_who_never_answered_is_tried() -> None:
    assert PeakLatency().of(NAME) == 0.0


def test_a_slow_answer_counts_at_once_and_quick_ones_bring_it_down_slowly() -> None:
    peaks = PeakLatency()
    peaks.observe(NAME, 0.0, 1.0)
    peaks.observe(NAME, 1.0, 9.0)
    assert peaks.of(NAME) == 9.0
    peaks.observe(NAME, 11.0, 1.0)
    assert peaks.of(NAME) == pytest.approx(1.0 + 8.0 * math.exp(-1.0))
    peaks.observe(NAME, 500.0, 1.0)
    assert peaks.of(NAME) == pytest.approx(1.0)


def test_replicas_are_told_apart_and_forgotten_with_them() -> None:
    peaks = PeakLatency()
    peaks.observe(NAME, 0.0, 1.0)
    peaks.observe("cloud/a", 0.0, 2.0)
    peaks.keep_only({"cloud/a"})
    assert (peaks.of(NAME), peaks.of("cloud/a")) == (0.0, 2.0)


@given(samples=st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.001, 100.0)), min_size=1, max_size=30))
def test_it_lies_between_the_last_and_the_slowest(samples: list[tuple[float, float]]) -> None:
    peaks, now_s = PeakLatency(), 0.0
    for index, (gap_s, took_s) in enumerate(samples):
        now_s += gap_s
        peaks.observe(NAME, now_s, took_s)
        slowest = max(took for _, took in samples[: index + 1])
        assert took_s * (1 - 1e-9) <= peaks.of(NAME) <= slowest * (1 + 1e-9)
