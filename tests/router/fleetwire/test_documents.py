"""Topics, strict decoding, and the merge of remote overrides."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import ConfigError
from router.fleetwire.documents import (
    MAX_DOCUMENT_BYTES,
    MAX_VERSION,
    Address,
    BadDocument,
    DesiredConfig,
    DesiredRefused,
    Reported,
    Status,
    decode_as,
    decode_command,
    decode_desired,
    digest_of,
    encode,
    newest_status,
    parse_topic,
    topic_filter,
)
from router.fleetwire.overrides import delta, edit, lay_over

NOW = "2026-03-01T12:00:00Z"

scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
keys = st.text("abcdef_", min_size=1, max_size=4)
values = scalars | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
trees = st.recursive(
    st.dictionaries(keys, values, max_size=4), lambda t: st.dictionaries(keys, values | t, max_size=4), max_leaves=12
)


def document(**more: Any) -> bytes:
    return json.dumps({"version": 3, "issued_at": NOW, **more}).encode()


@pytest.mark.parametrize(
    "name", ["", "a/b", "+", "#", "cam+", "cam#1", "-x", ".x", "$SYS", "ä", "a" * 65, "a\n", "a b"]
)
def test_names_that_cannot_be_a_topic_level_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no valid name"):
        Address("site", name)
    with pytest.raises(ConfigError, match="no valid name"):
        topic_filter(name, "status")


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True))
def test_topics_round_trip(name: str) -> None:
    address = Address("site", name)
    assert parse_topic(address.topic("desired")) == (address, "desired")


@pytest.mark.parametrize(
    "topic",
    ["", "overspill/v1/a/b", "overspill/v2/a/b/status", "overspill/v1/a/b/other", "overspill/v1/a/+/status", "x"],
)
def test_foreign_topics_are_none_of_ours(topic: str) -> None:
    assert parse_topic(topic) is None


def test_a_document_round_trips_and_keeps_its_digest() -> None:
    desired = decode_desired(document(router={"max_queue": 32, "policy": "x", "nested": {"a": [1, 2.5, None]}}))
    again = decode_desired(encode(desired))
    assert again == desired
    assert digest_of(again) == digest_of(desired)
    assert desired.overrides == {"router": {"max_queue": 32, "policy": "x", "nested": {"a": [1, 2.5, None]}}}


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid UTF-8"),
        (b"[]", "a JSON list, not an object"),
        (b'"text"', "a JSON str, not an object"),
        (b"{" + b'"a":[' * 5000, "not valid JSON"),
        (document(router=json.loads('{"a":' * 40 + "1" + "}" * 40)), "deeper than"),
        (document(router={"a": float("nan")}), "NaN is not a JSON number"),
        (b'{"version": 1e999}', "out of the range"),
        (b'{"version": 3, "version": 4, "issued_at": "%s"}' % NOW.encode(), "`version` appears twice"),
        (document(router={}).replace(b'"router": {}', b'"router": {"a": {"b": 1, "b": 2}}'), "`b` appears twice"),
        (document(router={"a": "\ud800"}), "surrogates not allowed"),
        (document(extra=1), "unknown key `extra`"),
        (document(router=3), "`router` = 3: Expected `object`, got `int`"),
        (document(version="3"), "`version` = '3': Expected `int`"),
        (document(version=0), "`version` = 0"),
        (document(version=True), "`version` = True"),
        (document(version=MAX_VERSION + 1), "`version`"),
        (document(issued_at="yesterday"), "`issued_at` = 'yesterday'"),
        (document(issued_at="2026-03-01T12:00:00"), "`issued_at`"),
        (b'{"issued_at": "%s"}' % NOW.encode(), "missing required field `version`"),
        (b'{"version": 3}', "missing required field `issued_at`"),
        (document(gateway={"api_keys": []}), "unknown key `gateway`"),
        (document(models={"store": "/"}), "`models.store` cannot be set over the fleet"),
        (document(router={"a": "x" * MAX_DOCUMENT_BYTES}), "at most 65536 are accepted"),
    ],
)
def test_what_is_no_document_is_refused_by_name(payload: bytes, says: str) -> None:
    with pytest.raises(DesiredRefused) as refusal:
        decode_desired(payload)
    assert says in refusal.value.message
    assert len(refusal.value.message) < 500


def test_a_refusal_knows_the_version_when_it_can_be_read() -> None:
    with pytest.raises(DesiredRefused) as refusal:
        decode_desired(document(nonsense=1))
    assert refusal.value.version == 3
    assert refusal.value.param == "nonsense"


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_garbage_is_refused_and_nothing_else_happens(payload: bytes) -> None:
    with pytest.raises(DesiredRefused):
        decode_desired(payload)
    with pytest.raises(BadDocument):
        decode_command(payload)


@given(st.dictionaries(st.sampled_from(["version", "issued_at", "issued_by", "router", "models", "x"]), values | trees))
def test_well_formed_json_is_accepted_or_refused(tree: dict[str, Any]) -> None:
    try:
        desired = decode_desired(json.dumps(tree).encode())
    except DesiredRefused:
        return
    assert desired.version == tree["version"]


def test_a_reader_understands_a_newer_writer() -> None:
    reported = decode_as(b'{"state": "applied", "version": 2, "invented_later": {"a": 1}}', Reported)
    assert (reported.state, reported.version) == ("applied", 2)
    with pytest.raises(BadDocument):
        decode_as(b'{"state": "sideways"}', Reported)
    with pytest.raises(BadDocument):
        decode_as(b" " * 300_000, Reported)


def test_a_stale_will_does_not_hide_a_living_device() -> None:
    alive = Status(state="online", birth=7, session="a")
    assert newest_status(alive, Status(state="offline", birth=6, session="a")) is alive
    assert newest_status(alive, Status(state="offline", birth=7, session="b")) is alive
    dead = Status(state="offline", birth=7, session="a")
    assert newest_status(alive, dead) is dead
    assert newest_status(dead, Status(state="online", birth=8, session="a")).birth == 8


def test_merge_semantics() -> None:
    file = {"router": {"policy": "a", "max_queue": 64, "breaker": {"failures": 3}}, "fleet": {"device": "d"}}
    overrides = {"router": {"max_queue": 8, "policy": None, "breaker": {"open_ms": 5}, "tags": [1]}}
    assert lay_over(file, overrides) == {
        "router": {"policy": "a", "max_queue": 8, "breaker": {"failures": 3, "open_ms": 5}, "tags": [1]},
        "fleet": {"device": "d"},
    }
    assert edit({"router": {"a": 1, "b": {"c": 2}}}, {"router": {"a": None, "b": {"c": None}}}) == {}


@given(trees, trees)
def test_overrides_are_in_force_after_the_merge_and_merging_twice_changes_nothing(
    base: dict[str, Any], overrides: dict[str, Any]
) -> None:
    before = json.dumps([base, overrides])
    merged = lay_over(base, overrides)
    assert lay_over(merged, overrides) == merged
    assert delta(overrides, merged) == ()
    assert json.dumps([base, overrides]) == before


@given(trees, trees)
def test_editing_is_idempotent_and_leaves_no_null(overrides: dict[str, Any], edits: dict[str, Any]) -> None:
    once = edit(overrides, edits)
    assert edit(once, edits) == once

    def has_null(tree: dict[str, Any]) -> bool:
        return any(v is None or (isinstance(v, dict) and has_null(v)) for v in tree.values())

    assert not has_null(edit({}, edits))


def test_digest_depends_on_content_not_on_key_order() -> None:
    issued = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
    one = DesiredConfig(version=1, issued_at=issued, router={"a": 1, "b": 2})
    two = DesiredConfig(version=1, issued_at=issued, router={"b": 2, "a": 1})
    other = DesiredConfig(version=1, issued_at=issued, router={"b": 2, "a": 2})
    assert digest_of(one) == digest_of(two) != digest_of(other)
