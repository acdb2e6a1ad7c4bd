"""What a request would cost on a replica, and what that is predicted from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of a replica, in tokens and bytes still to process."""

    prompt_tokens: int
    answer_tokens: int
    prompt_bytes: int = 0


@dataclass(frozen=True, slots=True)
class InFlightLoad:
    """What this tier itself has sent to a replica and not seen the end of: known at once, without a report.

    Attributes:
        left_tokens: tokens each request is still expected to generate, ascending.
        unopened, unopened_prefill_tokens, unopened_decode_tokens: the part that no snapshot can show yet.
    """

    requests: int = 0
    prefill_tokens: int = 0
    left_tokens: Sequence[int] = ()
    unopened: int = 0
    unopened_prefill_tokens: int = 0
    unopened_decode_tokens: int = 0


NOTHING_IN_FLIGHT = InFlightLoad()


@dataclass(frozen=True, slots=True)
class TtftFeatures:
    """What a request found when it was sent: effective tokens to prefill, and the network's share of its TTFT."""

    prefill_tokens: float
    network_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds from now. `_high_s` is the figure expected to hold nine times in ten.

    Attributes:
        wait_s: until a slot is free.
        tpot_s: one decode step at the batch size expected.
        free: the replica can start at once.
    """

    wait_s: float
    ttft_s: float
    ttft_high_s: float
    tpot_s: float
    tpot_high_s: float
    finish_s: float
    finish_high_s: float
    free: bool

    def finish_with(self, answer_tokens: int) -> float:
        """`finish_s` for another answer length."""
        return self.ttft_s + max(answer_tokens - 1, 0) * self.tpot_s

    def finish_high_with(self, answer_tokens: int) -> float:
        """`finish_high_s` for another answer length."""
        return self.ttft_high_s + max(answer_tokens - 1, 0) * self.tpot_high_s
