"""The network between two tiers, as a frozen snapshot."""

from __future__ import annotations

from router.base.structs import FrozenStruct


class LinkSnapshot(FrozenStruct, frozen=True):
    """A frozen snapshot of a link.

    Attributes:
        rtt_s: smoothed round trip.
        rtt_hi_s: its upper estimate: smoothed + 2 mean deviations (about p90 of a noisy link).
        uplink_bytes_per_s: throughput towards the upstream; uplink_low_bytes_per_s: its lower estimate, kept nine times
            in ten, two thirds of it where none is given; downlink_bytes_per_s: back.
        token_bytes: what one token of an answer takes on the way back.
        setup_s: what a new connection costs before a request can be sent (TCP, and TLS on it); 0 where one is warm.
        price_per_byte: money a byte costs, either way, in the unit of the configuration; 0: it is not metered.
        pessimism_log: by how much the uplink is believed slower than it has been or was said to be.
    """

    endpoint: str
    rtt_s: float
    rtt_hi_s: float
    uplink_bytes_per_s: float
    downlink_bytes_per_s: float = 1.25e7
    token_bytes: float = 300.0
    setup_s: float = 0.0
    price_per_byte: float = 0.0
    pessimism_log: float = 0.0
    uplink_low_bytes_per_s: float = 0.0

    @property
    def metered(self) -> bool:
        """Whether bytes on it cost money."""
        return self.price_per_byte > 0

    def request_s(self, sent_bytes: int) -> float:
        """Time from sending a body of `sent_bytes` until the first byte can be back, without the server's work."""
        return self.rtt_s + self.setup_s + sent_bytes / self.uplink_bytes_per_s

    def request_hi_s(self, sent_bytes: int) -> float:
        """Upper estimate of `request_s`."""
        low = self.uplink_low_bytes_per_s or self.uplink_bytes_per_s / 1.5
        return self.rtt_hi_s + 1.5 * self.setup_s + sent_bytes / low

    def token_s(self, streams: int) -> float:
        """Least time between two tokens of one answer where `streams` of them share the way back."""
        return self.token_bytes * max(streams, 1) / self.downlink_bytes_per_s

    def price(self, sent_bytes: int, answer_tokens: float) -> float:
        """Money that a request and its answer cost on the link."""
        return self.price_per_byte * (sent_bytes + answer_tokens * self.token_bytes)
