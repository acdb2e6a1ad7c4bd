"""Peak-sensitive moving averages of response times, as the policy `peak-ewma` ranks by.

    average = max(sample, average · w + sample · (1 − w)),   w = exp(−elapsed / τ)

A slow answer counts at once, quick ones bring it down slowly (Finagle's `p2cPeakEwma`).
"""

from __future__ import annotations

import math

_DECAY_S = 10.0


class PeakLatency:
    """By replica. One writer, the dispatcher."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}

    def observe(self, replica_id: str, now_s: float, took_s: float) -> None:
        """Learn from one response: seconds from sending to its end."""
        known = self._known.get(replica_id)
        if known is not None and took_s < known[0]:
            weight = math.exp(-(now_s - known[1]) / _DECAY_S)
            took_s = known[0] * weight + took_s * (1.0 - weight)
        self._known[replica_id] = (took_s, now_s)

    def of(self, replica_id: str) -> float:
        """Seconds; 0 for a replica that never answered, so that it is tried."""
        known = self._known.get(replica_id)
        return 0.0 if known is None else known[0]

    def keep_only(self, replica_ids: set[str]) -> None:
        """Forget replicas that are gone."""
        self._known = {name: known for name, known in self._known.items() if name in replica_ids}
