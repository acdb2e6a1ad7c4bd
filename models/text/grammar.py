"""Constraints on an answer as bits over a vocabulary: which tokens may come next. By llguidance, which both tiers use.

What a caller sends here may be hostile. Its size and depth are bounded before it is parsed, llguidance bounds the work
of compiling it and of each mask, and a walk of a few tokens shows before the request is taken whether a grammar stays
within those bounds.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from models.text.json_options import LENIENT_OPTIONS, OF_OTHERS, STRICT_OPTIONS, as_written
from models.text.json_patterns import in_lark, without_unknown_patterns
from models.text.turns import TurnsThread
from router.base.errors import InvalidRequest, RequestFailed
from router.values.constraint import Constraint, ConstraintKind

if TYPE_CHECKING:
    import llguidance

    from models.text.tokenizer import Tokenizer

MAX_SOURCE_CHARS = {
    ConstraintKind.JSON_SCHEMA: 65_536,
    ConstraintKind.REGEX: 4_096,
    ConstraintKind.CHOICE: 65_536,
    ConstraintKind.LARK: 65_536,
    ConstraintKind.GBNF: 65_536,
}
MAX_DEPTH = 64
_SMALL_CHARS = 8_192
_MOST_KEPT, _MOST_KEPT_CHARS = 64, 262_144
_WALK_TOKENS = 8
_SAID_S = 2.0  # of work for the text that a continuation stands behind; ten thousand tokens take a quarter of it
_HELD_S = 0.01  # that one token may hold the interpreter's lock, and with it everybody; it takes 0.0001 as a rule
_ERROR_CHARS = 300
_NO_ANSWER = "no answer of this model matches it"
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 20_000,  # a schema of some thousand optional properties
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 200_000,  # about 15 ms
    "step_max_items": 50_000,  # about 3 ms
    "max_lexer_states": 16_000,  # about 2 KB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class Matcher:
    """The state of one answer under its constraint. Not thread-safe.

    Args:
        opener: `Constraint.opener`.

    Attributes:
        failure: why it can say nothing any more; empty while it can.
        undecided: its first token tells whether it is a call or an answer.
    """

    def __init__(
        self,
        inner: llguidance.LLMatcher,
        tokenizer: llguidance.LLTokenizer,
        failed: Callable[[], object],
        opener: str = "",
    ) -> None:
        self._inner = inner
        self._tokenizer = tokenizer
        self._failed = failed
        self._opener = opener.encode()
        self._answers = False
        self.undecided = bool(opener)
        self.failure = ""

    @property
    def complete(self) -> bool:
        """Whether the answer is whole, and nothing may follow it."""
        return not self.failure and self._inner.is_stopped()

    def mask(self, vocab_size: int) -> npt.NDArray[np.uint8]:
        """Return which tokens may come next: uint8 (ceil(vocab_size / 8),), a bit each, the lowest one first.

        Raises:
            RequestFailed: the constraint went past its bounds of work, or no token is left.
        """
        packed = np.frombuffer(b"" if self.failure else self._inner.compute_bitmask(), np.uint8)
        self._note()
        bits = np.zeros(-(-vocab_size // 8), np.uint8)
        known = min(bits.size, packed.size)
        bits[:known] = packed[:known]
        if known and known == bits.size and vocab_size % 8:
            bits[-1] &= (1 << vocab_size % 8) - 1
        if self._answers:
            bits = self._without_calls(bits)
        if not self.failure and not bits.any():
            self.failure = "no token of this model's vocabulary may come next"
        if self.failure:
            raise RequestFailed(f"the constraint of this answer cannot be followed any further: {self.failure}")
        return bits

    def allows(self, token: int) -> bool:
        """Whether `mask` would allow a token, which costs a hundredth of it. What cannot be followed allows none."""
        if self.failure or token >= self._tokenizer.vocab_size:
            return False
        allowed = self._inner.validate_tokens([token]) == 1
        if allowed:  # where text is forced, a mask has but the first token of its usual cut
            forced = self._inner.compute_ff_tokens()
            allowed = not forced or forced[0] == token
        self._note()
        return allowed and not self.failure and not (self._answers and self._opens(token))

    def answer_instead_of(self, token: int) -> bool:
        """Let no call begin with the first token where the model would begin in words; whether it would."""
        text = self._tokenizer.decode_bytes([token]).lstrip()[:1]
        self._answers = self.undecided and (text.isalnum() or text > b"\x7f")
        return self._answers

    def advance(self, token: int) -> None:
        """Take a token that `mask` allowed; one that takes long is the last: nothing else runs meanwhile."""
        self.undecided = self._answers = False
        began_s = time.thread_time()
        self._inner.consume_token(token)
        held_s = time.thread_time() - began_s
        self._note()
        if held_s > _HELD_S and not self.failure:
            self.failure = f"to take one token took {held_s:.3f} s; make the grammar less ambiguous"

    def advance_text(self, text: str) -> bool:
        """Take text of the answer that was said before, by whomever; whether the constraint allows it in good time."""
        for special in (False, True):  # what opens a call may be a special token
            ids = self._tokenizer.tokenize_str(text, parse_special=special)
            tried = self._inner.deep_copy()
            if _takes(tried, ids) and not tried.is_error():
                self._inner = tried
                self.undecided = False
                return True
        return False

    def _opens(self, token: int) -> bool:
        text = self._tokenizer.decode_bytes([token])
        special = self._tokenizer.is_special_token(token)
        return special or self._opener.startswith(text) or text.startswith(self._opener)

    def _without_calls(self, bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return a mask without what begins a call, or the same where nothing else may come."""
        kept = bits.copy()
        for token in np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist():
            if self._opens(token):
                kept[token >> 3] &= 0xFF ^ (1 << (token & 7))
        return kept if kept.any() else bits

    def _note(self) -> None:
        if self._inner.is_error():
            self.failure = _first_line(self._inner.get_error()) or "it failed"
            self._failed()


class Grammars:
    """Compiles constraints for one vocabulary, in threads of its own, and keeps what it compiled lately. Thread-safe.

    Large constraints have a thread to themselves, and callers take turns in either: however many of them, or of another
    caller's, wait there, a small one is ready in a moment.

    Args:
        load: returns the tokenizer; called once, with the first constraint.
    """

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._loading, self._lock = threading.Lock(), threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, llguidance.LLMatcher] = OrderedDict()
        self._small, self._large = TurnsThread("grammar"), TurnsThread("large-grammar")

    def begin(self, constraint: Constraint, said: str = "", caller: str = "") -> Future[Matcher]:
        """Return what becomes `matcher(constraint, said)`; one that is known is done at once where nothing was said."""
        if constraint in self._compiled and not said:
            done: Future[Matcher] = Future()
            try:
                done.set_result(self.matcher(constraint))
            except InvalidRequest as error:
                done.set_exception(error)
            return done
        lane = self._small if len(constraint.source) + len(said) < _SMALL_CHARS else self._large
        return lane.submit(caller, partial(self.matcher, constraint, said))

    def matcher(self, constraint: Constraint, said: str = "") -> Matcher:
        """Return a matcher that stands behind `said`. Blocks: milliseconds as a rule, a second at worst.

        Args:
            said: text of the answer that is to be continued.

        Raises:
            InvalidRequest: the constraint cannot be compiled, or is too large; or `said` does not match it.
        """
        tokenizer = self._vocabulary()
        with self._lock:
            known = self._compiled.get(constraint)
        if known is None:
            known = _compile(constraint, tokenizer)
            self._keep(constraint, known)
        # What copies build they share: one that went past its bounds leaves no room for the next.
        found = Matcher(known.deep_copy(), tokenizer, lambda: self._forget(constraint), constraint.opener)
        if not said or found.advance_text(said):
            return found
        if constraint.kind is ConstraintKind.JSON_SCHEMA:
            found = Matcher(_compile(constraint, tokenizer, by_others=True), tokenizer, lambda: None)
            if found.advance_text(said):
                return found
        raise InvalidRequest(
            f"`{constraint.param}`: the text that is to be continued does not match this {constraint.kind.value}: "
            "continue an answer under the constraint that it was begun under",
            param=constraint.param,
        )

    def _vocabulary(self) -> llguidance.LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load().for_grammars()
            return self._tokenizer

    def _keep(self, constraint: Constraint, compiled: llguidance.LLMatcher) -> None:
        with self._lock:
            self._compiled[constraint] = compiled
            self._compiled.move_to_end(constraint)
            chars = sum(len(kept.source) for kept in self._compiled)
            while len(self._compiled) > _MOST_KEPT or chars > _MOST_KEPT_CHARS:
                dropped, _ = self._compiled.popitem(last=False)
                chars -= len(dropped.source)

    def _forget(self, constraint: Constraint) -> None:
        with self._lock:
            self._compiled.pop(constraint, None)


def _compile(
    constraint: Constraint, tokenizer: llguidance.LLTokenizer, *, by_others: bool = False
) -> llguidance.LLMatcher:
    import llguidance  # noqa: PLC0415 (7 MB that only constrained requests need)

    _check_size(constraint)
    limits = llguidance.LLParserLimits(**_LIMITS)

    def built(form: Constraint) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(tokenizer, _grammar_of(form, by_others), log_level=0, limits=limits)

    compiled = built(constraint)
    if compiled.is_error() and (rest := _enforced(constraint)) != constraint:
        compiled = built(rest)
    if not compiled.is_error():
        _walk(compiled.deep_copy(), tokenizer.vocab_size, constraint)
        compiled.compute_bitmask()  # what it builds for the first mask is copied with it
    if compiled.is_error():
        raise _refusal(constraint, _error_of(compiled))
    return compiled


def _enforced(constraint: Constraint) -> Constraint:
    """Return a constraint without the patterns that cannot be enforced, where it need not say all."""
    if constraint.kind is ConstraintKind.LARK:
        return replace(constraint, source=in_lark(constraint.source))
    if constraint.kind is not ConstraintKind.JSON_SCHEMA or constraint.strict:
        return constraint
    schema = json.loads(constraint.source)
    found = without_unknown_patterns(schema)
    return constraint if found is schema else replace(constraint, source=json.dumps(found))


def _walk(matcher: llguidance.LLMatcher, vocab_size: int, constraint: Constraint) -> None:
    """Take the first few tokens of some answer; what goes past its bounds does so early.

    Raises:
        InvalidRequest: it did, or there is no answer at all.
    """
    for _ in range(_WALK_TOKENS):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:vocab_size]
        if matcher.is_error():
            raise _refusal(constraint, _error_of(matcher))
        allowed = np.flatnonzero(bits)
        if not allowed.size:
            raise _refusal(constraint, _NO_ANSWER)
        matcher.consume_token(int(allowed[allowed.size // 2]))
        if matcher.is_error():
            raise _refusal(constraint, _error_of(matcher))
        if matcher.is_stopped():
            return


def _takes(matcher: llguidance.LLMatcher, ids: list[int]) -> bool:
    """Take tokens one by one, for each of them holds the interpreter's lock; whether all could be, in good time."""
    now_s = time.thread_time()
    end_s = now_s + _SAID_S
    for token in ids:
        began_s = now_s
        if matcher.try_consume_tokens([token]) != 1:
            return False
        now_s = time.thread_time()
        if now_s > end_s or now_s - began_s > _HELD_S:
            return False
    return True


def _check_size(constraint: Constraint) -> None:
    most = MAX_SOURCE_CHARS[constraint.kind]
    if len(constraint.source) > most:
        raise _refusal(constraint, f"it has {len(constraint.source)} characters, at most {most} are compiled")
    depth = _depth(constraint.source)
    if depth > MAX_DEPTH:
        raise _refusal(constraint, f"it nests {depth} levels, at most {MAX_DEPTH} are compiled")


def _depth(source: str) -> int:
    """Return how deep brackets nest, those in texts and character classes included: an upper bound."""
    deepest = level = 0
    for character in source:
        if character in "([{":
            level += 1
            deepest = max(deepest, level)
        elif character in ")]}":
            level = max(0, level - 1)
    return deepest


def _grammar_of(constraint: Constraint, by_others: bool) -> str:
    from llguidance import LLMatcher, regex_to_lark  # noqa: PLC0415 (see `_compile`)

    source = constraint.source
    try:
        if constraint.kind is ConstraintKind.JSON_SCHEMA:
            options: Any = STRICT_OPTIONS if constraint.strict else LENIENT_OPTIONS
            options = {**options, **OF_OTHERS} if by_others else options
            return LLMatcher.grammar_from_json_schema(schema_text(source, by_others=by_others), overrides=options)
        if constraint.kind is ConstraintKind.REGEX:
            # As everywhere but in Unicode's tables, whose newest digits no validator knows: \d is 0 to 9.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(source, 'd')}/")
        if constraint.kind is ConstraintKind.CHOICE:
            return LLMatcher.grammar_from_lark(_choice(json.loads(source)))
        return LLMatcher.grammar_from_lark(_lark_of_gbnf(source) if constraint.kind is ConstraintKind.GBNF else source)
    except (ValueError, RecursionError) as error:
        raise _refusal(constraint, str(error)) from error


def schema_text(source: str, *, by_others: bool = False) -> str:
    """Return a schema as the object that answers are held to; `true` allows everything.

    Args:
        by_others: see `models.text.json_options.as_written`.

    Raises:
        ValueError: it is no JSON, or no schema.
    """
    schema = json.loads(source)
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")  # noqa: TRY004 (one kind of error for whatever is no schema)
    found = as_written(schema, by_others=by_others)
    return source if found is schema else json.dumps(found)


def _choice(options: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options)


def _lark_of_gbnf(source: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark  # noqa: PLC0415 (see `_compile`)

    try:
        return str(gbnf_to_lark(source))
    except (GbnfToLarkError, AssertionError, LookupError) as error:
        raise ValueError(str(error)) from error


def _error_of(matcher: llguidance.LLMatcher) -> str:
    error = matcher.get_error()
    return _NO_ANSWER if error.startswith("NoExtensionBias") else error


def _refusal(constraint: Constraint, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"`{constraint.param}`: this {constraint.kind.value} cannot be enforced: {_first_line(why)}",
        param=constraint.param,
    )


def _first_line(text: str) -> str:
    """Return what a caller needs of an error of llguidance; what follows shows the grammar again."""
    return " ".join(text.split("<state>", maxsplit=1)[0].split())[:_ERROR_CHARS]
