"""The replica of least peak-sensitive latency × outstanding requests, as Finagle and Linkerd balance load."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.queueing import FirstComeFirstServed
from router.values.situation import Candidate, Situation


class PeakEwma(FirstComeFirstServed):
    """See the module; the average is `router.signals.peak_latency`."""

    def pick(self, candidates: Sequence[Candidate], situation: Situation) -> Candidate:  # noqa: ARG002
        return min(candidates, key=lambda c: (c.peak_latency_s * (c.load * c.slots + 1.0), c.info.remote))


POLICY = PeakEwma()
