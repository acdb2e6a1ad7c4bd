"""Estimates of the network between two tiers: round trip and throughput, learned from probes and requests."""

from __future__ import annotations

import math

from router.values.link import LinkSnapshot

_MIN_SAMPLE_BYTES = 4096  # below this, time is round trip and scheduling, not throughput
_MIN_TRANSFER_S = 1e-4
_MAX_RTT_S = 60.0


class Link:
    """Estimates of one link. Round trip after Jacobson (RFC 6298: gains 1/8 and 1/4); throughput in log space.

    Args:
        rtt_prior_s, uplink_prior_bytes_per_s: believed until the first observation.
    """

    def __init__(
        self,
        endpoint: str,
        rtt_prior_s: float = 0.05,
        uplink_prior_bytes_per_s: float = 1.25e6,
    ) -> None:
        for name, value in (
            ("rtt_prior_s", rtt_prior_s),
            ("uplink_prior_bytes_per_s", uplink_prior_bytes_per_s),
        ):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"link {endpoint}: {name} is {value}, it must be a positive number")
        self.endpoint = endpoint
        self._rtt_s = rtt_prior_s
        self._deviation_s = rtt_prior_s / 2
        self._rtt_is_prior = True
        self._log_up = math.log(uplink_prior_bytes_per_s)
        self._snapshot: LinkSnapshot | None = None

    def observe_rtt(self, rtt_s: float) -> None:
        """Learn from one small exchange: a health poll, a TCP handshake. Impossible values are ignored."""
        if not (math.isfinite(rtt_s) and 0 <= rtt_s <= _MAX_RTT_S):
            return
        if self._rtt_is_prior:
            self._rtt_s, self._deviation_s = rtt_s, rtt_s / 2
        else:
            self._deviation_s += (abs(rtt_s - self._rtt_s) - self._deviation_s) / 4
            self._rtt_s += (rtt_s - self._rtt_s) / 8
        self._rtt_is_prior = False
        self._snapshot = None

    def observe_transfer(self, sent_bytes: int, transfer_s: float) -> None:
        """Learn the uplink from a request body.

        Args:
            transfer_s: from its first to its last byte: the exchange less one round trip and the server's work. Small
                bodies and times at or below 0, which that difference can come to, teach nothing.
        """
        if sent_bytes >= _MIN_SAMPLE_BYTES and math.isfinite(transfer_s) and transfer_s > 0:
            self._log_up = _smoothed(self._log_up, sent_bytes / max(transfer_s, _MIN_TRANSFER_S))
            self._snapshot = None

    def snapshot(self) -> LinkSnapshot:
        """Return the estimates now. Cheap: cached until the next observation."""
        if self._snapshot is None:
            self._snapshot = LinkSnapshot(
                endpoint=self.endpoint,
                rtt_s=self._rtt_s,
                rtt_hi_s=self._rtt_s + 2 * self._deviation_s,
                uplink_bytes_per_s=math.exp(self._log_up),
            )
        return self._snapshot


def _smoothed(log_rate: float, bytes_per_s: float) -> float:
    """Return the log rate moved a quarter of the way to a sample, by a factor of e at most."""
    step = max(-1.0, min(1.0, math.log(bytes_per_s) - log_rate))
    return log_rate + step / 4
