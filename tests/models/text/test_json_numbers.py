"""Numbers under a schema: whatever its grammar lets through keeps its bounds for those who read it as a double too."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from models.text.grammar import Grammars
from models.text.json_numbers import as_doubles
from models.text.tokenizer import Tokenizer
from router.base.errors import InvalidRequest
from router.values.constraint import Constraint, ConstraintKind
from tests.support import tiny_tokenizer

EOS = 2
TOKENIZER = Tokenizer(tiny_tokenizer.backend(), eos_ids=[EOS], bos_id=None, adds_bos=False)
GRAMMARS = Grammars(lambda: TOKENIZER)


def lets_through(schema: dict[str, Any], text: str) -> bool:
    """Whether a whole answer may be `text`. Raises `InvalidRequest` where the schema is not served at all."""
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    matcher = GRAMMARS.matcher(constraint)
    return matcher.advance_text(text) and (matcher.complete or matcher.allows(EOS))


def valid(schema: dict[str, Any], text: str) -> bool:
    """Whether validators take it: one that reads whole numbers as they are, and one that reads all as doubles."""
    checker = jsonschema.Draft202012Validator(schema)
    bounds = jsonschema.Draft202012Validator(json.loads(json.dumps(schema), parse_int=float))
    return bool(checker.is_valid(json.loads(text)) and bounds.is_valid(json.loads(text, parse_int=float)))


BELOW = {"type": "number", "minimum": -25, "exclusiveMaximum": -15}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        (BELOW, ["-15.1", "-15.0000000001", "-20", "-20.50", "-24.9", "-25"], ["-15.0000000000000005", "-15", "-14.9"]),
        ({"type": "number", "exclusiveMaximum": 25}, ["24.9", "24.99", "0", "-3.5", "24.9999999999"], ["25", "25.0"]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.0000000000000001", "1", "7.5"], ["0", "-1", f"0.{'0' * 400}1"]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-9}, ["0.0000000000000001"], ["0", "1"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5", "0.05"], ["0", "0.0", "0.6"]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.1", "0.99", "0.0000000001"], ["0", "1"]),
        ({"type": "number", "minimum": -0.05, "exclusiveMaximum": 0}, ["-0.05", "-0.01"], ["0", "-0", "-0.0", "-1"]),
        ({"type": "integer", "exclusiveMinimum": 0}, ["1", "12"], ["0", "-1"]),
        ({"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.5}, ["1.5"], ["0", "0.0", "1.2"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.4, "multipleOf": 0.1}, ["0.1", "0.4"], ["0", "0.0"]),
        (
            {"type": "number", "exclusiveMaximum": 10**15},
            ["999999999999999"],
            ["999999999999999.99", "1000000000000000"],
        ),
        ({"type": "number", "exclusiveMaximum": 10**16}, ["9999999999999998"], ["9999999999999999"]),
        ({"type": "integer", "exclusiveMaximum": 2**53 + 4}, [f"{2**53 + 2}", "7"], [f"{2**53 + 3}", f"{2**53 + 4}"]),
        ({"type": "integer", "minimum": 2**53 + 1}, [f"{2**53 + 2}"], [f"{2**53}", f"{2**53 + 1}"]),
        ({"type": "integer", "maximum": 2**53 - 1}, [f"{2**53 - 1}", "0"], [f"{2**53}", "1.0", "1e3"]),
        ({"type": "number", "exclusiveMaximum": 5, "multipleOf": 0.25}, ["4.75", "4.50"], ["4.7", "5"]),
        ({"allOf": [{"type": "number", "exclusiveMaximum": 5}, {"multipleOf": 0.25}]}, ["4.75"], ["4.7", "5"]),
        ({"exclusiveMaximum": 5}, ["4.5", "null", '"x"'], ["5", "4.9999999999999999999"]),
        ({"type": ["number", "null"], "exclusiveMaximum": 5}, ["4.5", "null"], ["4.9999999999999999999", '"x"']),
        ({"type": "number"}, ["1e5", "-0", "1.5E-3"], ["01", "."]),
    ],
)
def test_what_is_taken_and_what_is_not(schema: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    assert [text for text in taken if not lets_through(schema, text)] == []
    assert [text for text in refused if lets_through(schema, text)] == []
    assert all(valid(schema, text) for text in taken)


_BOUNDS = st.one_of(
    st.integers(-200, 200),
    st.integers(-(2**62), 2**62),
    st.decimals(-1000, 1000, places=3, allow_nan=False).map(float),
    st.sampled_from([0.1, 1e-6, 9.999999999999998, 2**53, -(2**53) - 2, 10**15, 123456789.5]),
)


@st.composite
def _numbers(draw: st.DrawFn, bounds: list[float]) -> str:
    """A plain decimal: anything, or as near to a bound as decimals come."""
    if not draw(st.integers(0, 3)):
        return str(draw(st.decimals(-1000, 1000, places=draw(st.integers(0, 20)), allow_nan=False)))
    step = Decimal(1).scaleb(-draw(st.integers(0, 20))) * draw(st.integers(-9, 9))
    return f"{Decimal(repr(draw(st.sampled_from(bounds)))) + step:f}"


@given(data=st.data(), kind=st.sampled_from(["number", "integer", ["number", "null"], None]))
def test_what_a_grammar_takes_a_validator_takes(data: st.DataObject, kind: Any) -> None:
    low, high = sorted((data.draw(_BOUNDS), data.draw(_BOUNDS)))
    names = data.draw(
        st.tuples(*(st.sampled_from([f"{edge}imum", f"exclusive{edge.title()}imum", ""]) for edge in ("min", "max")))
    )
    schema = {} if kind is None else {"type": kind}
    schema |= {name: bound for name, bound in zip(names, (low, high), strict=True) if name}
    text = data.draw(_numbers([low, high]))
    try:
        assume(lets_through(schema, text))
    except InvalidRequest:
        served = as_doubles(schema) is schema  # llguidance takes no empty interval, and that was there before
        assert served or math.nextafter(low, high) >= high or kind == "integer" or high - low < 1, schema
        return
    assert valid(schema, text), (schema, text)


@given(data=st.data())
def test_of_what_fits_nothing_with_ten_decimals_is_lost(data: st.DataObject) -> None:
    low = data.draw(st.integers(-1000, 1000))
    high = low + data.draw(st.integers(1, 1000))
    schema = {"type": "number", "minimum": low, "exclusiveMaximum": high}
    number = data.draw(st.decimals(low, high, places=data.draw(st.integers(0, 10)), allow_nan=False))
    assume(number < high and not (number == 0 and number.is_signed()))
    text = f"{number:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text  # beside a bound llguidance takes no more zeros
    assert lets_through(schema, text), (schema, text)


def test_a_schema_that_nests_without_end_costs_no_stack() -> None:
    deep: Any = BELOW
    for _ in range(20_000):
        deep = {"type": "object", "properties": {"a": deep}}
    assert as_doubles(deep) is deep


def test_a_schema_without_such_bounds_stays_the_very_same() -> None:
    for schema in (
        {"type": "object", "properties": {"exclusiveMaximum": {"type": "number"}}, "required": ["exclusiveMaximum"]},
        {"enum": [{"exclusiveMaximum": 5}], "default": {"exclusiveMaximum": 5}},
        {"type": "integer", "exclusiveMaximum": 5},
        {"type": "number", "maximum": 5, "exclusiveMaximum": True},
        {"items": [{"type": "string"}, True], "anyOf": [{"minimum": 3}], "$defs": {"a": False}},
        True,
    ):
        assert as_doubles(schema) is schema


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: {"type": "object", "properties": {"a": inner}},
        lambda inner: {"type": "array", "items": inner},
        lambda inner: {"prefixItems": [{"type": "null"}, inner]},
        lambda inner: {"items": [inner]},
        lambda inner: {"$ref": "#/$defs/a", "$defs": {"a": inner}},
        lambda inner: {"anyOf": [{"type": "null"}, {"allOf": [inner]}]},
        lambda inner: {"additionalProperties": inner},
    ],
)
def test_bounds_are_found_wherever_a_schema_stands(around: Any) -> None:
    schema = around(BELOW)
    before = json.dumps(schema)
    assert '"multipleOf": 1e-10' in json.dumps(as_doubles(schema))
    assert json.dumps(schema) == before, "the caller's own is not changed"


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "integer"}, ["0", "-7", "9007199254740991", "-9007199254740991"], ["9007199254740992", "1" * 40]),
        ({"type": ["integer", "null"]}, ["null", "12"], ["1" * 40]),
        ({"type": "integer", "minimum": 0}, ["0", "9007199254740991"], ["-1", "1" * 40]),
        ({"type": "integer", "multipleOf": 5}, ["0", "-5", "9007199254740990"], ["1", "5" * 40]),
        ({"type": "integer", "minimum": 2**60, "maximum": 2**62}, [str(2**60), str(2**62)], ["0"]),
        ({"type": "integer", "enum": [10**17, 1]}, [str(10**17)], ["2"]),
        ({"type": "number"}, ["1" * 40, "0.5"], ["x"]),
        ({"type": "integer", "allOf": [{"minimum": 2**60}, {"maximum": 2**61}]}, [str(2**60)], ["0"]),
    ],
)
def test_integers_end(schema: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    assert all(lets_through(schema, text) for text in taken)
    assert not any(lets_through(schema, text) for text in refused)


def test_a_count_may_be_written_as_a_float() -> None:
    schema = {"type": "array", "minItems": 1.0, "maxItems": 2.0, "items": {"type": "string", "maxLength": 1e0}}
    assert [text for text in ("[]", '["a"]', '["a","b"]', '["ab"]') if lets_through(schema, text)] == [
        '["a"]',
        '["a","b"]',
    ]
    named = {"type": "object", "properties": {"a": {"type": "string", "minLength": 2.0}}}
    assert not lets_through(named, '{"a":"x"}')
    assert lets_through(named, '{"a":"xy"}')
    with pytest.raises(InvalidRequest, match="maxLength"):
        lets_through({"type": "string", "maxLength": 1.5}, '"a"')
