"""What is learnt of answer lengths: unbiased where answers were cut, and from whatever tells of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from router.signals.length import LengthModel, LengthWatch
from router.values.request import InferenceRequest
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import request

CLOCK = VirtualClock()
FAMILY = "tiny"
Wish = Callable[[random.Random, int], dict[str, Any]]


def ask(**wish: Any) -> InferenceRequest:
    return request(CLOCK, **wish)


def told(model: LengthModel, tokens: int, *, by_itself: bool = True, **wish: Any) -> LengthWatch:
    """An answer came and ended."""
    watch = model.watch(ask(**wish), FAMILY)
    model.ended(watch, FAMILY, tokens, by_itself=by_itself)
    return watch


def mean(model: LengthModel, **wish: Any) -> float:
    return model.watch(ask(**wish), FAMILY).curve.expected()


def test_before_any_answer_the_median_is_what_the_operator_said() -> None:
    curve = LengthModel(300.0).watch(ask(), FAMILY).curve
    assert curve.quantile(0.5) == pytest.approx(300.0, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_cut_answers_do_not_bias_the_length(seed: int) -> None:
    """Every other answer is cut at random: those that ended are the short ones, those that were cut the long ones."""
    rng, model = random.Random(seed), LengthModel(128.0)
    ended, moving = [], 128.0
    for _ in range(1500):
        length = max(1, round(rng.lognormvariate(math.log(200.0), 0.6)))
        cut_at = round(rng.expovariate(1 / 300.0)) + 1
        watch = model.watch(ask(), FAMILY)
        model.grew(watch, min(length, cut_at))
        model.ended(watch, FAMILY, min(length, cut_at), by_itself=length <= cut_at)
        if length <= cut_at:
            ended.append(length)
        if length <= cut_at or cut_at > moving:
            moving += (min(length, cut_at) - moving) * 0.05
    truth = 200.0 * math.exp(0.18)
    learnt = mean(model)
    assert learnt == pytest.approx(truth, rel=0.12)
    assert sum(ended) / len(ended) < 0.85 * truth, "the mean of those that ended is too short"
    curve = model.watch(ask(), FAMILY).curve
    assert curve.quantile(0.5) == pytest.approx(200.0, rel=0.12)
    assert curve.quantile(0.9) == pytest.approx(200.0 * math.exp(0.6 * 1.2816), rel=0.2)


def test_deadlines_that_cut_the_long_ones_do_not_double_the_mean() -> None:
    """The old figure (`ended or tokens > known`) drifted to 430 where the truth is 214: the long cut ones counted."""
    rng, model, old = random.Random(5), LengthModel(128.0), 128.0
    for _ in range(1500):
        length = max(1, round(rng.lognormvariate(math.log(178.0), 0.6)))
        runs = rng.choice([60, 120, 1000])  # what its deadline leaves
        told(model, min(length, runs), by_itself=length <= runs)
        if length <= runs or runs > old:
            old += (min(length, runs) - old) * 0.05
    assert mean(model) == pytest.approx(214.0, rel=0.15)


def test_an_answer_that_runs_counts_as_longer_than_it_is() -> None:
    model = LengthModel(20.0)
    for _ in range(30):
        told(model, 20)
    before = model.watch(ask(), FAMILY).curve.within(400)
    for _ in range(30):
        watch = model.watch(ask(), FAMILY)
        for tokens in range(1, 401):
            model.grew(watch, tokens)
    assert model.watch(ask(), FAMILY).curve.within(400) < before - 0.3


def test_growth_is_counted_once_however_often_it_is_told() -> None:
    one, many = LengthModel(50.0), LengthModel(50.0)
    for _ in range(20):
        watch = one.watch(ask(), FAMILY)
        one.ended(watch, FAMILY, 300, by_itself=True)
        watch = many.watch(ask(), FAMILY)
        for tokens in range(1, 301):
            many.grew(watch, tokens)
        many.ended(watch, FAMILY, 300, by_itself=True)
    assert mean(one) == pytest.approx(mean(many), rel=0.02)


def spread_of(wish: Wish, known_to: float, seed: int = 1) -> float:
    """Learn lengths between 30 and 3,000 tokens that `wish` gives away; returns the mean error, in logs, afterwards."""
    rng, model, errors = random.Random(seed), LengthModel(300.0), []
    for index in range(700):
        length = round(math.exp(rng.uniform(math.log(30.0), math.log(3000.0))))
        told_of = wish(rng, length)
        median = model.watch(ask(**told_of), FAMILY).curve.quantile(0.5)
        if index >= 500:
            errors.append(abs(math.log(median / length)))
        told(model, length, **told_of)
    error = sum(errors) / len(errors)
    assert error < known_to, error
    return error


def test_a_deadline_that_gives_the_length_away_is_learnt() -> None:
    spread_of(lambda _, length: {"deadline_s": 1.5 + 0.04 * length}, 0.35)


def test_a_cap_that_gives_the_length_away_is_learnt() -> None:
    spread_of(lambda rng, length: {"max_tokens": round(length * rng.uniform(1.0, 1.5))}, 0.35)


def test_a_cap_that_always_ends_the_answer_is_its_length() -> None:
    model = LengthModel(128.0)
    for cap in [50, 400, 90, 1200] * 30:
        told(model, cap, by_itself=False, max_tokens=cap)
    for cap in (60, 1000):
        assert mean(model, max_tokens=cap) > 0.85 * cap


def test_a_caller_whose_answers_are_short_is_known() -> None:
    rng, model = random.Random(2), LengthModel(128.0)
    for _ in range(300):
        told(model, rng.randint(15, 25), caller="short")
        told(model, rng.randint(700, 900), caller="long")
    assert mean(model, caller="short") < 60
    assert mean(model, caller="long") > 500
    assert 100 < mean(model, caller="nobody knows") < 700


def test_signs_that_tell_nothing_do_no_harm() -> None:
    rng, model = random.Random(4), LengthModel(128.0)
    for _ in range(600):
        length = max(1, round(rng.lognormvariate(math.log(200.0), 0.6)))
        told(model, length, deadline_s=rng.uniform(1.0, 60.0), max_tokens=4000, caller=f"c{rng.randint(0, 5)}")
    learnt = mean(model, deadline_s=20.0, max_tokens=4000, caller="c1")
    assert learnt == pytest.approx(200.0 * math.exp(0.18), rel=0.25)


def test_a_length_that_was_promised_is_not_guessed() -> None:
    model = LengthModel(128.0)
    curve = model.watch(ask(max_tokens=77, ignore_eos=True), FAMILY).curve
    assert (curve.quantile(0.1), curve.expected()) == (77.0, pytest.approx(77.0))


def test_an_answer_of_one_value_is_one_token_and_teaches_nothing() -> None:
    model, untold = LengthModel(128.0), LengthModel(128.0)
    for _ in range(50):
        watch = told(model, 1, max_tokens=1, deadline_s=0.25)
        assert (watch.curve.expected(), watch.curve.quantile(0.9), watch.longest) == (1.0, 1.0, 1)
    assert mean(model, deadline_s=0.25) == mean(untold, deadline_s=0.25)


def test_models_are_told_apart() -> None:
    model = LengthModel(128.0)
    for _ in range(100):
        model.ended(model.watch(ask(), "terse"), "terse", 10, by_itself=True)
    assert model.watch(ask(), "terse").curve.expected() < 30
    assert model.watch(ask(), "other").curve.quantile(0.5) == pytest.approx(128.0, rel=0.05)


def test_lengths_that_change_are_forgotten() -> None:
    model = LengthModel(128.0)
    for _ in range(1000):
        told(model, 1000)
    for _ in range(4000):
        told(model, 50)
    assert mean(model) < 120


def test_who_waits_learns_what_is_learnt_meanwhile_and_not_at_every_answer() -> None:
    model = LengthModel(150.0)
    waiting = ask()
    watch = model.watch(waiting, FAMILY)
    first, renewed = watch.curve, 0
    for _ in range(400):
        told(model, 20)
        before = watch.curve
        model.renew(watch, waiting, FAMILY)
        renewed += watch.curve is not before
    assert first.expected() > 100
    assert watch.curve.expected() == pytest.approx(mean(model), rel=0.1)
    assert watch.curve.expected() < 40
    assert 5 <= renewed <= 25, "the more answers are known, the less a few more tell"
    assert watch.longest < 60


def test_a_length_that_was_promised_is_not_renewed() -> None:
    model = LengthModel(150.0)
    capped = ask(max_tokens=1)
    watch = model.watch(capped, FAMILY)
    curve = watch.curve
    for _ in range(50):
        told(model, 20)
    model.renew(watch, capped, FAMILY)
    assert watch.curve is curve


def test_what_an_answer_changed_is_computed_before_the_next_one_comes_and_alike() -> None:
    soon, late, rng = LengthModel(64.0), LengthModel(64.0), random.Random(4)
    for _ in range(40):
        tokens = rng.randint(1, 300)
        watch = told(soon, tokens, max_tokens=400)
        soon.settle(watch)
        settled = [source.table._survival for source in watch.sources]
        told(late, tokens, max_tokens=400)
        one, other = (model.watch(ask(max_tokens=400), FAMILY).curve for model in (soon, late))
        assert (one.survival, one.area) == (other.survival, other.area)
        again = [source.table._survival for source in soon.watch(ask(max_tokens=400), FAMILY).sources]
        assert all(before is after for before, after in zip(settled, again, strict=True)), "nothing was computed again"


def test_memory_is_bounded() -> None:
    model = LengthModel(128.0)
    for index in range(2000):
        told(model, 10, caller=f"c{index}", session=f"s{index}", deadline_s=1.0 + index)
    tables = model._families[FAMILY].tables
    assert max(len(of_kind) for of_kind in tables.values()) <= 512


def test_an_answer_told_token_by_token_teaches_what_one_told_in_pieces_does() -> None:
    """Its first tokens are noted eight at a time: what is believed in the end is the same."""
    slowly, quickly = LengthModel(50.0), LengthModel(50.0)
    for length in (3, 9, 17, 40, 300) * 8:
        for model, steps in ((slowly, range(1, length + 1)), (quickly, (1, length))):
            watch = model.watch(ask(), FAMILY)
            for tokens in steps:
                model.grew(watch, tokens)
            model.ended(watch, FAMILY, length, by_itself=True)
    for share in (0.25, 0.5, 0.9):
        told_slowly = slowly.watch(ask(), FAMILY).curve.quantile(share)
        assert told_slowly == pytest.approx(quickly.watch(ask(), FAMILY).curve.quantile(share), rel=0.05)
