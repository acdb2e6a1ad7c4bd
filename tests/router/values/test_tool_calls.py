"""Calls in text: real answers of several families, cut at every boundary; and the form between the stages."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.values.call_reader import CallReader
from router.values.call_writer import CallWriter
from router.values.tool_calls import CANONICAL, CallDelta, CallStyle, call_text

LLAMA = CallStyle(opener="", closer="", aliases=("<|python_tag|>",))
MISTRAL = CallStyle(opener="[TOOL_CALLS]", closer="")

Call = tuple[str, object]
WEATHER: Call = ("get_weather", {"city": "Paris", "days": [1, 2], "note": 'a "quote" \\ {brace} </tool_call>'})
TIME: Call = ("get-time", {})

# What models of each family write, by their own templates.
ANSWERS: list[tuple[CallStyle, str, str, list[Call]]] = [
    (CANONICAL, "It is sunny in Paris.", "It is sunny in Paris.", []),
    (CANONICAL, "2 < 3 and <tool is no call", "2 < 3 and <tool is no call", []),
    (CANONICAL, call_text("get_weather", json.dumps(WEATHER[1])), "", [WEATHER]),
    (
        CANONICAL,
        f"Let me look.\n{call_text('get_weather', json.dumps(WEATHER[1]))}\n{call_text('get-time', '{}')}",
        "Let me look.",
        [WEATHER, TIME],
    ),
    (CANONICAL, '<tool_call>{"arguments": {"a": {"b": []}}, "name": "f"}</tool_call>', "", [("f", {"a": {"b": []}})]),
    (CANONICAL, '<tool_call>\n{"name": "f"}\n</tool_call>', "", [("f", {})]),
    (CANONICAL, '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}\n</tool_call>', "", [("f", {"a": 1})]),
    (CANONICAL, '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>', "", [("f", {"a": 1})]),
    (LLAMA, '{"name": "f", "parameters": {"a": "b"}}', "", [("f", {"a": "b"})]),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    (
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": null}}',
        "",
        [("f", {}), ("g", {"x": None})],
    ),
    (LLAMA, "The answer is {4}.", "The answer is {4}.", []),
    (LLAMA, '{"answer": 4}', '{"answer": 4}', []),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"arguments": {"a": [1, {"b": "]"}]}, "name": "f", "id": "9Ae3bDc2F"}]',
        "",
        [("f", {"a": [1, {"b": "]"}]})],
    ),
    (MISTRAL, 'Sure. [TOOL_CALLS]get_weather{"city": "Paris"}', "Sure. ", [("get_weather", {"city": "Paris"})]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", {"a": 1}), ("g", {})]),
    (MISTRAL, "an [array] and [TOOL", "an [array] and [TOOL", []),
]


def gathered(pieces: list[str | CallDelta]) -> tuple[str, list[Call]]:
    text, names, arguments = "", [], []
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
            continue
        if piece.name:
            assert piece.index == len(names)
            names.append(piece.name)
            arguments.append("")
        assert piece.index == len(names) - 1
        arguments[-1] += piece.arguments
    return text, [(name, json.loads(given)) for name, given in zip(names, arguments, strict=True)]


def read(style: CallStyle, text: str, cuts: set[int]) -> list[str | CallDelta]:
    reader, found, start = CallReader(style), [], 0
    for cut in [*sorted(cuts), len(text)]:
        found += reader.feed(text[start:cut])
        start = cut
    return found + reader.finish()


@pytest.mark.parametrize(("style", "answer", "said", "calls"), ANSWERS)
def test_answers_of_several_families(style: CallStyle, answer: str, said: str, calls: list[Call]) -> None:
    for cuts in (set(), set(range(len(answer)))):
        assert gathered(read(style, answer, cuts)) == (said, calls)


@given(st.sampled_from(ANSWERS), st.sets(st.integers(0, 200)))
def test_wherever_they_are_cut(answer: tuple[CallStyle, str, str, list[Call]], cuts: set[int]) -> None:
    style, text, said, calls = answer
    assert gathered(read(style, text, {cut for cut in cuts if cut < len(text)})) == (said, calls)


@given(st.sampled_from(ANSWERS), st.sets(st.integers(0, 200)))
def test_written_in_the_form_of_this_house_they_are_the_same(
    answer: tuple[CallStyle, str, str, list[Call]], cuts: set[int]
) -> None:
    style, text, said, calls = answer
    writer = CallWriter()
    written = writer.write(read(style, text, {cut for cut in cuts if cut < len(text)})) + writer.finish()
    found, its_calls = gathered(read(CANONICAL, written, cuts))
    assert (found.strip(), its_calls) == (said.strip(), calls)


@given(st.integers(0, 200), st.integers(0, 4))
def test_what_another_writes_behind_any_cut_joins(cut: int, pieces: int) -> None:
    """A tier above tells the rest as pieces, and begins in the middle of a call."""
    whole = f"Well.\n{call_text('f', json.dumps(WEATHER[1]))}\n{call_text('g', '{}')}"
    said = whole[: min(cut, len(whole))]
    above = CallReader.behind(said)
    rest = whole[len(said) :]
    size = max(1, len(rest) // (pieces + 1))
    told: list[list[str | CallDelta]] = [above.feed(rest[at : at + size]) for at in range(0, len(rest), size)]
    told.append(above.finish())
    writer = CallWriter(said)
    joined = said + "".join(map(writer.write, told)) + writer.finish()
    assert gathered(read(CANONICAL, joined, set())) == ("Well.", [("f", WEATHER[1]), ("g", {})])


def test_events_without_text_end_no_call() -> None:
    """A server tells the name and each piece of the arguments in events whose text is empty."""
    writer = CallWriter()
    pieces = [CallDelta(0, "f"), CallDelta(0, "", '{"a"'), CallDelta(0, "", ": 1}")]
    written = "".join(writer.write(["", piece]) for piece in pieces) + writer.write([""]) + writer.finish()
    assert written == call_text("f", '{"a": 1}')


@given(st.integers(0, 200), st.sets(st.integers(0, 200)))
def test_of_a_beginning_by_the_callers_own_hand_the_open_call_is_told(cut: int, cuts: set[int]) -> None:
    first, second = call_text("f", json.dumps(WEATHER[1])), call_text("g", "{}")
    whole = f"Well.\n{first}\n{second}"
    closed = len("Well.\n" + first)
    said, rest = whole[:cut], whole[cut:]
    reader, pieces, start = CallReader.prefilled(said), [], 0
    for at in [*sorted(each for each in cuts if each < len(rest)), len(rest)]:
        pieces += reader.feed(rest[start:at])
        start = at
    pieces += reader.finish()
    left = [("f", WEATHER[1]), ("g", {})][0 if cut < closed else 1 if cut < len(whole) else 2 :]
    assert gathered(pieces) == ("Well."[cut:], left)
    assert reader.calls == len(left)


@pytest.mark.parametrize(
    ("said", "rest", "text", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1', "", "", 1),  # the answer ends at once
        (f"{call_text('f', '{}')}", "", "", 0),
        (f"{call_text('f', '{}')}"[:-4], "all>\nIt is sunny.", "\nIt is sunny.", 1),
        (f"{call_text('f', '{}')}\n<tool", " is sunny", " is sunny", 0),
        ("a <tool", "", "", 0),
        ('<tool_call>\n{"na', 'me": 3}\nHm', 'me": 3}\nHm', 0),
        ("<tool_call>\n", "Hm", "Hm", 0),
    ],
)
def test_what_a_caller_wrote_is_not_told_to_it(said: str, rest: str, text: str, calls: int) -> None:
    reader = CallReader.prefilled(said)
    pieces = reader.feed(rest) + reader.finish()
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == text
    assert reader.calls == calls == sum(bool(piece.name) for piece in pieces if isinstance(piece, CallDelta))


@pytest.mark.parametrize(
    "begun", ['<tool_call>{"name":"f",', '<tool_call>\n{ "name" : "f", "argu', '<tool_call>\n{"name":"f']
)
def test_a_call_that_was_begun_with_other_blanks_goes_on_where_it_stands(begun: str) -> None:
    writer = CallWriter(begun)
    name = [] if CallReader.behind(begun).begun else [CallDelta(0, "f")]
    written = begun + writer.write([*name, CallDelta(0, "", '{"a": 1}')]) + writer.finish()
    assert gathered(read(CANONICAL, written, set())) == ("", [("f", {"a": 1})])
