"""Dates under a schema are days of the calendar, whatever is drawn."""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.text.json_dates import DATE, on_the_calendar
from tests.models.text.test_grammar import GRAMMARS, of_schema, say


@given(st.dates())
def test_every_day_is_allowed(day: dt.date) -> None:
    assert re.fullmatch(DATE, day.isoformat())


@given(st.integers(0, 9999), st.integers(0, 13), st.integers(0, 32))
def test_what_is_no_day_is_not(year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    try:
        dt.date.fromisoformat(text)
    except ValueError:
        assert not re.fullmatch(DATE, text)
    else:
        assert re.fullmatch(DATE, text)


@given(seed=st.integers(0, 10_000), strict=st.booleans())
def test_a_model_without_sense_writes_days_and_times(seed: int, strict: bool) -> None:
    day, moment = {"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}
    schema = {"type": "object", "properties": {"day": day, "moment": moment}, "required": ["day", "moment"]}
    said = json.loads(say(GRAMMARS.matcher(of_schema(schema, strict=strict)), seed))
    dt.date.fromisoformat(said["day"])
    dt.datetime.fromisoformat(re.sub(r"\.\d+", "", said["moment"]).replace("Z", "+00:00"))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "string"},
        {"type": "string", "format": "uuid"},
        {"type": "string", "format": "date", "pattern": "^2"},
        {"const": "2020-02-30", "format": "date"},
        {"properties": {"format": {"type": "string"}}},
        {"format": 3},
    ],
)
def test_what_says_nothing_of_dates_or_more_than_that_stays(schema: Any) -> None:
    assert on_the_calendar(schema) is schema
