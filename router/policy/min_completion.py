"""The replica with the soonest predicted last token, its queue included, on any rung of the best quality."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.queueing import FirstComeFirstServed
from router.values.situation import Candidate, Situation


class MinCompletion(FirstComeFirstServed):
    """See the module."""

    def pick(self, candidates: Sequence[Candidate], situation: Situation) -> Candidate:  # noqa: ARG002
        return min(candidates, key=lambda c: c.prediction.finish_s)


POLICY = MinCompletion()
