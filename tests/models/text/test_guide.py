"""Looking ahead: the same tokens as by hand, from any thread; and what takes long is not waited for, or given up."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.text import guide as room
from models.text.grammar import Grammars, Matcher
from models.text.guide import BIAS_OF_BYTE, Guide, Lookahead
from models.text.tokenizer import Tokenizer
from router.values.constraint import Constraint, ConstraintKind
from tests.support import tiny_tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer.backend(), eos_ids=[2], bos_id=None, adds_bos=False)
GRAMMARS = Grammars(lambda: TOKENIZER)
VOCAB = TOKENIZER.vocab_size
PATTERN = Constraint(ConstraintKind.REGEX, r"([a-f]{3}|the cat |\d{2}-){2,9}!")
AMBIGUOUS = Constraint(
    ConstraintKind.LARK,
    'start: s\ns: t | u | v | s s\nt: s "a" | "a"\nu: s "b"|"b" s | "b"\nv: /c+/ | s v\n',
)


def allowed(mask: np.ndarray | None) -> list[int]:
    assert mask is not None
    return np.flatnonzero(BIAS_OF_BYTE[mask].ravel()[:VOCAB] == 0).tolist()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes long, however slow this machine is."""
    monkeypatch.setattr(room, "_SLOW_S", 60.0)
    monkeypatch.setattr(room, "_DEAR_S", 60.0)
    monkeypatch.setattr(room, "_MOST_S", 60.0)


@settings(max_examples=25)
@given(seeds=st.lists(st.integers(0, 10_000), min_size=1, max_size=6), slow=st.booleans())
def test_guides_that_look_ahead_allow_what_their_matchers_do(seeds: list[int], slow: bool) -> None:
    lookahead, draws = Lookahead(), [random.Random(seed) for seed in seeds]
    by_hand = [GRAMMARS.matcher(PATTERN) for _ in seeds]
    guides = [Guide(GRAMMARS.matcher(PATTERN), VOCAB) for _ in seeds]
    going = list(range(len(seeds)))
    lookahead.begin(guides)
    while going:
        for index in going:
            assert guides[index].wait(20)
        going = [index for index in going if not guides[index].complete]
        for index in going:
            choices = allowed(guides[index].mask)
            assert choices == allowed(by_hand[index].mask(VOCAB))
            token = draws[index].choice(choices)
            guides[index].slow = slow
            guides[index].advance(token)
            by_hand[index].advance(token)
            if not slow:
                assert guides[index].complete == by_hand[index].complete
        lookahead.begin([guides[index] for index in going])
    assert all(matcher.complete for matcher in by_hand)
    assert not any(guide.failure for guide in guides)


@pytest.mark.usefixtures("unhurried")
def test_one_whose_choices_are_allowed_looks_for_none_and_one_that_is_refused_looks_ahead() -> None:
    letters = Constraint(ConstraintKind.REGEX, "[a-f]{40}")
    lookahead, guide = Lookahead(), Guide(GRAMMARS.matcher(letters), VOCAB)
    assert not guide.asks  # the first token: there is time while the prompt is read
    for place in range(12):
        assert guide.ready
        choices = [token for token in range(VOCAB) if guide.allows(token)]
        if place < 6:
            assert guide.allows(choices[0])
        else:
            assert not guide.allows(0)
        guide.advance(choices[0])
        lookahead.begin([guide])
        assert guide.wait(20)
        assert guide.asks == (guide.mask is None)
        assert guide.asks == (place < 8), "it goes on asking after three refusals, or not after two"


def test_one_that_draws_from_what_is_allowed_alone_never_asks() -> None:
    guide = Guide(GRAMMARS.matcher(PATTERN), VOCAB, proposes=False)
    for _ in range(4):
        guide.look()
        token = allowed(guide.mask)[0]
        assert guide.allows(token)
        guide.advance(token)
        assert not guide.asks


@pytest.mark.usefixtures("unhurried")
def test_what_is_slow_to_ask_is_looked_for_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Guide(GRAMMARS.matcher(PATTERN), VOCAB)
    guide.allows(0)
    guide.advance(next(token for token in range(VOCAB) if guide.allows(token)))
    assert guide.asks
    monkeypatch.setattr(room, "_SLOW_S", 0.0)
    assert guide.allows(next(token for token in range(VOCAB) if guide.allows(token)))
    assert guide.slow
    assert not guide.asks


@pytest.mark.usefixtures("unhurried")
def test_where_asking_is_dear_a_thread_looks_ahead_for_some_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = Constraint(ConstraintKind.REGEX, "[a-f]{40}")
    lookahead, guide = Lookahead(), Guide(GRAMMARS.matcher(letters), VOCAB)
    monkeypatch.setattr(room, "_DEAR_S", 0.0)
    asked = []
    for _ in range(15):
        asked.append(guide.mask is None)
        guide.advance(next(token for token in range(VOCAB) if guide.allows(token)))
        lookahead.begin([guide])
        assert guide.wait(20)
    assert asked == [True, False, False, False] * 3 + [True, False, False]


def test_one_whose_mask_takes_long_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    lookahead, gate = Lookahead(), threading.Event()
    slow, quick = (Guide(GRAMMARS.matcher(PATTERN), VOCAB) for _ in range(2))
    mask = Matcher.mask
    held = slow._matcher

    def gated(matcher: Matcher, vocab_size: int) -> np.ndarray:
        if matcher is held:
            gate.wait(20)
        return mask(matcher, vocab_size)

    slow.slow = True
    monkeypatch.setattr(Matcher, "mask", gated)
    try:
        lookahead.begin([slow, quick])
        assert quick.wait(20)
        lookahead.wait([slow, quick], 20.0)  # not for the slow one
        assert not slow.ready
    finally:
        gate.set()
    assert slow.wait(20)
    assert allowed(slow.mask) == allowed(quick.mask)


def test_work_without_an_end_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of an ambiguous grammar costs more than the one before: its own bounds do not see that."""
    monkeypatch.setattr(room, "_MOST_S", 0.02)
    guide, draw = Guide(GRAMMARS.matcher(AMBIGUOUS), VOCAB), random.Random(1)
    for _ in range(2000):
        guide.look()
        if guide.failure:
            break
        guide.advance(draw.choice([token for token in allowed(guide.mask) if token != 2]))
    assert "cannot be followed any further" in guide.failure


def test_an_answer_ends_with_the_first_token_that_holds_everybody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking a token holds the interpreter's lock: the event loop stands still meanwhile."""
    guide = Guide(GRAMMARS.matcher(AMBIGUOUS), VOCAB)
    guide.look()
    inner = guide._matcher._inner
    taken: list[int] = []

    class Slow:
        def __getattr__(self, name: str) -> object:
            return getattr(inner, name)

        def consume_token(self, token: int) -> None:
            taken.append(token)
            inner.consume_token(token)
            end_s = time.thread_time() + 0.011
            while time.thread_time() < end_s:
                pass

    monkeypatch.setattr(guide._matcher, "_inner", Slow())
    guide.advance(next(token for token in allowed(guide.mask) if token != 2))
    guide.look()
    assert "to take one token took 0.01" in guide.failure
    assert len(taken) == 1


def test_what_was_said_is_followed_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.text.grammar._SAID_S", 0.05)
    began_s = time.thread_time()
    assert not GRAMMARS.matcher(AMBIGUOUS).advance_text("abc" * 400)
    assert time.thread_time() - began_s < 5, "it went on to the end"


def test_asking_has_an_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_MOST_S", 0.0)
    guide = Guide(GRAMMARS.matcher(PATTERN), VOCAB)
    assert not guide.allows(next(token for token in range(VOCAB) if GRAMMARS.matcher(PATTERN).allows(token)))
    assert "cannot be followed any further" in guide.failure


def test_an_error_that_nobody_expects_ends_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    lookahead = Lookahead()
    broken, sound = (Guide(GRAMMARS.matcher(PATTERN), VOCAB) for _ in range(2))
    monkeypatch.setattr(broken._matcher, "mask", lambda _: 1 // 0)
    lookahead.begin([broken, sound])
    assert broken.wait(20)
    assert sound.wait(20)
    assert "its constraint failed" in broken.failure
    assert not sound.failure
