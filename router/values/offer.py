"""What a request is worth on a replica, for the price of contended capacity."""

from __future__ import annotations

import msgspec


class Offer(msgspec.Struct, frozen=True, gc=False):
    """What one request is worth on one replica, and the device-seconds that it takes at a full batch of its rung."""

    replica_id: str
    device: str
    value: float
    cost_s: float
