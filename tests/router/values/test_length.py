"""The survival curve of a length: probabilities, expectations and quantiles against samples of the same answers."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.values.length import BINS, EDGES, RATIO, LengthCurve, position_of

RNG = np.random.default_rng(7)
LENGTHS = np.maximum(RNG.lognormal(math.log(200.0), 0.9, 200_000), 1.0)


def curve(lengths: np.ndarray = LENGTHS, cap: float = math.inf) -> LengthCurve:
    return LengthCurve.of([float((lengths > edge).mean()) for edge in EDGES], cap)


CURVE = curve()


@pytest.mark.parametrize("tokens", [3, 20, 75, 200, 333, 1000, 4000])
def test_within_is_the_share_of_answers_that_are_no_longer(tokens: int) -> None:
    assert CURVE.within(tokens) == pytest.approx((tokens >= LENGTHS).mean(), abs=0.005)


@pytest.mark.parametrize("tokens", [1, 20, 200, 1000, math.inf])
def test_expected_is_the_mean_of_answers_that_end_there(tokens: float) -> None:
    assert CURVE.expected(tokens) == pytest.approx(np.minimum(LENGTHS, tokens).mean(), rel=0.01)


@pytest.mark.parametrize("emitted", [1, 50, 400])
def test_what_is_left_knows_what_is_out(emitted: int) -> None:
    longer = LENGTHS[emitted < LENGTHS]
    assert CURVE.expected_left(emitted) == pytest.approx((longer - emitted).mean(), rel=0.03)
    assert CURVE.expected_left(emitted, 100) == pytest.approx(np.minimum(longer - emitted, 100).mean(), rel=0.03)
    assert CURVE.left_within(emitted, 150) == pytest.approx((longer <= emitted + 150).mean(), abs=0.01)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.99])
def test_quantiles(share: float) -> None:
    assert CURVE.quantile(share) == pytest.approx(np.quantile(LENGTHS, share), rel=0.02)


def test_a_cap_bounds_everything() -> None:
    capped = curve(cap=100.0)
    assert capped.within(99.0) == pytest.approx(CURVE.within(99.0))
    assert capped.within(100.0) == 1.0
    assert capped.expected() == pytest.approx(np.minimum(LENGTHS, 100.0).mean(), rel=0.01)
    assert capped.quantile(0.9) == 100.0
    assert capped.left_within(100.0, 1.0) == 1.0


def test_a_known_length_is_certain() -> None:
    known = LengthCurve.exactly(40)
    assert [known.within(tokens) for tokens in (1.0, 39.0, 40.0, 1e6)] == [0.0, 0.0, 1.0, 1.0]
    assert known.expected() == pytest.approx(40.0)
    assert known.expected(10.0) == pytest.approx(10.0)
    assert known.expected_left(30.0) == pytest.approx(10.0)
    assert (known.quantile(0.01), known.quantile(0.9)) == (40.0, 40.0)
    assert known.left_within(30.0, 9.0) == 0.0
    assert known.left_within(30.0, 10.0) == 1.0


def test_an_answer_beyond_the_last_edge_is_still_a_number() -> None:
    endless = LengthCurve.of([1.0] * BINS)
    assert endless.within(1e9) == 0.0
    assert endless.expected() == pytest.approx(EDGES[-1])
    assert math.isfinite(endless.quantile(0.5))
    assert endless.left_within(1e9, 1.0) == 0.0
    short = LengthCurve.of([0.0] * BINS)
    assert (short.within(1.0), short.expected(), short.quantile(0.5), short.left_within(5.0, 1.0)) == (1, 1, 1, 1)


def test_positions_are_the_edges() -> None:
    assert [position_of(tokens) for tokens in (0.0, 1.0, RATIO, RATIO**20)] == pytest.approx([0.0, 0.0, 1.0, 20.0])


@given(
    drops=st.lists(st.floats(0.0, 0.5), min_size=BINS, max_size=BINS),
    cap=st.sampled_from([math.inf, 1.0, 57.0, 3e4]),
    tokens=st.floats(0.0, 1e6),
    emitted=st.floats(0.0, 1e5),
    share=st.floats(0.0, 0.999),
)
def test_every_curve_is_a_distribution(
    drops: list[float], cap: float, tokens: float, emitted: float, share: float
) -> None:
    survival = np.cumprod(1.0 - np.array(drops)).tolist()
    any_curve = LengthCurve.of(survival, cap)
    more = tokens * random.Random(0).uniform(1.0, 2.0)
    assert 0.0 <= any_curve.within(tokens) <= any_curve.within(more) <= 1.0
    assert 1.0 <= any_curve.expected(tokens) <= any_curve.expected(more) + 1e-9
    assert any_curve.expected(tokens) <= max(1.0, min(tokens, cap)) + 1e-6
    assert 0.0 <= any_curve.left_within(emitted, tokens) <= any_curve.left_within(emitted, more) + 1e-9 <= 1.0 + 1e-9
    assert any_curve.expected_left(emitted, tokens) >= 1.0
    quantile = any_curve.quantile(share)
    assert 1.0 <= quantile <= max(cap, 1.0)
    if quantile < min(cap, EDGES[-1]):
        assert any_curve.within(quantile * 1.001) >= share - 1e-3
