"""Late value, shorter answers, and the budget of attempts, on the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import InvalidRequest
from router.values.request import LINE_PRIORITY, Objective
from router.wire import names
from router.wire.promise import objective_headers, parse_objective

MILLISECONDS = st.integers(1, 10**8).map(lambda n: n / 1000)


def parsed(**lines: str) -> Objective:
    return parse_objective({f"x-overspill-{k.replace('_', '-')}": v for k, v in lines.items()}, Objective())


def test_a_late_value_and_a_permission_are_read() -> None:
    found = parsed(deadline_ms="1500", late_value="500", shorten="allow", defer="allow")
    assert (found.deadline_s, found.late_s, found.shorten, found.defer) == (1.5, 0.5, True, True)
    assert (parsed().late_s, parsed().shorten, parsed().defer) == (None, False, False)
    assert names.DEFER not in dict(objective_headers(found))  # it is asked of one tier alone


@given(deadline_s=MILLISECONDS, late_s=MILLISECONDS, shorten=st.booleans())
def test_they_survive_the_headers(deadline_s: float, late_s: float, shorten: bool) -> None:
    objective = Objective(deadline_s=deadline_s, late_s=late_s, shorten=shorten)
    assert parse_objective(dict(objective_headers(objective)), Objective()) == objective


def test_a_line_is_one_of_many_to_the_next_tier() -> None:
    passed = dict(objective_headers(Objective(priority=LINE_PRIORITY)))
    read = parse_objective(passed, Objective())
    assert read.in_slack
    assert not read.yields


def test_a_late_value_without_a_deadline_is_refused_with_the_remedy() -> None:
    with pytest.raises(InvalidRequest, match="send `x-overspill-deadline-ms` with it") as raised:
        parsed(late_value="500")
    assert raised.value.param == names.LATE_VALUE
    in_body = Objective(deadline_s=2.0)
    assert parse_objective({names.LATE_VALUE: "500"}, in_body).late_s == 0.5, "its deadline is in the body"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (names.LATE_VALUE, "0"),
        (names.LATE_VALUE, "-1"),
        (names.LATE_VALUE, "soon"),
        (names.LATE_VALUE, "1e12"),
        (names.SHORTEN, "yes"),
        (names.DEFER, "yes"),
        (names.DEFER, "allow, deny"),
        (names.SHORTEN, ""),
        (names.SHORTEN, "allow, deny"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_objective({name: value, names.DEADLINE: "1000"}, Objective())
    assert raised.value.param == name
    assert name in raised.value.message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("x-overspill-late-value-ms", names.LATE_VALUE),
        ("x-overspil-late-value", names.LATE_VALUE),
        ("x-overspill-shortened", names.SHORTEN),
        ("x-overspill-defered", names.DEFER),
        ("overspill_shorten", names.SHORTEN),
        ("x-overspill-attempts", names.ATTEMPTS_LEFT),
    ],
)
def test_a_name_that_is_nearly_one_of_them_is_refused(name: str, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f"did you mean `{meant}`"):
        parse_objective({name: "1"}, Objective())


def test_a_late_value_in_a_query_is_no_header() -> None:
    with pytest.raises(InvalidRequest, match="x-overspill-late-value"):
        names.refuse_query(b"late_value=500")


@pytest.mark.parametrize("name", ["x-shorten", "x-attempts-left", "x-retry-attempts", "x-late"])
def test_words_of_others_pass(name: str) -> None:
    assert parse_objective({name: "1"}, Objective()) == Objective()
