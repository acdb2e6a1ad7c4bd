"""How long answers would have become that the log shows only the begin of.

An answer that its model ended is known. One that was cut, broke off, was left by its caller or never began is censored:
it would have gone on from there. Its length is drawn from the product-limit estimate of the log's answers (Kaplan and
Meier, 1958), given that it outlasted what was seen. Callers who set a deadline often know how long an answer they want,
so answers of a like deadline are estimated together where there are enough of them.
"""

from __future__ import annotations

import bisect
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from router.replay.log import LoggedRequest

_LEAST_ENDED = 30
_BUCKET = 1.5  # deadlines within this factor are alike


@dataclass(frozen=True, slots=True)
class Lengths:
    """One length for each request of a log.

    Attributes:
        tokens: in the order of the requests.
        drawn: how many of them were drawn.
        beyond: how many of those outlasted every answer that was seen to end; they are taken to be as long as that one,
            or as what was seen of them.
    """

    tokens: tuple[int, ...]
    drawn: int
    beyond: int


class Survival:
    """S(n) = Π over lengths l ≤ n of 1 − ended(l) / at_risk(l): the share of answers longer than n tokens."""

    def __init__(self, seen: Sequence[tuple[int, bool]]) -> None:
        """Estimate from pairs of tokens seen and whether the answer ended there."""
        self._lengths: list[int] = []
        self._left: list[float] = []
        ordered = sorted(seen)
        at_risk, left, index = len(ordered), 1.0, 0
        while index < len(ordered):
            length = ordered[index][0]
            count = ended_here = 0
            while index < len(ordered) and ordered[index][0] == length:
                ended_here += ordered[index][1]
                count += 1
                index += 1
            if ended_here:
                left *= 1.0 - ended_here / at_risk
                self._lengths.append(length)
                self._left.append(left)
            at_risk -= count
        self.longest = self._lengths[-1] if self._lengths else 0

    def share_beyond(self, tokens: int) -> float:
        index = bisect.bisect_right(self._lengths, tokens) - 1
        return 1.0 if index < 0 else self._left[index]

    def draw(self, beyond_tokens: int, uniform: float) -> int | None:
        """Draw a length above `beyond_tokens`; None where it outlasts all that was seen to end.

        Args:
            uniform: in [0, 1).
        """
        level = self.share_beyond(beyond_tokens) * (1.0 - uniform)
        start = bisect.bisect_right(self._lengths, beyond_tokens)
        for index in range(start, len(self._left)):
            if self._left[index] < level or self._left[index] <= 0.0:
                return self._lengths[index]
        return None


def lengths_of(requests: Sequence[LoggedRequest], seed: int = 0) -> Lengths:
    """Return how long each answer is, or is taken to be."""
    everyone = Survival([_seen(request) for request in requests])
    groups: dict[int | None, list[tuple[int, bool]]] = defaultdict(list)
    for request in requests:
        groups[_bucket(request)].append(_seen(request))
    curves = {
        key: Survival(seen) if sum(ended for _, ended in seen) >= _LEAST_ENDED else everyone
        for key, seen in groups.items()
    }
    chance = random.Random(seed)  # noqa: S311 - no secret
    tokens, drawn, beyond = [], 0, 0
    for request in requests:
        uniform = chance.random()  # drawn for each, so that one request's fate changes no other's length
        if request.ended:
            tokens.append(max(request.tokens, 1))
            continue
        if _reached_own_cap(request):
            tokens.append(max(request.tokens, request.max_tokens or 1))
            continue
        drawn += 1
        length = curves[_bucket(request)].draw(request.tokens, uniform)
        if length is None:
            beyond += 1
            length = max(curves[_bucket(request)].longest, request.tokens + 1)
        tokens.append(length)
    return Lengths(tuple(tokens), drawn, beyond)


def _seen(request: LoggedRequest) -> tuple[int, bool]:
    return request.tokens, request.ended


def _reached_own_cap(request: LoggedRequest) -> bool:
    """It ran as long as its caller let it: how long it would have become else does not matter."""
    return request.max_tokens is not None and (request.ignore_eos or request.tokens >= request.max_tokens)


def _bucket(request: LoggedRequest) -> int | None:
    deadline_s = request.objective.deadline_s
    return None if deadline_s is None else round(math.log(deadline_s) / math.log(_BUCKET))
