"""Stop strings on this side: however the text is cut into pieces, what comes through ends before the first one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.upstream.codec.stop_cut import StopCut

STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)


def cut(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    cutter = StopCut(stops)
    shown = "".join(cutter.feed(piece) for piece in pieces)
    return shown + cutter.rest(), cutter.found


def first_stop_ends(text: str, stops: list[str]) -> int | None:
    """Where the text is, read character by character, when a stop string is complete for the first time."""
    ends = [at for at in range(1, len(text) + 1) if any(text[:at].endswith(stop) for stop in stops)]
    return ends[0] if ends else None


@given(st.lists(st.text(alphabet="ab\n", max_size=4), max_size=12), STOPS)
def test_nothing_of_a_stop_string_comes_through(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    shown, found = cut(pieces, stops)
    assert text.startswith(shown)
    assert found == any(stop in text for stop in stops)
    assert not any(stop in shown for stop in stops)
    if not found:
        assert shown == text


@given(st.lists(st.text(alphabet="ab\n", max_size=4), max_size=12), STOPS)
def test_the_first_one_that_is_complete_ends_it(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    shown, found = cut(pieces, stops)
    end = first_stop_ends(text, stops)
    assert found == (end is not None)
    if end is not None:
        longest = max(len(stop) for stop in stops if text[:end].endswith(stop))
        assert shown == text[: end - longest]


def test_what_cannot_be_a_stop_string_is_shown_at_once() -> None:
    cutter = StopCut(["\n\n"])
    assert cutter.feed("one") == "one"
    assert cutter.feed("two\n") == "two"
    assert cutter.feed("three") == "\nthree"
    assert cutter.feed("\n\nfour") == ""
    assert cutter.found
    assert cutter.feed("five") == ""
