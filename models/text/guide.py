"""Which tokens may come next in answers under constraints: asked of the token that a model chose, found for all others.

A model that was told what to write mostly chooses what its constraint allows. So its own choice is asked about first,
which takes a hundredth of what it takes to find every token that may come (a mask: some tenths of a millisecond as a
rule, and hundreds of them where a grammar is made to cost). Only where it is refused a mask is found, by a thread, and
the answer is drawn on once it is there: no step finds one. Answers whose choices are mostly refused have their masks
begun when their last tokens are drawn, and found while the model runs. Those whose constraint takes long are looked at
in a thread that they have to themselves, and no step waits for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from models.text.grammar import Matcher
from router.base.errors import RequestFailed, in_words

T = TypeVar("T")

_SLOW_S = 0.003
_MOST_S = 0.2  # a grammar whose masks take longer is ambiguous, and they grow with each token
_DEAR_S = 0.0005  # to ask costs as much as a mask then, which a thread can find: long texts are forced
_MOSTLY = 0.5  # of an answer's tokens
_NEWEST = 0.2  # weight of the newest one

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BIAS_OF_BYTE: npt.NDArray[np.float32] = np.where(_BITS, np.float32(0), np.float32(-np.inf))
"""float32 (256, 8): what the eight tokens of one byte of a mask have added to their logits."""


class Guide:
    """One answer under its constraint. Between `Lookahead.begin` and `ready` it belongs to a thread.

    Args:
        vocab_size: of the logits that it masks.
        proposes: whether tokens are drawn before it is known which are allowed (see `asks`).

    Attributes:
        mask: uint8 (ceil(vocab_size / 8),): the tokens that may come next; see `Matcher.mask`. None while that was not
            found out.
        failure: why nothing can be said any more; empty while it can.
        slow: what was last asked or looked for took long: its next look is not to be waited for.
        undecided: its first token, as the model would draw it without the constraint, is asked about whatever the
            sampling is: it tells whether a call comes or an answer. A model that was told of tools but not of a schema
            would begin its answer in words, and of what the constraint leaves over calls are the likelier.
    """

    def __init__(self, matcher: Matcher, vocab_size: int, *, proposes: bool = True) -> None:
        self.failure = ""
        self.slow = False
        self.mask: npt.NDArray[np.uint8] | None = None
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._proposes = proposes
        self.undecided = matcher.undecided
        self._refused = 0.0 if self.undecided else _MOSTLY  # of the newest tokens; the first one is looked ahead for
        self._agreed = self._heard = False
        self._took_s = 0.0
        self._untaken: int | None = None
        self._in_nobodys_hands = threading.Event()
        self._in_nobodys_hands.set()

    @property
    def asks(self) -> bool:
        """Whether its next token is proposed first, and a mask found only where that is refused."""
        return (self._proposes or self.undecided) and not self.slow and self._refused < _MOSTLY

    @property
    def ready(self) -> bool:
        """Whether no thread looks for what may come next: its attributes can be read, and it can be asked."""
        return self._in_nobodys_hands.is_set()

    @property
    def complete(self) -> bool:
        """Whether the answer is whole, and nothing may follow it. Of a slow one that is known once it is ready."""
        return self._untaken is None and not self.failure and self._matcher.complete

    def allows(self, token: int) -> bool:
        """Whether a token of the vocabulary may come next, exactly as `mask` says it. Only of one that is ready."""
        if self.mask is None:
            allowed = self._bounded(lambda: self._matcher.allows(token)) is True
            if self._took_s > _DEAR_S:
                self._refused = 1.0  # as if it mostly was: for some tokens, no step asks
        else:
            allowed = bool(self.mask[token >> 3] >> (token & 7) & 1)
        self._agreed = allowed
        if self.undecided and not self._heard:
            self._heard = True  # and no later one: they are what it would rather not begin with
            if not allowed and self._matcher.answer_instead_of(token):
                self.mask = None
        return allowed and not self.failure

    def advance(self, token: int) -> None:
        """Take a token that is allowed; a slow one takes it with its next look."""
        self.mask, self.undecided = None, False
        self._refused += _NEWEST * ((not self._agreed) - self._refused)
        self._agreed = False
        if self.slow:
            self._untaken = token
        else:
            self._matcher.advance(token)

    def hand_over(self) -> None:
        """It is about to belong to a thread."""
        self._in_nobodys_hands.clear()

    def wait(self, most_s: float) -> bool:
        """Wait until it is ready, at most so long; whether it is."""
        return self._in_nobodys_hands.wait(most_s)

    def look(self) -> None:
        """Find out what may come next."""
        self._bounded(self._look)
        self._in_nobodys_hands.set()

    def _look(self) -> None:
        token, self._untaken = self._untaken, None
        if token is not None:
            self._matcher.advance(token)
        if not self._matcher.complete:
            self.mask = self._matcher.mask(self._vocab_size)

    def _bounded(self, work: Callable[[], T]) -> T | None:
        """Do what a constraint may make cost; None where that was too much, or failed."""
        began_s, done = time.thread_time(), None
        try:
            done = work()
        except RequestFailed as error:
            self.failure = error.message
        except Exception as error:  # noqa: BLE001  whatever it is ends this answer, and no other
            self.failure = f"its constraint failed: {in_words(error)}"
        self._took_s = time.thread_time() - began_s
        self.slow = self._took_s > _SLOW_S
        if self._took_s > _MOST_S and not self.failure:
            self.failure = (
                "the constraint of this answer cannot be followed any further: to find its next token took "
                f"{self._took_s:.2f} s; make the grammar less ambiguous"
            )
        return done


class Lookahead:
    """The threads in which guides look ahead; they begin with the first one, and end when this is dropped."""

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="slow-masks")

    def begin(self, guides: Iterable[Guide]) -> None:
        """Let those that do not ask first find out what may follow their newest tokens."""
        self.find([guide for guide in guides if not guide.asks])

    def find(self, guides: Iterable[Guide]) -> None:
        """Let each find out what may follow its newest token. All of them are ready."""
        quick = []
        for guide in guides:
            guide.hand_over()
            if guide.slow:
                self._slow.submit(guide.look)
            else:
                quick.append(guide)
        if quick:
            self._quick.submit(_look_in_turn, quick)

    @staticmethod
    def wait(guides: Iterable[Guide], most_s: float) -> None:
        """Wait for those that are not slow, at most so long in all."""
        end_s = time.monotonic() + most_s
        for guide in guides:
            if not guide.slow and not guide.ready:
                guide.wait(max(0.0, end_s - time.monotonic()))


def _look_in_turn(guides: list[Guide]) -> None:
    for guide in guides:
        guide.look()
