"""Calls of every family as they come: several, nested, in any script, split at every byte, cut anywhere."""

from __future__ import annotations

import codecs
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from models.text.tools.format import in_own_words, written_whole
from models.text.tools.registry import open_format
from router.values.call_reader import CallReader
from router.values.call_writer import CallWriter
from router.values.chunk import FinishReason
from router.values.tool_calls import CANONICAL, CallDelta, CallStyle
from router.wire.openai.calls import AnswerCalls, whole_message

MARKERS = ["<tool_call>", "</tool_call>", "\n</tool_call>\n", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "; "]
SHAPES = ['{"name": "x", "arguments": {}}', '"}', "}}", "]", "\\", '"', "\\u00"]
SCRIPTS = ["größe", "🙂", "e\u0301", "\u2028", "\x00"]
FAMILIES = st.sampled_from(["hermes", "llama", "mistral"])
TEXTS = st.lists(st.one_of(st.sampled_from(MARKERS + SHAPES + SCRIPTS), st.text(max_size=4)), max_size=4).map("".join)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.\-]{0,20}", fullmatch=True)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(TEXTS, VALUES, max_size=3)), min_size=1, max_size=3)
SPOKEN = ["Let me see.", "2 < 3", "a [list] of {things}", "größe 🙂", "[", "\n", "\n\n", "[TOOL", "<tool"]
SAID = st.lists(st.sampled_from(SPOKEN), max_size=3).map("".join)

Call = tuple[str, Any]


def gathered(pieces: list[str | CallDelta]) -> tuple[str, list[Call]]:
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    names: list[str] = []
    arguments: list[str] = []
    for piece in pieces:
        if isinstance(piece, CallDelta):
            if piece.name:
                assert piece.index == len(names)
                names.append(piece.name)
                arguments.append("")
            assert piece.index == len(names) - 1
            arguments[-1] += piece.arguments
    return text, [(name, json.loads(given)) for name, given in zip(names, arguments, strict=True)]


def in_bytes(text: str) -> list[str]:
    """Split text at every byte, as half characters arrive: they wait for their other half."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    return [decoder.decode(bytes([byte])) for byte in text.encode()]


def told(reader: CallReader, parts: list[str]) -> list[list[str | CallDelta]]:
    return [*(reader.feed(part) for part in parts), reader.finish()]


def read(style: CallStyle, parts: list[str]) -> list[str | CallDelta]:
    return [piece for pieces in told(CallReader(style), parts) for piece in pieces]


def spelled(calls: list[Call], *, ascii_only: bool, indent: int | None) -> list[tuple[str, str]]:
    return [(name, json.dumps(given, ensure_ascii=ascii_only, indent=indent)) for name, given in calls]


@given(FAMILIES, SAID, CALLS, st.booleans(), st.sampled_from([None, 1]))
def test_what_a_family_writes_is_read_however_it_is_split(
    family: str, said: str, calls: list[Call], ascii_only: bool, indent: int | None
) -> None:
    form = open_format(family)
    said = "" if family == "llama" else said  # its answers call or speak
    text = written_whole(form.words, said, spelled(calls, ascii_only=ascii_only, indent=indent))
    for parts in ([text], in_bytes(text)):
        content, found = gathered(read(form.style, parts))
        assert (content.strip("\n"), found) == (said.strip("\n"), calls)
    writer = CallWriter()
    canonical = "".join(map(writer.write, told(CallReader(form.style), in_bytes(text)))) + writer.finish()
    content, found = gathered(read(CANONICAL, in_bytes(canonical)))
    assert (content.strip("\n"), found) == (said.strip("\n"), calls)
    message, reason = whole_message(canonical, FinishReason.STOP, AnswerCalls())
    functions = [call["function"] for call in message["tool_calls"]]  # type: ignore[attr-defined]
    assert [(each["name"], json.loads(each["arguments"])) for each in functions] == calls
    assert reason == "tool_calls"


@given(FAMILIES, SAID, CALLS, st.booleans(), st.data())
def test_cut_anywhere_another_family_finishes_it(
    family: str, said: str, calls: list[Call], ascii_only: bool, data: st.DataObject
) -> None:
    form = open_format(family)
    said = "" if family == "llama" else said.rstrip("\n")
    written = spelled(calls, ascii_only=ascii_only, indent=None)
    first = CallWriter()
    pieces: list[str | CallDelta] = [CallDelta(index, name, given) for index, (name, given) in enumerate(written)]
    canonical = first.write([said, *pieces]) + first.finish()
    before = canonical[: data.draw(st.integers(0, len(canonical)))]
    begun = in_own_words(form, before)
    between = ""
    if said and (family == "hermes" or begun == said + "\n"):
        between = "\n"
    whole = said + between + written_whole(form.words, "", written)
    assert whole.startswith(begun), "a model that would say the same could not go on behind it"
    reader, writer = CallReader.behind(begun, form.style), CallWriter(before)
    after = "".join(map(writer.write, told(reader, in_bytes(whole[len(begun) :])))) + writer.finish()
    content, found = gathered(read(CANONICAL, in_bytes(before + after)))
    assert found == calls
    held = CallReader()
    held.feed(before)
    if family == "hermes" or not held.unfinished or len(before) > len(said):
        # Elsewhere half an opener may have been half a word: the model is not shown it, and says it anew.
        assert content.strip("\n") == said.strip("\n")
    behind = CallReader.behind(before)
    assert gathered([*CallReader().feed(before), *behind.feed(after), *behind.finish()])[1] == calls


def test_a_call_that_breaks_off_behind_the_opener_of_the_next_is_closed_for_every_family() -> None:
    before = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>'
    assert in_own_words(open_format("llama"), before) == '{"name": "f", "parameters": {"a": 1}}; '
    assert in_own_words(open_format("mistral"), before) == '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, '
    assert in_own_words(open_format("hermes"), before) == before


def test_what_was_said_before_a_line_break_is_shown_with_it() -> None:
    for family in ("llama", "mistral"):
        assert in_own_words(open_format(family), "Well.\n\n") == "Well.\n\n"
        assert in_own_words(open_format(family), "Well.\n<tool") == "Well."
