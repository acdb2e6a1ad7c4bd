"""The replica with the soonest predicted first token, its queue included."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.queueing import FirstComeFirstServed
from router.values.situation import Candidate, Situation


class LowestLatency(FirstComeFirstServed):
    """See the module."""

    def pick(self, candidates: Sequence[Candidate], situation: Situation) -> Candidate:  # noqa: ARG002
        return min(candidates, key=lambda c: c.prediction.ttft_s)


POLICY = LowestLatency()
