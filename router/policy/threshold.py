"""The device while one of its slots is free, the upstream when it is full: the usual queue threshold."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.queueing import FirstComeFirstServed
from router.values.situation import Candidate, Situation


class Threshold(FirstComeFirstServed):
    """See the module."""

    def pick(self, candidates: Sequence[Candidate], situation: Situation) -> Candidate:  # noqa: ARG002
        return min(candidates, key=lambda c: (not c.prediction.free, c.info.remote, c.load))


POLICY = Threshold()
