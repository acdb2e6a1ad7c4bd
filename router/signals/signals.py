"""All estimates and states that decisions use, in one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.signals.affinity import Affinity
from router.signals.canary import Canaries
from router.signals.fairness import CallerShares, OldestFirst
from router.signals.health import HealthBook
from router.signals.in_flight import InFlight
from router.signals.ladder import Ladder
from router.signals.latency import LatencyModel
from router.signals.length import LengthModel
from router.signals.peak_latency import PeakLatency
from router.signals.what_if import WhatIf


@dataclass(slots=True)
class Signals:
    """Estimates and states of one tier; its dispatcher is the one writer."""

    latency: LatencyModel
    lengths: LengthModel
    health: HealthBook
    in_flight: InFlight = field(default_factory=InFlight)
    what_if: WhatIf = field(default_factory=WhatIf)
    shares: CallerShares = field(default_factory=CallerShares)
    oldest_first: OldestFirst = field(default_factory=OldestFirst)
    peaks: PeakLatency = field(default_factory=PeakLatency)
    ladder: Ladder = field(default_factory=Ladder)
    affinity: Affinity = field(default_factory=Affinity)
    canaries: Canaries = field(default_factory=Canaries)
