"""What a newcomer asks of the tier, and what each replica offers it: both are given to imagined tiers."""

from __future__ import annotations

import math

from router.base.structs import FrozenStruct
from router.values.length import LengthCurve


class Offer(FrozenStruct, frozen=True):
    """What one replica offers a request, were its device to run this rung alone.

    Attributes:
        family: of its model; a device may serve several.
        slots: sequences that its device runs at once.
        local: it is on this device, not behind the upstream.
        value: of an answer that is kept: quality · priority weight.
        kept: probability that the promise is kept if it begins now, alone.
        rank: value a device-second; the higher goes first.
        cost_s: device-seconds that it takes at a full batch.
        prefill_s: of its prompt, alone.
        network_s: there and back.
        step_s, slope: a decode step of one sequence, and its relative growth for each further one.
        latest_s: seconds from now until which it is worth beginning.
    """

    replica_id: str
    device: str
    family: str
    slots: int
    local: bool
    value: float
    kept: float
    rank: float
    cost_s: float
    prefill_s: float
    network_s: float
    step_s: float
    slope: float
    latest_s: float


class Ask(FrozenStruct, frozen=True):
    """A newcomer.

    Attributes:
        length: of its answer, in tokens.
        prefill_log_sigma, pace_log_sigma: spread of log(actual / predicted).
        ttft_s, tpot_s, deadline_s: what it asked for, infinite where it did not.
        late_s: how long after its deadline its value falls to 0.
    """

    offers: tuple[Offer, ...]
    priority: int
    length: LengthCurve
    prefill_log_sigma: float
    pace_log_sigma: float
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    deadline_s: float = math.inf
    late_s: float = 0.0
