"""Which tokens may come next in answers under constraints, found out beside the steps of their model.

A mask takes a tenth of a millisecond as a rule, and some hundred where a grammar is made to cost. No step computes one:
those for the next tokens are begun when the last ones are drawn, and found while the model runs. Answers whose masks
take long have a thread to themselves, and no step waits for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from models.text.grammar import Matcher
from router.base.errors import RequestFailed, in_words

_SLOW_S = 0.003
_MOST_S = 0.2  # a grammar whose masks take longer is ambiguous, and they grow with each token

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BIAS_OF_BYTE: npt.NDArray[np.float32] = np.where(_BITS, np.float32(0), np.float32(-np.inf))
"""float32 (256, 8): what the eight tokens of one byte of a mask have added to their logits."""


class Guide:
    """One answer under its constraint. Between `Lookahead.begin` and `ready` it belongs to a thread.

    Args:
        vocab_size: of the logits that it masks.

    Attributes:
        mask: uint8 (ceil(vocab_size / 8),): the tokens that may come next, as of the last look; see `Matcher.mask`.
        failure: why nothing can be said any more; empty while it can.
        slow: the last look took long: its next one is not to be waited for.
    """

    def __init__(self, matcher: Matcher, vocab_size: int) -> None:
        self.failure = ""
        self.slow = False
        self.mask: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._untaken: int | None = None
        self._looked = threading.Event()

    @property
    def ready(self) -> bool:
        """Whether it is known what may come next, or that nothing may, or that nobody can say."""
        return self._looked.is_set()

    @property
    def complete(self) -> bool:
        """Whether the answer is whole, and nothing may follow it. Of a slow one that is known once it is ready."""
        return self._untaken is None and not self.failure and self._matcher.complete

    def advance(self, token: int) -> None:
        """Take a token that `mask` allowed; a slow one takes it with its next look."""
        if self.slow:
            self._untaken = token
        else:
            self._matcher.advance(token)

    def forget(self) -> None:
        """What was known is of no use any more, or not yet found out."""
        self._looked.clear()

    def wait(self, most_s: float) -> bool:
        """Wait until it is ready, at most so long; whether it is."""
        return self._looked.wait(most_s)

    def look(self) -> None:
        """Find out what may come next."""
        began_s = time.thread_time()
        try:
            self._look()
        except RequestFailed as error:
            self.failure = error.message
        except Exception as error:  # noqa: BLE001  whatever it is ends this answer, and no other
            self.failure = f"its constraint failed: {in_words(error)}"
        took_s = time.thread_time() - began_s
        self.slow = took_s > _SLOW_S
        if took_s > _MOST_S and not self.failure:
            self.failure = (
                "the constraint of this answer cannot be followed any further: to find its next token took "
                f"{took_s:.2f} s; make the grammar less ambiguous"
            )
        self._looked.set()

    def _look(self) -> None:
        token, self._untaken = self._untaken, None
        if token is not None:
            self._matcher.advance(token)
        if not self._matcher.complete:
            self.mask = self._matcher.mask(self._vocab_size)


class Lookahead:
    """The threads in which guides look ahead; they begin with the first one, and end when this is dropped."""

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="slow-masks")

    def begin(self, guides: Iterable[Guide]) -> None:
        """Let each find out what may follow its newest token."""
        quick = []
        for guide in guides:
            guide.forget()
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
