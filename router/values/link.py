"""The network between two tiers, as a frozen snapshot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkSnapshot:
    """A frozen snapshot of a link.

    Attributes:
        rtt_s: smoothed round trip.
        rtt_hi_s: its upper estimate: smoothed + 2 mean deviations (about p90 of a noisy link).
        uplink_bytes_per_s: throughput towards the upstream; answers are too small for the way back to matter.
    """

    endpoint: str
    rtt_s: float
    rtt_hi_s: float
    uplink_bytes_per_s: float

    def request_s(self, sent_bytes: int) -> float:
        """Time from sending a body of `sent_bytes` until the first byte can be back, without the server's work."""
        return self.rtt_s + sent_bytes / self.uplink_bytes_per_s

    def request_hi_s(self, sent_bytes: int) -> float:
        """Upper estimate of `request_s`; throughput is taken at two thirds."""
        return self.rtt_hi_s + 1.5 * sent_bytes / self.uplink_bytes_per_s
