"""Which running answers can no longer keep their deadline, so that their slot is worth more to those who wait."""

from __future__ import annotations

from collections.abc import Iterable

from router.signals.in_flight import Attempt

LOST = 0.03
"""Below this probability of ending in time an answer is lost."""


def give_up_lost(attempts: Iterable[Attempt], now_s: float) -> int:
    """End those whose promise allows it and is lost; returns how many did."""
    lost = [a for a in attempts if a.give_up is not None and chance_left(a, now_s) < LOST]
    return sum(a.give_up() for a in lost if a.give_up is not None)


def chance_left(attempt: Attempt, now_s: float) -> float:
    """P(its last token comes before its answer is worth nothing), by its length's distribution and its own pace."""
    length = attempt.length
    if length is None:
        return 1.0
    told = attempt.choice.candidate.prediction
    left_s = attempt.ends_s - now_s
    if attempt.first_at_s is None:
        left_s -= max(0.0, told.prefill_s + told.network_s - (now_s - attempt.sent_at_s))
    pace_s = attempt.pace_s or told.tpot_s
    return length.left_within(attempt.tokens, left_s / pace_s) if left_s > 0.0 else 0.0
