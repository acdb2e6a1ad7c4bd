"""Streams of text equal decoding at once, whatever the splits, up to the first stop string."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from models.text.stream import TextStream
from models.text.tokenizer import Tokenizer
from router.base.errors import InvalidRequest
from tests.support.tiny_tokenizer import backend

BACKEND = backend()
TOKENIZER = Tokenizer(BACKEND, eos_ids=[2], bos_id=1, adds_bos=False)
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)
TEXTS = st.text(st.sampled_from("abSTOPend. \n東🙂é"), max_size=40)
STOPS = st.lists(st.text(st.sampled_from("abSTOPend. \n東🙂é�"), min_size=1, max_size=6), max_size=4).map(tuple)


def first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """The definition: of the stop strings, the one that completes first; the longest of those that tie."""
    for end in range(len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            return end - max(map(len, matched))
    return None


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[begin:end] for begin, end in itertools.pairwise(edges)]


@given(st.one_of(IDS, TEXTS.map(TOKENIZER.encode)), STOPS, st.lists(st.integers(0, 99), max_size=12))
def test_a_stream_is_the_text_cut_at_the_first_stop(ids: list[int], stops: tuple[str, ...], cuts: list[int]) -> None:
    stream = TextStream(TOKENIZER, stops)
    deltas = [stream.push(piece) for piece in split(ids, cuts)]
    streamed = "".join(delta.text for delta in deltas) + stream.finish()
    whole = TOKENIZER.decode(ids)
    cut = first_stop(whole, stops)
    assert streamed == (whole if cut is None else whole[:cut])
    # once stopped, always stopped and silent
    seen = [delta.stopped for delta in deltas]
    assert seen == sorted(seen)
    for delta in deltas:
        assert delta.stop is None or (delta.stop in stops and (cut is None or whole.startswith(delta.stop, cut)))
    assert not any(delta.text for delta in deltas[seen.count(False) + 1 :])


@given(TEXTS.map(TOKENIZER.encode), STOPS, st.lists(st.integers(0, 99), max_size=12))
def test_what_lies_behind_a_stop_string_is_no_part_of_the_answer(
    ids: list[int], stops: tuple[str, ...], cuts: list[int]
) -> None:
    assume("\ufffd" not in "".join(stops))  # half a character is none yet, and no `decode` of a part can say so
    stream = TextStream(TOKENIZER, stops)
    taken = sum(stream.push(piece).tokens for piece in split(ids, cuts))
    cut = [first_stop(TOKENIZER.decode(ids[:count]), stops) is not None for count in range(len(ids) + 1)]
    assert taken == (cut.index(True) if True in cut else len(ids))


@given(TEXTS, STOPS)
def test_nothing_is_held_back_without_reason(text: str, stops: tuple[str, ...]) -> None:
    stream = TextStream(TOKENIZER, stops)
    shown = ""
    for token in TOKENIZER.encode(text):
        delta = stream.push([token])
        if delta.stopped:
            return
        shown += delta.text
    held = text[len(shown) :]
    assert text.startswith(shown)
    assert not held or any(stop.startswith(held) for stop in stops)


@given(TEXTS, TEXTS, STOPS)
def test_a_continuation_stops_where_the_whole_text_would(before: str, after: str, stops: tuple[str, ...]) -> None:
    stream = TextStream(TOKENIZER, stops, prompt_tail=before)
    shown = stream.push(TOKENIZER.encode(after)).text + stream.finish()
    whole = before + after
    for end in range(len(before) + 1, len(whole) + 1):
        matched = [stop for stop in stops if whole[:end].endswith(stop)]
        if matched:  # what was emitted before stays emitted
            assert before + shown == whole[: max(end - max(map(len, matched)), len(before))]
            return
    assert shown == after


def test_a_character_split_over_tokens_waits() -> None:
    stream = TextStream(TOKENIZER)
    characters = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str("🙂")[0][0]
    ids = [token for character in characters if (token := BACKEND.token_to_id(character)) is not None]
    assert len(ids) == 4
    assert [stream.push([token]).text for token in ids] == ["", "", "", "🙂"]
    stream.push(ids[:2])
    assert stream.finish() == "�"


@given(TEXTS.map(TOKENIZER.encode), STOPS, st.integers(0, 6), st.lists(st.integers(0, 99), max_size=12))
def test_no_stop_string_is_looked_for_in_the_first_tokens(
    ids: list[int], stops: tuple[str, ...], unwatched: int, cuts: list[int]
) -> None:
    stream = TextStream(TOKENIZER, stops, unwatched_tokens=unwatched)
    shown = "".join(stream.push(piece).text for piece in split(ids, cuts)) + stream.finish()
    text = TOKENIZER.decode(ids)
    free = len(TOKENIZER.decode(ids[:unwatched]).rstrip("\ufffd"))
    cut = first_stop(text[free:], stops)
    assert shown == (text if cut is None else text[: free + cut])


def test_an_empty_stop_string_is_the_callers_error() -> None:
    with pytest.raises(InvalidRequest, match="empty string") as caught:
        TextStream(TOKENIZER, ("a", ""))
    assert caught.value.param == "stop"
