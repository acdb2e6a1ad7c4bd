"""Told tokens make up the shown text: none comes before its text, and none that a stop string swallowed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from models.text.logprobs import LogprobStream, told
from models.text.stream import TextStream
from models.text.tokenizer import Tokenizer
from router.values.logprobs import DrawnToken
from tests.support.tiny_tokenizer import backend

TOKENIZER = Tokenizer(backend(), eos_ids=[2], bos_id=1, adds_bos=False)
TEXTS = st.text(st.sampled_from("abSTOPend. \n東🙂é"), max_size=40)
STOPS = st.lists(st.text(st.sampled_from("abSTOPend. \n東🙂é"), min_size=1, max_size=6), max_size=4).map(tuple)


@given(TEXTS, STOPS, st.integers(1, 4))
def test_told_tokens_make_up_the_shown_text(text: str, stops: tuple[str, ...], at_once: int) -> None:
    ids = TOKENIZER.encode(text)
    stream, line = TextStream(TOKENIZER, stops), LogprobStream(TOKENIZER)
    shown, raw, stopped = "", b"", False
    for at in range(0, len(ids), at_once):
        line.push(DrawnToken(token, -1.0) for token in ids[at : at + at_once])
        delta = stream.push(ids[at : at + at_once])
        shown += delta.text
        raw += b"".join(one.raw or b"" for one in line.shown(delta.text))
        assert raw.startswith(shown.encode())  # each character with the token that it began in
        assert len(raw) - len(shown.encode()) < 12  # and no token before
        stopped = delta.stopped
        if stopped:
            break
    if not stopped:
        rest = stream.finish()
        shown += rest
        raw += b"".join(one.raw or b"" for one in line.shown(rest, whole=True))
        assert raw == shown.encode() == text.encode()


def test_special_tokens_are_told_by_their_names_and_are_no_text() -> None:
    one = told(TOKENIZER, DrawnToken(2, -0.5, ((1, -0.25), (2, -0.5))))
    name = TOKENIZER.token_of(2)
    assert (one.text, one.raw, one.shown) == (name, str(name).encode(), False)
    assert [other.text for other in one.top] == [TOKENIZER.token_of(1), name]
    half = TOKENIZER.encode("🙂")[0]
    assert told(TOKENIZER, DrawnToken(half, -1.0)).raw == TOKENIZER.piece(half)
