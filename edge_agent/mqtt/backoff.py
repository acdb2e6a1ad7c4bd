"""How long to stay away from the broker: doubling, jittered, and much longer when someone else uses our name."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from edge_agent.mqtt.connection import End

_STABLE_S = 60.0
_TAKEOVER_MAX_S = 3600.0


@dataclass(slots=True)
class Backoff:
    """Pure but for its random draws.

    Two agents under one device name take each other's session, each time the other one comes back. The one that finds
    itself replaced (`taken_over`, see `edge_agent.fleet.takeover`) stays away for `takeover_min_s`, doubled up to an
    hour. The one that is merely thrown out (`kicked`) comes back soon, for the other may have connected only once; from
    the second time in a row on it stays away as long. Either count is forgotten only after a connection longer than
    two such hours.
    """

    minimum_s: float
    maximum_s: float
    takeover_min_s: float
    rng: random.Random = field(default_factory=random.Random)
    failures: int = 0
    takeovers: int = 0
    kicks: int = 0

    def next_s(self, end: End, lasted_s: float) -> float:
        """Return how long to wait after a connection that ended like this after `lasted_s` seconds."""
        if lasted_s > 2 * _TAKEOVER_MAX_S:
            self.takeovers = self.kicks = 0
        if end.kind == "kicked":
            self.kicks = self.kicks + 1 if self.kicks > 1 or lasted_s < _STABLE_S else 1
        if end.kind == "taken_over":
            self.takeovers += 1
            return self._away_s(self.takeovers)
        if end.kind == "kicked" and self.kicks > 1:
            return self._away_s(self.kicks - 1)
        if lasted_s >= _STABLE_S:
            self.failures = 0
        base_s: float = min(self.maximum_s, self.minimum_s * 2.0 ** min(self.failures, 20))
        self.failures += 1
        return base_s * self.rng.uniform(0.5, 1.0)

    def forget_failures(self) -> None:
        """This machine is in another network: what failed in the one before says nothing of it."""
        self.failures = 0

    def _away_s(self, times: int) -> float:
        base_s: float = min(_TAKEOVER_MAX_S, self.takeover_min_s * 2.0 ** min(times - 1, 20))
        return base_s * self.rng.uniform(0.75, 1.25)
