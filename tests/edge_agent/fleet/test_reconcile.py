"""The pure difference: monotonic versions, idempotence, and no endless retries; and the back-off."""

from __future__ import annotations

import datetime as dt
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.fleet.reconcile import (
    MAX_ATTEMPTS,
    Action,
    Apply,
    Drop,
    Knowledge,
    Refuse,
    Report,
    applied,
    begin,
    reconcile,
    refused,
    restarted,
)
from edge_agent.mqtt.backoff import Backoff
from edge_agent.mqtt.connection import End
from router.fleetwire.documents import MAX_VERSION, DesiredConfig, digest_of

ISSUED = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)


def want(version: int, content: int = 0) -> DesiredConfig:
    return DesiredConfig(version=version, issued_at=ISSUED, router={"max_queue": content + 1})


documents = st.builds(want, st.integers(1, 6), st.integers(0, 2))


def carry_out(known: Knowledge, action: Action, good: bool) -> Knowledge:
    if isinstance(action, Apply):
        known = begin(known, action)
        refusal = Refuse(action.desired.version, action.trial.digest, "no")
        return applied(known, action.desired) if good else refused(known, refusal)
    return refused(known, action) if isinstance(action, Refuse) else known


@given(st.lists(st.tuples(documents, st.booleans())))
def test_versions_only_grow_and_every_document_is_settled_once(history: list[tuple[DesiredConfig, bool]]) -> None:
    known = Knowledge()
    highest = 0
    for desired, good in history:
        action = reconcile(known, desired)
        if isinstance(action, Apply):
            assert desired.version > highest
            highest = desired.version
        known = carry_out(known, action, good)
        assert not isinstance(reconcile(known, desired), Apply), "the same document again must change nothing"
        assert known.applied is None or known.applied.version <= highest
        assert known.handled is None or known.handled.version == highest
        assert known.trial is None


@given(st.lists(st.tuples(documents, st.booleans()), min_size=1), documents)
def test_reconcile_is_pure(history: list[tuple[DesiredConfig, bool]], probe: DesiredConfig) -> None:
    known = Knowledge()
    for desired, good in history:
        known = carry_out(known, reconcile(known, desired), good)
    assert reconcile(known, probe) == reconcile(known, probe)


def test_stale_and_conflicting_documents_are_dropped_by_name() -> None:
    known = applied(Knowledge(), want(5))
    stale = reconcile(known, want(4))
    assert isinstance(stale, Drop)
    assert stale.stale
    assert "version 4 is stale: version 5" in stale.reason
    conflict = reconcile(known, want(5, content=1))
    assert isinstance(conflict, Drop)
    assert "conflict: version 5" in conflict.reason
    assert reconcile(known, want(5)) == Report()


@pytest.mark.parametrize("known", [Knowledge(), applied(Knowledge(), want(5))], ids=["first", "later"])
def test_no_single_document_uses_up_the_versions(known: Knowledge) -> None:
    action = reconcile(known, want(MAX_VERSION))
    assert isinstance(action, Drop)
    assert not action.stale
    assert isinstance(reconcile(carry_out(known, action, good=True), want(6)), Apply), "the next one is as good as ever"


def test_versions_may_be_seconds_and_a_device_that_forgot_everything_takes_part_again() -> None:
    seconds = 1_900_000_000
    assert isinstance(reconcile(applied(Knowledge(), want(1)), want(seconds)), Apply)
    assert isinstance(reconcile(Knowledge(), want(seconds * 1_000)), Apply)


def test_a_refused_document_gets_one_more_try_after_a_restart() -> None:
    known = refused(Knowledge(), Refuse(2, digest_of(want(2)), "no such model"))
    assert reconcile(known, want(2)) == Report()
    assert isinstance(reconcile(restarted(known), want(2)), Apply)


def test_a_document_that_kills_the_agent_is_given_up() -> None:
    known = Knowledge()
    for _ in range(MAX_ATTEMPTS):
        action = reconcile(known, want(1))
        assert isinstance(action, Apply)
        known = restarted(begin(known, action))  # the agent ended in the middle
    action = reconcile(known, want(1))
    assert isinstance(action, Refuse)
    assert "ended 2 times" in action.reason
    assert isinstance(reconcile(refused(known, action), want(2)), Apply)


def backoff() -> Backoff:
    return Backoff(minimum_s=1, maximum_s=60, takeover_min_s=30, rng=random.Random(7))


def test_back_off_doubles_with_jitter_up_to_its_bound_and_forgets_after_a_stable_connection() -> None:
    delays = backoff()
    lost = End("unreachable", "")
    waits = [delays.next_s(lost, 0.0) for _ in range(12)]
    for exponent, wait in enumerate(waits):
        assert 0.5 * min(60, 2**exponent) <= wait <= min(60, 2**exponent)
    assert delays.next_s(lost, 3600.0) <= 1


@pytest.mark.parametrize("lasted_s", [0.0, 30.0, 3600.0])
def test_two_agents_of_one_name_meet_ever_less_often(lasted_s: float) -> None:
    delays = backoff()
    waits = [delays.next_s(End("taken_over", ""), lasted_s) for _ in range(12)]
    assert waits[0] >= 22.5
    assert waits[-1] >= 2700


def test_being_thrown_out_once_is_no_reason_to_stay_away_but_twice_in_a_row_is() -> None:
    delays = backoff()
    kicked = End("kicked", "")
    assert delays.next_s(kicked, 3000.0) <= 1
    assert delays.next_s(kicked, 3000.0) <= 1, "a long connection in between"
    waits = [delays.next_s(kicked, 30.0 * 2**n) for n in range(6)]
    assert waits[0] >= 22.5
    assert waits[-1] >= 600
