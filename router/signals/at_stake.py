"""What those who run on a device stand to lose while a prompt is computed there: it pauses them all.

An answer of which t tokens are out, u seconds after the first, has `left` seconds to its deadline. Held up for h
seconds, it keeps its promises where its length n, of which is known that n > t, lies between two bounds:

    deadline    n ≤ t + (left − h) / pace
    TPOT        u + h + (n − t) · pace ≤ TPOT · (n − 1)      from below where it keeps pace, else from above
    at stake    Σ 2^(priority − the newcomer's) · quality · (P(between them at h = 0) − P(between them at h))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, final

from router.signals.in_flight import Attempt
from router.values.length import LengthCurve

_MOST_LOOKED_AT: Final = 4  # of more, so many stand for all
_MOST_DOUBLINGS: Final = 8  # each priority counts twice the one below
_EVEN: Final = 1e-9  # seconds a token by which a pace and the one that was promised are no different


@final
class _Running:
    """One answer that runs, as a moment finds it.

    Attributes:
        weight: 2^priority · quality.
        kept: P(it keeps its promises, if nothing holds it up).
    """

    __slots__ = ("_behind_s", "_length", "_most", "_out", "_pace_s", "_spare_s", "_tokens", "kept", "weight")

    def __init__(self, attempt: Attempt, length: LengthCurve, now_s: float) -> None:
        told, asked, tokens = attempt.choice.candidate.prediction, attempt.objective, attempt.tokens
        pace_s = attempt.pace_s or told.tpot_s
        left_s, since_first_s = attempt.ends_s - now_s, 0.0
        if asked.late_s is not None:
            left_s -= asked.late_s / 2
        if attempt.first_at_s is not None:
            since_first_s = now_s - attempt.first_at_s
        else:
            begins_s = told.prefill_s + told.network_s - (now_s - attempt.sent_at_s)
            if begins_s > 0.0:
                left_s -= begins_s
        self.weight = attempt.info.quality
        if asked.priority:
            self.weight *= 2.0 ** min(max(asked.priority, -_MOST_DOUBLINGS), _MOST_DOUBLINGS)
        self._length, self._pace_s, self._tokens = length, pace_s, tokens
        self._most = tokens + left_s / pace_s
        self._out = length.within(tokens)
        self._spare_s = self._behind_s = math.inf
        if asked.tpot_s is not None:
            self._spare_s = asked.tpot_s - pace_s
            self._behind_s = since_first_s + asked.tpot_s - max(tokens, 1) * pace_s
        self.kept = self.kept_after(0.0)

    def kept_after(self, held_up_s: float) -> float:
        """P(it keeps its promises, held up for so long)."""
        most, out, spare_s = self._most - held_up_s / self._pace_s, self._out, self._spare_s
        least, short = float(self._tokens), out
        if spare_s < math.inf:
            behind_s = self._behind_s + held_up_s
            if spare_s > _EVEN:
                if behind_s > least * spare_s:
                    least = behind_s / spare_s
                    short = self._length.within(least)
            elif behind_s > 0.0:
                return 0.0
            elif spare_s < -_EVEN:
                most = min(most, behind_s / spare_s)
        if most <= least or out >= 1.0:
            return 0.0
        return (self._length.within(most) - short) / (1.0 - out)


@final
class AtStake:
    """The answers that run on one device at one moment, of which something was promised."""

    __slots__ = ("_running", "_stands_for")

    def __init__(self, attempts: Sequence[Attempt], now_s: float) -> None:
        count = len(attempts)
        looked_at = attempts if count <= _MOST_LOOKED_AT else attempts[:: -(-count // _MOST_LOOKED_AT)]
        self._stands_for = count / len(looked_at) if count else 0.0
        self._running = []
        for attempt in looked_at:
            length = attempt.length
            if length is not None and (attempt.ends_s < math.inf or attempt.objective.tpot_s is not None):
                running = _Running(attempt, length, now_s)
                if running.kept > 0.0:
                    self._running.append(running)

    def lost(self, held_up_s: float, priority: int) -> float:
        """Return what they lose by a prompt of so many seconds, in answers of full quality and that priority."""
        total = 0.0
        for running in self._running:
            less = running.kept - running.kept_after(held_up_s)
            if less > 0.0:
                total += running.weight * less
        if priority:
            total /= 2.0 ** min(max(priority, -_MOST_DOUBLINGS), _MOST_DOUBLINGS)
        return total * self._stands_for
