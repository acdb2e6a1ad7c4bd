"""Limits of a tenant: never more than they say, and always a time to come back at which there is room."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import BudgetSpent, RateLimited
from router.tenants.bucket import Bucket
from router.tenants.quota import Quota
from router.tenants.retries import RetryBudget
from router.tenants.tenant import Limits
from router.values.usage import Usage


def quota(now_s: float = 0.0, spent: int = 0, **limits: Any) -> Quota:
    return Quota("acme", Limits(**limits), lambda: spent, lambda: 3600.0, now_s)


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 30), st.floats(0, 500)), max_size=40))
def test_no_minute_gives_more_than_the_limit_and_what_was_full(limit: int, steps: list[tuple[float, float]]) -> None:
    bucket, now_s, taken = Bucket(limit, 0.0), 0.0, []
    for pause_s, amount in steps:
        now_s += pause_s
        if bucket.wait_s(now_s, amount) == 0.0 and amount <= limit:
            bucket.take(now_s, amount)
            taken.append((now_s, amount))
    for began_s, _ in taken:
        within = sum(amount for at_s, amount in taken if began_s <= at_s <= began_s + 60.0)
        assert within <= 2 * limit + 1e-6


@given(st.integers(1, 1000), st.integers(0, 3000), st.integers(1, 2000))
def test_the_time_to_come_back_is_when_there_is_room(limit: int, taken: int, wanted: int) -> None:
    bucket = Bucket(limit, 0.0)
    bucket.take(0.0, taken)
    wait_s = bucket.wait_s(0.0, wanted)
    assert bucket.wait_s(wait_s + 1e-6, wanted) == pytest.approx(0.0, abs=1e-3)
    assert (wait_s == 0.0) == (min(wanted, limit) <= limit - taken)


def test_requests_a_minute() -> None:
    mine = quota(requests_per_minute=2)
    mine.enter(0.0)
    mine.enter(0.0)
    with pytest.raises(RateLimited, match="`acme` may send 2 requests a minute") as raised:
        mine.enter(0.0)
    assert (raised.value.code, raised.value.kind, raised.value.status) == ("rate_limit_exceeded", "requests", 429)
    assert raised.value.retry_after_s == pytest.approx(30.0)
    mine.enter(30.1)
    left, _ = mine.left(30.1)
    assert left is not None
    assert (left.limit, left.remaining) == (2, 0)


def test_requests_at_once_and_what_leaves_makes_room() -> None:
    mine = quota(concurrency=1)
    mine.enter(0.0)
    with pytest.raises(RateLimited, match="1 requests running, at most 1"):
        mine.enter(0.0)
    mine.leave()
    mine.enter(0.0)


def test_a_budget_that_is_used_up_says_when_it_begins_anew_and_that_retries_are_in_vain() -> None:
    with pytest.raises(BudgetSpent, match="used 100 of its 100 tokens of this month") as raised:
        quota(spent=100, monthly_tokens=100).enter(0.0)
    assert (raised.value.code, raised.value.should_retry, raised.value.retry_after_s) == (
        "insufficient_quota",
        False,
        3600.0,
    )
    quota(spent=99, monthly_tokens=100).enter(0.0)


def test_tokens_are_set_aside_and_what_was_not_used_is_given_back() -> None:
    mine = quota(tokens_per_minute=100)
    reserved = mine.reserve(0.0, 40, 50, asked=True)
    assert reserved == 90
    with pytest.raises(RateLimited, match="10 are left, and the request asks for 20") as raised:
        mine.reserve(0.0, 10, 10, asked=True)
    assert raised.value.should_retry
    mine.settle(0.0, reserved, Usage(40, 5))
    assert mine.reserve(0.0, 10, 10, asked=True) == 20


def test_what_no_minute_holds_is_not_to_be_retried_and_an_open_end_takes_what_there_is() -> None:
    mine = quota(tokens_per_minute=100)
    with pytest.raises(RateLimited, match="asks for 140 tokens") as raised:
        mine.reserve(0.0, 40, 100, asked=True)
    assert not raised.value.should_retry
    assert mine.reserve(0.0, 40, 256, asked=False) == 100


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50), st.integers(0, 80), st.floats(0, 20)), max_size=30))
def test_in_the_long_run_no_more_is_used_than_the_limit_allows(asked: list[tuple[int, int, int, float]]) -> None:
    mine, now_s, used = quota(tokens_per_minute=120), 0.0, 0
    for prompt, most, answered, pause_s in asked:
        now_s += pause_s
        try:
            reserved = mine.reserve(now_s, prompt, most, asked=True)
        except RateLimited:
            continue
        real = Usage(prompt, min(answered, most))
        used += real.total_tokens
        mine.settle(now_s, reserved, real)
    assert used <= 120 + math.ceil(now_s * 2)


def test_new_limits_take_effect_and_forget_nothing() -> None:
    mine = quota(requests_per_minute=10)
    for _ in range(10):
        mine.enter(0.0)
    mine.reconfigure(Limits(requests_per_minute=12), 0.0)
    mine.enter(0.0)
    mine.enter(0.0)
    with pytest.raises(RateLimited):
        mine.enter(0.0)
    mine.reconfigure(Limits(), 0.0)
    mine.enter(0.0)


# ── retries ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_again_soon_after_a_refusal_is_a_retry_and_later_it_is_not() -> None:
    budget = RetryBudget()
    budget.refused(7, 0.0)
    assert not budget.came(8, 1.0, 0.1, again=False)
    assert not budget.came(7, 1.0, 0.1, again=False)
    assert budget.seen == 1
    budget.refused(7, 0.0)
    budget.came(7, 500.0, 0.1, again=False)
    assert budget.seen == 1


@given(st.lists(st.booleans(), max_size=400), st.floats(0, 0.5))
def test_retries_within_the_budget_are_never_more_than_were_earned(again: list[bool], share: float) -> None:
    budget = RetryBudget()
    beyond = sum(budget.came(n, 0.0, share, again=retry) for n, retry in enumerate(again))
    within = sum(again) - beyond
    assert within <= 3 + share * (len(again) - sum(again)) + 1e-6
    assert (budget.seen, budget.beyond) == (sum(again), beyond)


def test_what_is_remembered_of_refusals_is_bounded() -> None:
    budget = RetryBudget()
    for number in range(10_000):
        budget.refused(number, float(number) / 1000)
    assert len(budget._refused) <= 4096
