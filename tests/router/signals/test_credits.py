"""Credits, issued and spent: never more out than room, nobody starves, and no loss or jump does lasting harm."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.signals.credit_account import CreditAccount
from router.signals.credits import CreditIssuer
from router.values.credits import NOTHING_WANTED, Asker, Grant, Room, Want
from router.values.settings import CreditSettings
from tests.support.clocks import VirtualClock

FULL = Room(slots=16, free=0, waiting=0)
EMPTY = Room(slots=16, free=16, waiting=0)


def device(name: object, key: str = "key", *, may_hurry: bool = False) -> Asker:
    return Asker(key, str(name), may_hurry)


def issuer(clock: VirtualClock | None = None, **changes: Any) -> CreditIssuer:
    return CreditIssuer(CreditSettings(**({"reserve": 0.0} | changes)), clock or VirtualClock())


def account(clock: VirtualClock) -> CreditAccount:
    return CreditAccount(clock, random.Random(1))


def test_a_free_tier_gives_what_is_wanted() -> None:
    grant = issuer().ask(device(1), Want(3), EMPTY)
    assert (grant.credits, grant.for_s, grant.wait_s) == (3, 2.0, 0.0)


def test_room_is_handed_out_once() -> None:
    clock = VirtualClock()
    pool = issuer(clock)
    given = [pool.ask(device(index), Want(1), EMPTY).credits for index in range(100)]
    assert sum(given) == pool.outstanding == 20, "16 free slots, and a quarter of a second of 16 requests a second"
    assert given == [1] * 20 + [0] * 80
    later = [pool.ask(device(index), Want(1), EMPTY) for index in range(20, 100)]
    assert all(grant.credits == 0 and 0.1 <= grant.again_s <= 5.0 for grant in later)
    assert [grant.wait_s for grant in later] == sorted(grant.wait_s for grant in later)


def test_unused_credits_make_room_when_they_are_void() -> None:
    clock = VirtualClock()
    pool = issuer(clock)
    for index in range(20):
        pool.ask(device(index), Want(1), EMPTY)
    assert pool.ask(device("late"), Want(1), EMPTY).credits == 0
    clock.pass_s(2.0)
    assert pool.ask(device("late"), Want(1), EMPTY).credits == 1
    assert pool.counts.expired == 20


def test_who_came_first_is_owed_its_credit() -> None:
    clock = VirtualClock()
    pool = issuer(clock)
    assert [pool.ask(device(index), Want(1), FULL).credits for index in range(7)] == [1, 1, 1, 1, 0, 0, 0]
    clock.pass_s(2.0)
    assert pool.ask(device(6), Want(1), FULL).credits == 0, "two stand ahead; half of four credits are there"
    assert pool.ask(device(4), Want(1), FULL).credits == 1
    assert pool.ask(device(6), Want(1), FULL).credits == 0
    assert pool.ask(device(5), Want(1), FULL).credits == 1


def test_who_does_not_come_back_is_passed_over() -> None:
    clock = VirtualClock()
    pool = issuer(clock)
    for index in range(50):
        pool.ask(device(index), Want(1), Room(16, 0, 4))
    assert pool.in_line == 50
    clock.pass_s(20.0)
    assert pool.ask(device("new"), Want(1), Room(16, 1, 0)).credits == 1
    assert pool.in_line == 0


def test_an_idle_fleet_holds_credits_before_it_wants_them() -> None:
    pool = issuer()
    assert pool.ask(device(1), NOTHING_WANTED, EMPTY).credits == 10
    assert pool.ask(device(1), NOTHING_WANTED, EMPTY).credits == 0, "it holds them"
    assert pool.ask(device(2), NOTHING_WANTED, EMPTY).credits > 0
    assert pool.ask(device(3), Want(4), EMPTY).credits == 4, "who wants some finds the other half"


def test_nothing_is_given_unasked_while_others_wait() -> None:
    pool = issuer()
    for index in range(30):
        pool.ask(device(index), Want(1), FULL)
    assert pool.ask(device("idle"), NOTHING_WANTED, EMPTY).credits == 0


def test_who_has_priority_goes_first_if_its_key_may_claim_it() -> None:
    pool = issuer()
    for index in range(10):
        pool.ask(device(index), Want(1), FULL)
    assert pool.ask(device("liar"), Want(1, urgent=1), Room(16, 6, 0)).credits == 0, "six ordinary ones stand ahead"
    grant = pool.ask(device("urgent", may_hurry=True), Want(2, urgent=1), Room(16, 6, 0))
    assert (grant.credits, grant.again_s) == (1, 0.1), "its other request still waits"


def test_the_reserve_is_kept_while_somebody_wants_it() -> None:
    clock = VirtualClock()
    pool = issuer(clock, reserve=0.25)
    room = Room(slots=16, free=4, waiting=0)

    def ordinary() -> int:
        clock.pass_s(5.0)  # what was given before is void
        given = pool.ask(device("many"), Want(100), room).credits
        pool.ask(device("many"), NOTHING_WANTED, room)
        return given

    assert ordinary() == 8
    clock.pass_s(5.0)
    pool.ask(device("urgent", may_hurry=True), Want(1, urgent=1), room)
    assert ordinary() == 6, "the reserve is never more than half of the backlog"
    clock.pass_s(60.0)
    assert ordinary() == 8


def test_a_queue_that_waits_too_long_gets_less() -> None:
    def given(wait_s: float) -> int:
        pool = issuer()
        for _ in range(300):
            pool.waited(wait_s)
        return pool.ask(device(1), Want(1000), Room(16, 16, 0)).credits

    assert given(0.0) == given(0.2) == 20
    assert 9 <= given(0.5) <= 11
    assert given(500.0) == 1, "a tier that stands still would never learn that it is fast again"


def test_the_rate_is_learnt() -> None:
    pool = issuer()
    for _ in range(100):
        pool.served(4.0)
    assert pool.ask(device(1), Want(100), FULL).credits == 1, "16 slots of 4 s are 4 requests a second"


def test_a_tier_without_slots_gives_nothing() -> None:
    grant = issuer().ask(device(1), Want(1), Room(0, 0, 0))
    assert (grant.credits, grant.again_s) == (0, 5.0)


def test_a_large_fleet_polls_less_often() -> None:
    pool = issuer(asks_per_s=10)
    for index in range(100):
        grant = pool.ask(device(index), NOTHING_WANTED, FULL)
    assert grant.again_s == 10.0


def test_used_and_given_back() -> None:
    pool = issuer()
    pool.ask(device(1), Want(1), EMPTY)
    batch = pool.used(device(1))
    assert batch is not None
    assert pool.outstanding == 0
    pool.returned(device(1), batch)
    assert pool.outstanding == 1
    assert pool.used(device(1)) is batch
    assert pool.used(device(1)) is None
    assert (pool.counts.spent, pool.counts.returned, pool.counts.unbacked) == (2, 1, 1)


def test_a_report_that_was_lost_costs_neither_the_credit_nor_the_place() -> None:
    clock = VirtualClock()
    pool = issuer(clock)
    busy = Room(16, 0, 3)
    assert pool.ask(device("unlucky"), Want(1), busy).credits == 1, "and that never arrived"
    for index in range(10):
        assert pool.ask(device(index), Want(1), busy).credits == 0
    grant = pool.ask(device("unlucky"), Want(1), busy)
    assert grant.credits == 0
    clock.pass_s(grant.again_s)
    one_left = Room(16, 0, 1)
    pool.ask(device("unlucky"), Want(1), Room(16, 0, 9))
    assert pool.ask(device(0), Want(1), one_left).credits == 0
    assert pool.ask(device("unlucky"), Want(1), one_left).credits == 1, "before those that came later"


def test_memory_is_bounded() -> None:
    clock = VirtualClock()
    pool = issuer(clock, max_instances=100)
    for index in range(10_000):
        pool.ask(device(index), Want(1), FULL)
    assert pool.instances == 100
    assert pool.in_line <= 100
    clock.pass_s(1000.0)
    pool.ask(device("one"), Want(1), FULL)
    assert (pool.instances, pool.in_line) == (1, 0)
    assert pool.outstanding == 1


# ── the side that spends ────────────────────────────────────────────────────────────────────────────────────────────


def test_an_upstream_that_issues_none_sets_no_limit() -> None:
    mine = account(VirtualClock())
    assert (mine.limited, mine.available(), mine.spend()) == (False, None, None)
    mine.told(Grant(credits=0), 1000.0)
    assert (mine.limited, mine.available()) == (True, 0)
    mine.told(None, 1000.0)
    assert mine.available() is None


def test_credits_are_spent_and_void() -> None:
    clock = VirtualClock()
    mine = account(clock)
    mine.told(Grant(credits=2, for_s=2.0), clock.now_s() - 0.5)
    assert mine.available() == 2
    batch = mine.spend()
    assert batch is not None
    assert mine.available() == 1
    mine.give_back(batch)
    assert mine.available() == 2
    mine.spend()
    clock.pass_s(1.5)
    assert mine.available() == 0, "they count from when the report was asked for"
    mine.give_back(batch)
    assert mine.available() == 0


def test_a_device_that_hears_nothing_tries_now_and_then() -> None:
    clock = VirtualClock()
    mine = account(clock)
    mine.told(Grant(), clock.now_s())
    tried = 0
    for _ in range(600):
        clock.pass_s(1.0)
        if mine.available():
            mine.spend()
            tried += 1
    assert 10 <= tried <= 40


def test_a_device_that_was_told_to_ask_seldom_does_not_take_that_for_silence() -> None:
    clock = VirtualClock()
    mine = account(clock)
    mine.told(Grant(again_s=600.0), clock.now_s())
    clock.pass_s(600.0)
    assert mine.available() == 0
    clock.pass_s(60.0)
    assert mine.available() == 1


def test_when_to_ask_and_what_to_expect() -> None:
    clock = VirtualClock()
    mine = account(clock)
    mine.told(Grant(again_s=3.0, wait_s=10.0), clock.now_s())
    clock.pass_s(1.0)
    assert (mine.ask_in_s(), mine.next_in_s()) == (2.0, 9.0)
    clock.pass_s(100.0)
    assert (mine.ask_in_s(), mine.next_in_s()) == (0.0, 0.0)


@given(
    st.builds(
        Grant,
        credits=st.integers(-(10**12), 10**12),
        for_s=st.floats(-1e300, 1e300),
        again_s=st.floats(-1e300, 1e300),
        wait_s=st.floats(-1e300, 1e300),
    )
)
def test_no_grant_can_do_harm(grant: Grant) -> None:
    clock = VirtualClock()
    mine = account(clock)
    mine.told(grant, clock.now_s())
    assert 0 <= mine.available() <= 10_000
    assert 0 <= mine.ask_in_s() <= 3600
    assert 0 <= mine.next_in_s() <= 3600


@pytest.mark.parametrize("jump_s", [-3600.0, -1.0, 3600.0])
def test_a_jump_of_either_clock_harms_nothing(jump_s: float) -> None:
    here, there = VirtualClock(), VirtualClock()
    pool, mine = issuer(there), account(here)
    mine.told(pool.ask(device(1), Want(2), EMPTY), here.now_s())
    here.pass_s(jump_s)
    there.pass_s(jump_s)
    assert mine.available() in {0, 1, 2}, "1: it has heard nothing for an hour, and tries"
    assert mine.ask_in_s() == 0
    for _ in range(3):
        here.pass_s(2.0)
        there.pass_s(2.0)
        asked_at_s = here.now_s()
        assert pool.outstanding <= 20
        mine.told(pool.ask(device(1), Want(2), EMPTY), asked_at_s)
    assert mine.available() == 2


# ── both, over a network that loses reports ─────────────────────────────────────────────────────────────────────────


class Fleet(RuleBasedStateMachine):
    """Devices with clocks of their own ask, lose reports, send, are refused and vanish, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.there = VirtualClock()
        self.pool = issuer(self.there, reserve=0.2)
        self.here = [VirtualClock() for _ in range(4)]
        self.accounts = [account(clock) for clock in self.here]
        self.names = [device(index, f"k{index % 2}", may_hurry=index == 3) for index in range(4)]
        self.free, self.waiting = 8, 0
        self.jumped = False

    def room(self) -> Room:
        return Room(8, self.free, self.waiting)

    @rule(index=st.integers(0, 3), waiting=st.integers(0, 5), urgent=st.integers(0, 5), lost=st.booleans())
    def ask(self, index: int, waiting: int, urgent: int, lost: bool) -> None:
        before = self.pool.outstanding
        asked_at_s = self.here[index].now_s()
        grant = self.pool.ask(self.names[index], Want(waiting, urgent), self.room())
        assert grant.credits >= 0
        assert self.pool.outstanding <= max(before, self.free + 2), "free slots and a quarter of a second of them"
        if not lost:
            self.accounts[index].told(grant, asked_at_s)

    @rule(index=st.integers(0, 3), refused=st.booleans())
    def send(self, index: int, refused: bool) -> None:
        mine = self.accounts[index]
        batch = mine.spend()
        if batch is None:
            return
        taken = self.pool.used(self.names[index])
        if refused:
            mine.give_back(batch)
            if taken is not None:
                self.pool.returned(self.names[index], taken)

    @rule(passed_s=st.floats(0.0, 3.0))
    def wait(self, passed_s: float) -> None:
        for clock in (self.there, *self.here):
            clock.pass_s(passed_s)

    @rule(index=st.integers(0, 4), jump_s=st.sampled_from([-100.0, -0.5, 50.0]))
    def jump(self, index: int, jump_s: float) -> None:
        self.jumped = True
        (self.there, *self.here)[index].pass_s(jump_s)

    @rule(free=st.integers(0, 8), waiting=st.integers(0, 20))
    def change(self, free: int, waiting: int) -> None:
        self.free, self.waiting = free, waiting

    @invariant()
    def books_balance(self) -> None:
        counts = self.pool.counts
        assert self.pool.outstanding == counts.issued + counts.returned - counts.spent - counts.expired >= 0

    @invariant()
    def nobody_holds_what_is_not_out(self) -> None:
        if not self.jumped:
            assert sum(mine.held for mine in self.accounts) <= self.pool.outstanding

    def teardown(self) -> None:
        """Whatever happened: everybody who asks gets one within bounded time."""
        self.free, self.waiting = 2, 0
        served: set[int] = set()
        for _ in range(400):
            for clock in (self.there, *self.here):
                clock.pass_s(0.1)
            for index, mine in enumerate(self.accounts):
                mine.told(self.pool.ask(self.names[index], Want(1), self.room()), self.here[index].now_s())
                if mine.available() and mine.spend() is not None:
                    self.pool.used(self.names[index])
                    served.add(index)
        assert served == {0, 1, 2, 3}


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@settings(max_examples=8, deadline=None)
@given(st.integers(2, 8), st.integers(10, 30), st.integers(1, 4), st.floats(0.0, 0.3), st.integers(0, 99))
def test_nobody_starves(slots: int, devices: int, keys: int, loss: float, seed: int) -> None:
    """Everybody wants a request at all times; whoever asks when told to is served within a few rounds of all."""
    clock, draw = VirtualClock(), random.Random(seed)
    pool = issuer(clock)
    running: list[float] = []
    due = {device(index, f"k{index % keys}"): clock.now_s() for index in range(devices)}
    served_at_s = dict.fromkeys(due, clock.now_s())
    longest_s = 0.0
    until_s = clock.now_s() + 20 * devices / slots
    while clock.now_s() < until_s:
        running = [ends_s for ends_s in running if ends_s > clock.now_s()]
        for asker in sorted(due, key=lambda asker: due[asker]):
            if due[asker] > clock.now_s():
                continue
            grant = pool.ask(asker, Want(1), Room(slots, max(0, slots - len(running)), max(0, len(running) - slots)))
            due[asker] = clock.now_s() + max(0.1, grant.again_s)
            if grant.credits and draw.random() >= loss:
                pool.used(asker)
                pool.served(1.0)
                running.append(max([clock.now_s(), *sorted(running)[: -slots or None][:1]]) + 1.0)
                longest_s = max(longest_s, clock.now_s() - served_at_s[asker])
                served_at_s[asker] = clock.now_s()
                due[asker] = clock.now_s() + 0.1
        clock.pass_s(0.1)
    longest_s = max(longest_s, *(clock.now_s() - at_s for at_s in served_at_s.values()))
    assert longest_s <= 8 * devices / slots + 20
