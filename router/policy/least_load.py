"""The replica with the fewest requests for each of its slots, those that wait for it included."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.queueing import FirstComeFirstServed
from router.values.situation import Candidate, Situation


class LeastLoad(FirstComeFirstServed):
    """See the module."""

    def pick(self, candidates: Sequence[Candidate], situation: Situation) -> Candidate:  # noqa: ARG002
        return min(candidates, key=lambda c: (c.load, c.info.remote))


POLICY = LeastLoad()
