"""Polls are spread over a fleet, come sooner where a credit is waited for, and later where the upstream is lost."""

from __future__ import annotations

import random
import statistics

from router.signals.credit_account import CreditAccount
from router.upstream.servers.poll_schedule import PollSchedule
from router.values.credits import Grant
from tests.support.clocks import VirtualClock


def schedule(seed: int = 1, idle_interval_s: float = 0.0) -> tuple[PollSchedule, CreditAccount, VirtualClock]:
    clock, draw = VirtualClock(), random.Random(seed)
    account = CreditAccount(clock, draw)
    return PollSchedule(1.0, clock, account, draw, idle_interval_s), account, clock


def test_the_usual_pause_is_the_interval_give_or_take_a_tenth() -> None:
    polls, _, _ = schedule()
    pauses = [polls.pause_s(reachable=True) for _ in range(500)]
    assert 0.9 <= min(pauses) < 0.93
    assert 1.07 < max(pauses) <= 1.1


def test_a_fleet_that_lost_its_link_finds_it_again_spread_out() -> None:
    first_polls = []
    for seed in range(300):
        polls, _, clock = schedule(seed)
        lost_at_s = clock.now_s()
        while clock.now_s() < lost_at_s + 90.0:  # when the link is back
            clock.pass_s(polls.pause_s(reachable=False))
        first_polls.append(clock.now_s() - lost_at_s - 90.0)
    assert max(first_polls) <= 15.0
    assert statistics.stdev(first_polls) > 2.0
    assert max(sum(second <= poll < second + 1 for poll in first_polls) for second in range(15)) < 75


def test_a_short_loss_is_found_out_as_fast_as_ever() -> None:
    polls, _, clock = schedule()
    for _ in range(5):
        pause_s = polls.pause_s(reachable=False)
        assert 0.5 <= pause_s <= 1.5
        clock.pass_s(pause_s)
    polls.pause_s(reachable=True)
    clock.pass_s(1000.0)
    assert polls.pause_s(reachable=False) <= 1.5, "counted from the new loss"


def test_a_refused_connection_is_confirmed_soon() -> None:
    polls, _, _ = schedule()
    assert polls.pause_s(reachable=True, confirming=True) == polls.soonest_s == 0.1


def test_who_waits_for_a_credit_asks_when_it_was_told_to() -> None:
    polls, account, clock = schedule()
    account.told(Grant(again_s=0.2), clock.now_s(), wanted=1)
    assert 0.18 <= polls.pause_s(reachable=True) <= 0.22
    assert not polls.wants_poll(), "it has its turn"
    account.told(Grant(again_s=20.0), clock.now_s(), wanted=1)
    assert 18 <= polls.pause_s(reachable=True) <= 22
    account.told(Grant(again_s=0.0), clock.now_s(), wanted=1)
    assert polls.pause_s(reachable=True) == polls.soonest_s


def test_who_wants_nothing_polls_as_seldom_as_a_large_fleet_must_and_asks_when_it_does() -> None:
    polls, account, clock = schedule()
    assert not polls.wants_poll(), "no limit is known"
    account.told(Grant(again_s=20.0), clock.now_s())
    assert polls.pause_s(reachable=True) >= 18
    assert polls.pause_s(reachable=True, busy=True) <= 1.1, "the loss of what runs there is found out as ever"
    assert polls.wants_poll()
    account.told(Grant(credits=1, for_s=2.0), clock.now_s())
    assert not polls.wants_poll()


def pauses_of(polls: PollSchedule, clock: VirtualClock, seconds: float) -> list[float]:
    pauses = []
    until_s = clock.now_s() + seconds
    while clock.now_s() < until_s:
        pauses.append(polls.pause_s(reachable=True))
        clock.pass_s(pauses[-1])
    return pauses


def test_who_is_not_used_for_a_minute_is_polled_as_seldom_as_was_asked() -> None:
    polls, _, clock = schedule(idle_interval_s=30.0)
    first = pauses_of(polls, clock, 59.0)
    assert max(first) <= 1.1
    assert not polls.resting
    clock.pass_s(2.0)
    later = pauses_of(polls, clock, 600.0)
    assert min(later) >= 27.0
    assert polls.resting
    assert polls.wants_poll(), "a request that waits brings the next one forward"
    assert polls.pause_s(reachable=True, busy=True) <= 1.1
    assert not polls.resting
    assert max(pauses_of(polls, clock, 59.0)) <= 1.1, "used a moment ago"


def test_rest_is_over_while_a_credit_is_waited_for_or_a_probe_is_confirmed() -> None:
    polls, account, clock = schedule(idle_interval_s=30.0)
    clock.pass_s(100.0)
    assert polls.pause_s(reachable=True) >= 27.0
    account.told(Grant(again_s=0.2), clock.now_s(), wanted=1)
    assert polls.pause_s(reachable=True) <= 0.22
    assert polls.pause_s(reachable=True, confirming=True) == polls.soonest_s
    assert not polls.resting


def test_a_lost_upstream_is_polled_as_ever_and_for_a_minute_after_it_came_back() -> None:
    polls, _, clock = schedule(idle_interval_s=30.0)
    clock.pass_s(100.0)
    assert polls.pause_s(reachable=False) <= 1.5
    assert polls.pause_s(reachable=True) <= 1.1


def test_an_idle_interval_below_the_usual_one_changes_nothing() -> None:
    polls, account, clock = schedule(idle_interval_s=0.5)
    clock.pass_s(100.0)
    assert polls.pause_s(reachable=True) >= 0.9
    assert not polls.resting
    account.told(Grant(again_s=20.0), clock.now_s())
    assert polls.pause_s(reachable=True) >= 18.0, "as a large fleet must"
