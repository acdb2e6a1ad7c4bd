"""Estimates of the network between two tiers: round trip, both directions' throughput, and what a connection costs.

The round trip is learnt from polls, after Jacobson (RFC 6298); its deviation grows while none is answered. The uplink
is a factor on the configured throughput, learnt from request bodies in log space (`level.py`): it ages back to what was
configured, and its upper time is the 0.9 quantile of what is believed and of the noise of one body together. Answers
are too slow to measure a downlink by, unless it bounds them: a stream that got more than was believed possible raises
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from router.base.clock import Clock, MonotonicClock
from router.signals.level import Level
from router.signals.upper import NORMAL_90
from router.values.link import LinkSnapshot

_MIN_SAMPLE_BYTES = 4096  # below this, time is round trip and scheduling, not throughput
_MIN_TRANSFER_S = 1e-4
_SLOW_BYTES_PER_S = 1.0e6
_MAX_RTT_S = 60.0
# The round trip is polled every second; without an answer for so long, its deviation counts twice.
_RTT_STALE_S = 30.0
# A snapshot stands for so long where nothing was observed: ageing is slower.
_SNAPSHOT_LASTS_S = 1.0
_SMOOTHING = 0.25
_MIN_ANSWER_TOKENS = 8
# A burst that was buffered on the way says nothing of throughput.
_MIN_DOWNLOAD_S = 0.05
_DOWN_HALF_LIFE_S = 600.0


@dataclass(frozen=True, slots=True)
class LinkPrior:
    """What is believed of a link before anything was observed, and what its bytes cost.

    Attributes:
        connect_round_trips: to open a connection: 1 for TCP, 2 with TLS 1.3 on it.
        token_bytes: of an answer, with what the network puts around it: one event of a streamed chat.
        price_per_byte: either way; 0: it is not metered.
    """

    rtt_s: float = 0.05
    uplink_bytes_per_s: float = 1.25e6
    downlink_bytes_per_s: float = 1.25e7
    connect_round_trips: int = 1
    token_bytes: float = 300.0
    price_per_byte: float = 0.0


class Link:
    """Estimates of one link.

    Args:
        clock: what ageing is measured on.

    Raises:
        ValueError: a prior is no positive number, or the price is negative.
    """

    def __init__(self, endpoint: str, prior: LinkPrior | None = None, clock: Clock | None = None) -> None:
        prior = prior or LinkPrior()
        for name in ("rtt_s", "uplink_bytes_per_s", "downlink_bytes_per_s", "token_bytes"):
            value = getattr(prior, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"link {endpoint}: {name} is {value}, it must be a positive number")
        if not (math.isfinite(prior.price_per_byte) and prior.price_per_byte >= 0):
            raise ValueError(f"link {endpoint}: price_per_byte is {prior.price_per_byte}, it must be 0 or more")
        self.endpoint = endpoint
        self._prior = prior
        self._now_s = (clock or MonotonicClock()).now_s
        self._rtt_s = prior.rtt_s
        self._deviation_s = prior.rtt_s / 2
        self._rtt_at_s: float | None = None
        self._slower = Level()
        self._setup_s: float | None = None
        self._down_log = 0.0
        self._down_at_s = 0.0
        self._token_bytes = prior.token_bytes
        self._packs_to = 1.0
        self._snapshots: tuple[float, LinkSnapshot, LinkSnapshot] | None = None

    def observe_rtt(self, rtt_s: float) -> None:
        """Learn from one small exchange: a health poll, a TCP handshake. Impossible values are ignored."""
        if not (math.isfinite(rtt_s) and 0 <= rtt_s <= _MAX_RTT_S):
            return
        if self._rtt_at_s is None:
            self._rtt_s, self._deviation_s = rtt_s, rtt_s / 2
        else:
            self._deviation_s += (abs(rtt_s - self._rtt_s) - self._deviation_s) / 4
            self._rtt_s += (rtt_s - self._rtt_s) / 8
        self._rtt_at_s = self._now_s()
        self._snapshots = None

    def observe_transfer(self, sent_bytes: int, transfer_s: float, body_bytes: int = 0) -> None:
        """Learn the uplink from a request body.

        Args:
            sent_bytes: as they went over the link; body_bytes: before they were compressed, as predictions know them.
            transfer_s: from its first to its last byte: the exchange less one round trip and the server's work. Small
                bodies and times at or below 0, which that difference can come to, teach nothing.
        """
        if max(sent_bytes, body_bytes) >= _MIN_SAMPLE_BYTES:
            share = min(sent_bytes / body_bytes, 1.0) if body_bytes else 1.0
            self._packs_to += _SMOOTHING * (share - self._packs_to)
            self._snapshots = None
        if sent_bytes >= _MIN_SAMPLE_BYTES and math.isfinite(transfer_s) and transfer_s > 0:
            now_s = self._now_s()
            prior_s = sent_bytes / self._prior.uplink_bytes_per_s
            took_log = math.log(max(transfer_s, _MIN_TRANSFER_S) / prior_s)
            self._slower.observe(took_log - self._slower.log(now_s), now_s)
            self._snapshots = None

    def observe_connect(self, connect_s: float) -> None:
        """Learn from a new connection: TCP and TLS together."""
        if math.isfinite(connect_s) and 0 < connect_s <= _MAX_RTT_S:
            before_s = self._setup_s
            self._setup_s = connect_s if before_s is None else before_s + _SMOOTHING * (connect_s - before_s)
            self._snapshots = None

    def observe_answer(self, wire_bytes: int, tokens: int, lasted_s: float) -> None:
        """Learn from a whole stream: what a token takes, and that so much came in that time."""
        if tokens < _MIN_ANSWER_TOKENS or wire_bytes <= 0:
            return
        self._token_bytes += _SMOOTHING * (min(wire_bytes / tokens, 1e5) - self._token_bytes)
        if math.isfinite(lasted_s) and lasted_s >= _MIN_DOWNLOAD_S:
            now_s = self._now_s()
            at_least_log = math.log(wire_bytes / lasted_s / self._prior.downlink_bytes_per_s)
            if at_least_log > self._down(now_s):
                self._down_log, self._down_at_s = at_least_log, now_s
        self._snapshots = None

    def snapshot(self, *, warm: bool = True) -> LinkSnapshot:
        """Return the estimates now. Cheap: cached until the next observation.

        Args:
            warm: a connection is open and idle; else the request pays for a new one.
        """
        now_s = self._now_s()
        found = self._snapshots
        if found is None or now_s - found[0] > _SNAPSHOT_LASTS_S:
            found = self._snapshots = (now_s, *self._of(now_s))
        return found[1] if warm else found[2]

    def _of(self, now_s: float) -> tuple[LinkSnapshot, LinkSnapshot]:
        slower = self._slower
        slower_log = slower.log(now_s)
        unheard_s = 0.0 if self._rtt_at_s is None else max(0.0, now_s - self._rtt_at_s)
        uplink = self._prior.uplink_bytes_per_s * math.exp(-slower_log) / self._packs_to
        setup_s = self._prior.connect_round_trips * self._rtt_s if self._setup_s is None else self._setup_s
        warm = LinkSnapshot(
            endpoint=self.endpoint,
            rtt_s=self._rtt_s,
            rtt_hi_s=self._rtt_s + 2 * self._deviation_s * (1.0 + unheard_s / _RTT_STALE_S),
            uplink_bytes_per_s=uplink,
            uplink_low_bytes_per_s=uplink * math.exp(-NORMAL_90 * slower.sigma(now_s)),
            downlink_bytes_per_s=self._prior.downlink_bytes_per_s * math.exp(self._down(now_s)),
            token_bytes=self._token_bytes,
            price_per_byte=self._prior.price_per_byte,
            pessimism_log=slower.pessimism(now_s),
        )
        return warm, msgspec.structs.replace(warm, setup_s=setup_s)

    @property
    def slow(self) -> bool:
        """Whether its uplink is worth the time that it takes to compress what is sent."""
        return self._prior.uplink_bytes_per_s * math.exp(-self._slower.log(self._now_s())) < _SLOW_BYTES_PER_S

    def _down(self, now_s: float) -> float:
        """Return log(downlink / configured), which is relaxed to 0."""
        return self._down_log * math.pow(0.5, (now_s - self._down_at_s) / _DOWN_HALF_LIFE_S)
