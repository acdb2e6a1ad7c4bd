"""A call or an answer that has to match a schema: the token that the model would begin with tells which."""

from __future__ import annotations

import numpy as np
import pytest

from models.text.grammar import Grammars, Matcher
from models.text.guide import BIAS_OF_BYTE, Guide
from models.text.tokenizer import Tokenizer
from router.values.constraint import Constraint, ConstraintKind
from tests.support import tiny_tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer.backend(), eos_ids=[2], bos_id=None, adds_bos=False)
GRAMMARS = Grammars(lambda: TOKENIZER)
RULES = 'start: content | "<tool_call>" /[0-9]+/\ncontent: %json {"type": "object", "required": ["a"]}'
EITHER = Constraint(ConstraintKind.LARK, RULES, opener="<tool_call>")
CALLS = Constraint(ConstraintKind.LARK, 'start: "<tool_call>" /[0-9]+/', opener="<tool_call>")


def token(text: str) -> int:
    (found,) = TOKENIZER.encode(text)
    return found


def begins(guide: Guide) -> set[str]:
    """What the answer may begin with now."""
    guide.look()
    assert guide.mask is not None
    allowed = np.flatnonzero(BIAS_OF_BYTE[guide.mask].ravel()[: TOKENIZER.vocab_size] == 0)
    texts = {TOKENIZER.decode([each]) for each in allowed.tolist()}
    assert all(guide.allows(each) for each in allowed.tolist())
    return texts


@pytest.mark.parametrize("proposes", [True, False])
@pytest.mark.parametrize("own", ["the", "A", "7", "é"])
def test_one_that_would_begin_in_words_answers(own: str, proposes: bool) -> None:
    guide = Guide(GRAMMARS.matcher(EITHER), TOKENIZER.vocab_size, proposes=proposes)
    assert guide.undecided
    assert guide.asks
    first = TOKENIZER.encode(own)[0]
    assert not guide.allows(first)
    assert not guide.allows(token("<")), "one of the next tokens that are proposed"
    assert begins(guide) == {"{"}
    assert not guide.allows(first), "drawn again from the same logits"
    assert begins(guide) == {"{"}


def test_words_count_where_what_may_come_was_looked_for_before() -> None:
    guide = Guide(GRAMMARS.matcher(EITHER), TOKENIZER.vocab_size)
    guide.look()
    assert not guide.allows(token("the"))
    assert guide.mask is None
    assert begins(guide) == {"{"}


def test_one_that_would_begin_a_call_calls() -> None:
    guide = Guide(GRAMMARS.matcher(EITHER), TOKENIZER.vocab_size)
    assert guide.allows(token("<"))
    guide.advance(token("<"))
    assert not guide.undecided
    assert not guide.allows(token("the"))
    assert guide.allows(token("t"))


@pytest.mark.parametrize("own", ["!", ">", "<think> x"])
def test_what_is_no_word_says_nothing(own: str) -> None:
    guide = Guide(GRAMMARS.matcher(EITHER), TOKENIZER.vocab_size)
    assert not guide.allows(TOKENIZER.encode(own)[0])
    assert not guide.allows(token("the")), "which it would rather not begin with"
    assert begins(guide) == {"{", "<"}


def test_where_there_are_only_calls_it_calls() -> None:
    guide = Guide(GRAMMARS.matcher(CALLS), TOKENIZER.vocab_size)
    assert not guide.allows(token("the"))
    guide.look()
    assert guide.mask is not None
    assert guide.mask.any()


def test_a_call_that_was_begun_elsewhere_is_decided() -> None:
    begun: Matcher = GRAMMARS.matcher(EITHER, "<tool_call>1")
    assert not begun.undecided
    assert not Guide(begun, TOKENIZER.vocab_size).undecided
