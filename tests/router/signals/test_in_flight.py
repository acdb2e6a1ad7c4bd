"""What was sent and has not ended: the sums that decisions read, kept as attempts begin, open, go on and end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.signals.in_flight import Attempt, InFlight
from router.values.choice import Choice
from router.values.prediction import NOTHING_IN_FLIGHT, Awaited, Prediction, TtftFeatures
from router.values.request import Objective
from router.values.situation import Candidate
from tests.support.router_fakes import info

REPLICAS = ("here", "there")
SOON = Prediction(0.0, 0.1, 0.2, 0.01, 0.02, 0.3, 0.4, free=True)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "open", "chunk", "end"]), st.integers(0, 30), st.integers(0, 300), st.booleans()
    ),
    max_size=60,
)


def sent_to(name: str, prompt_tokens: int = 100, expected_tokens: int = 50, *, held_up: bool = False) -> Attempt:
    there = replace(info(), replica_id=name, endpoint=f"host of {name}")
    choice = Choice(Candidate(there, SOON), "test", degraded=False)
    replica: Any = None
    work = TtftFeatures(100.0, 0.0)
    return Attempt(
        replica, choice, 0.0, work, prompt_tokens=prompt_tokens, expected_tokens=expected_tokens, held_up=held_up
    )


@given(EVENTS)
def test_the_sums_are_those_of_the_attempts_that_run(events: list[tuple[str, int, int, bool]]) -> None:
    in_flight, running = InFlight(), list[Attempt]()
    for event, at, tokens, flag in events:
        if event == "begin":
            attempt = sent_to(REPLICAS[flag], tokens, tokens + 1)
            in_flight.begin(attempt)
            running.append(attempt)
        elif running:
            attempt = running[at % len(running)]
            if event == "open":
                attempt.opens()
            elif event == "end":
                running.remove(attempt)
                in_flight.end(attempt)
            else:
                if attempt.first_at_s is None and flag:  # else tokens without any text yet
                    attempt.first_at_s = 1.0
                attempt.came(tokens, 1.0)
        for name in REPLICAS:
            there = [attempt for attempt in running if attempt.info.replica_id == name]
            unopened = [attempt for attempt in there if not attempt.opened]
            load = in_flight.at(name)
            assert load.requests == len(load.left_tokens) == in_flight.count(name) == len(there)
            assert load.prefill_tokens == sum(a.prompt_tokens for a in there if a.first_at_s is None)
            assert in_flight.without_text(name) == sum(a.first_at_s is None for a in there)
            assert load.unopened == in_flight.unopened_at(f"host of {name}") == len(unopened)
            assert load.unopened_prefill_tokens == sum(a.prompt_tokens for a in unopened)
            assert load.unopened_decode_tokens == sum(a.expected_tokens for a in unopened)
            left = [max(a.expected_tokens - a.tokens, a.tokens // 4, 1) for a in there]
            assert list(load.left_tokens) == sorted(left)
        assert len(in_flight) == len(running)


def test_a_load_is_the_same_object_until_something_changes() -> None:
    in_flight, attempt, beside = InFlight(), sent_to("here"), sent_to("there")
    assert in_flight.at("here") is NOTHING_IN_FLIGHT
    in_flight.begin(attempt)
    in_flight.begin(beside)
    seen = in_flight.at("here")
    assert in_flight.at("here") is seen
    beside.came(3, 1.0)
    assert in_flight.at("here") is seen
    attempt.came(3, 1.0)
    assert in_flight.at("here") is not seen
    in_flight.end(attempt)
    assert in_flight.at("here") is NOTHING_IN_FLIGHT


def test_what_an_attempt_left_behind_tells_nobody() -> None:
    """A chunk may be read after its attempt was ended."""
    in_flight, attempt = InFlight(), sent_to("here")
    in_flight.begin(attempt)
    in_flight.end(attempt)
    attempt.came(3, 1.0)
    assert in_flight.at("here") is NOTHING_IN_FLIGHT


def test_what_is_held_up_is_no_load() -> None:
    in_flight, line = InFlight(), sent_to("here", held_up=True)
    in_flight.begin(line)
    assert in_flight.at("here") is NOTHING_IN_FLIGHT
    in_flight.end(line)


def test_what_is_left_is_in_order_and_read_like_any_sequence() -> None:
    in_flight = InFlight()
    for expected in (30, 10, 20):
        in_flight.begin(sent_to("here", expected_tokens=expected))
    left = in_flight.at("here").left_tokens
    assert (left[0], left[-1], left[1:], list(left)) == (10, 30, [20, 30], [10, 20, 30])
    with pytest.raises(IndexError):
        left[3]


def test_of_a_request_that_takes_turns_a_batch_alone_goes_before_newcomers() -> None:
    attempt, in_flight = sent_to("here", 500_000), InFlight()
    attempt.info = replace(attempt.info, turn_tokens=1000)
    in_flight.begin(attempt)
    in_flight.begin(sent_to("here", 300))
    load = in_flight.at("here")
    assert (load.prefill_tokens, load.unopened_prefill_tokens) == (1300, 1300)


def told_prompt(at_s: float, *, remote: bool = False, priority: int = 0) -> Attempt:
    attempt = sent_to("here")
    attempt.sent_at_s, attempt.work = at_s, TtftFeatures(100.0, 0.0, told=SOON)
    attempt.info, attempt.objective = replace(attempt.info, remote=remote), Objective(priority=priority)
    return attempt


def test_the_oldest_first_text_is_awaited_until_one_sent_later_overtakes_it() -> None:
    in_flight, first, second, third = InFlight(), told_prompt(1.0), told_prompt(2.0), told_prompt(3.0)
    for attempt in (first, second, third):
        in_flight.begin(attempt)
    assert in_flight.at("here").awaited == Awaited(1.0, 0.2)
    second.first_at_s = 4.0
    second.came(1, 4.0)
    assert in_flight.at("here").awaited == Awaited(3.0, 0.2), "the first is late for reasons of its own"
    in_flight.end(second)
    assert in_flight.at("here").awaited == Awaited(3.0, 0.2)
    in_flight.end(third)
    assert in_flight.at("here").awaited is None


def test_servers_and_what_may_be_shed_tell_nothing_by_being_late() -> None:
    in_flight = InFlight()
    for attempt in (told_prompt(1.0, remote=True), told_prompt(1.0, priority=-1)):
        in_flight.begin(attempt)
    assert in_flight.at("here").awaited is None


def test_of_a_server_one_attempt_alone_is_looked_at_however_many_wait_for_their_first_text() -> None:
    in_flight = InFlight()
    for attempt in (told_prompt(1.0, remote=True), told_prompt(2.0)):
        in_flight.begin(attempt)
    assert in_flight.at("here").awaited is None, "all of one replica are as remote as the first"


def test_what_is_awaited_is_overdue_beyond_its_upper_figure() -> None:
    awaited = Awaited(sent_at_s=10.0, high_s=2.0)
    assert [awaited.overdue(now_s) for now_s in (10.0, 11.9, 12.0, 13.0, 20.0)] == [1.0, 1.0, 1.0, 1.5, 5.0]
