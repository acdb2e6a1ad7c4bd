"""Closed, open, half_open: when, for how long, and who may be believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.signals.breaker import Breaker, BreakerState
from router.signals.health import HealthBook, breaker_key
from router.values.replica import ReplicaSnapshot
from router.values.settings import BreakerSettings
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import UPSTREAM, info

RESULTS = ("passed", "failed", "untold")
SETTINGS = BreakerSettings(failures=3, open_ms=1000.0, max_open_ms=4000.0, failure_ratio=0.5, window=6)


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def changes():
    return []


@pytest.fixture
def breaker(clock, changes):
    return Breaker("x", SETTINGS, clock, lambda _, state, why: changes.append((state.value, why)))


def fail(breaker: Breaker, times: int = 3, *, trial: bool = False) -> None:
    """Let requests fail, and the self-test too where they raise a suspicion."""
    for _ in range(times):
        if breaker.fail(trial=trial):
            breaker.self_test_failed("refused")


def test_it_opens_on_failures_in_a_row(breaker, changes):
    fail(breaker, 2)
    breaker.succeed()
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 1)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows()
    assert breaker.opens_for_s == 1.0
    assert changes == [("open", "refused")]


def test_it_opens_on_a_share_of_failures(breaker):
    for _ in range(3):
        breaker.succeed()
        fail(breaker, 1)
    assert breaker.state is BreakerState.OPEN


def test_half_open_lets_one_trial_through(breaker, clock):
    fail(breaker)
    clock.pass_s(1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.allows()
    assert breaker.begin()
    assert not breaker.allows()
    assert not breaker.begin()
    breaker.abandon()
    assert breaker.allows()
    breaker.begin()
    breaker.succeed()
    assert breaker.state is BreakerState.CLOSED


def test_a_failed_trial_opens_it_for_longer_up_to_a_cap(breaker, clock):
    fail(breaker)
    waits = []
    for _ in range(5):
        waits.append(breaker.opens_for_s)
        clock.pass_s(breaker.opens_for_s)
        fail(breaker, 1, trial=breaker.begin())
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]
    clock.pass_s(4.0)
    breaker.succeed()
    fail(breaker)
    assert breaker.opens_for_s == 1.0


def test_late_failures_of_older_requests_do_not_count_against_the_trial(breaker, clock):
    fail(breaker)
    clock.pass_s(1.0)
    assert breaker.begin()
    assert not breaker.fail()
    assert breaker.state is BreakerState.HALF_OPEN


def test_probes_open_and_close_it_where_reachability_was_the_trouble(breaker, clock):
    for _ in range(3):
        breaker.probe_failed("no answer")
    assert breaker.state is BreakerState.OPEN
    breaker.probe_succeeded()
    assert breaker.state is BreakerState.OPEN
    breaker.probe_succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_good_probes_do_not_close_it_when_only_generating_fails(breaker, clock):
    fail(breaker)
    for _ in range(10):
        breaker.probe_succeeded()
    assert breaker.state is BreakerState.OPEN
    clock.pass_s(1.0)
    breaker.probe_succeeded()
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.probe_failed("and now it is gone")
    assert breaker.state is BreakerState.OPEN


def test_a_probe_that_fails_once_does_no_harm(breaker):
    for _ in range(10):
        breaker.probe_failed("late")
        breaker.probe_succeeded()
    assert breaker.state is BreakerState.CLOSED


@given(st.lists(st.sampled_from(["fail", "trial", "succeed", "abandon", "good", "bad", "wait", *RESULTS]), max_size=60))
def test_it_never_stays_shut_for_ever(events):
    clock = VirtualClock()
    breaker = Breaker("x", SETTINGS, clock)
    for event in events:
        if event == "wait":
            clock.pass_s(0.7)
        elif event == "trial":
            breaker.begin()
        else:
            {
                "fail": lambda: breaker.fail(trial=True),
                "passed": breaker.self_test_passed,
                "failed": lambda: breaker.self_test_failed("x"),
                "untold": breaker.self_test_untold,
                "succeed": breaker.succeed,
                "abandon": breaker.abandon,
                "good": breaker.probe_succeeded,
                "bad": lambda: breaker.probe_failed("x"),
            }[event]()
        assert 0 <= breaker.opens_for_s <= 4.0
    breaker.abandon()
    clock.pass_s(4.0)
    assert breaker.allows()


def test_requests_raise_a_suspicion_and_only_a_self_test_opens_it(breaker, changes):
    assert [breaker.fail() for _ in range(5)] == [False, False, True, False, False], "one self-test at a time"
    assert breaker.allows()
    breaker.self_test_failed("fails on one word too")
    assert changes == [("open", "fails on one word too")]


def test_a_self_test_that_passes_makes_it_trusted_for_as_long_as_it_would_have_been_open(breaker, clock):
    assert [breaker.fail() for _ in range(3)][-1]
    breaker.self_test_passed()
    assert not any(breaker.fail() for _ in range(9))
    clock.pass_s(1.0)
    assert breaker.fail()
    assert breaker.state is BreakerState.CLOSED


def test_a_live_success_vetoes_a_self_test_that_fails_later(breaker):
    assert [breaker.fail() for _ in range(3)][-1]
    breaker.succeed()
    breaker.self_test_failed("too late")
    assert breaker.state is BreakerState.CLOSED


def test_a_self_test_without_result_leaves_the_next_failure_to_ask_again(breaker):
    assert [breaker.fail() for _ in range(3)][-1]
    breaker.self_test_untold()
    assert breaker.fail()


def test_a_trial_that_fails_is_told_by_a_self_test_too(breaker, clock):
    fail(breaker)
    clock.pass_s(1.0)
    assert breaker.fail(source="poison", trial=breaker.begin())
    breaker.abandon()
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.self_test_passed()
    assert breaker.state is BreakerState.CLOSED


def test_nobody_else_is_the_trial_while_a_self_test_runs(breaker, clock):
    fail(breaker)
    clock.pass_s(1.0)
    assert breaker.fail(trial=breaker.begin())
    assert not breaker.allows()
    breaker.self_test_untold()
    assert breaker.allows()


def test_failed_requests_and_missed_probes_together_are_a_suspicion(breaker):
    breaker.probe_failed("late")
    breaker.fail()
    breaker.probe_failed("late")
    assert breaker.state is BreakerState.CLOSED, "neither has failed three times"
    assert breaker.fail()


def test_local_replicas_fail_alone_remote_ones_with_their_endpoint():
    assert breaker_key(info("int8")) == "local/tiny-int8"
    assert breaker_key(info("fp32", remote=True)) == breaker_key(info("pruned-fp32", remote=True)) == UPSTREAM


def test_a_refusal_cools_one_replica_down_until_news_of_room(clock):
    book = HealthBook(SETTINGS, clock, lambda *_: None)
    remote = info("fp32", remote=True)
    full = ReplicaSnapshot(remote, available=True, slots=2, running=2)
    book.refused(remote, 8.0)
    clock.pass_s(1.0)
    health = book.of(full)
    assert (health.code, health.waits, health.again_s) == ("cooling-down", True, 7.0)
    old = ReplicaSnapshot(remote, available=True, slots=2, running=0, age_s=3.0)
    assert book.of(old).code == "cooling-down"
    fresh = ReplicaSnapshot(remote, available=True, slots=2, running=0)
    assert book.of(fresh).code == ""
    book.refused(info("int8"), 1e9)
    clock.pass_s(30.0)
    assert book.of(ReplicaSnapshot(info("int8"), available=True, slots=1)).code == ""
