"""Late binding in the order of deadlines (EDF): whoever is due first takes the next slot, wherever that is.

A request without a deadline is due by its TTFT, its own or the tier's. Nobody is given up before the deadline.
"""

from __future__ import annotations

import math

from router.policy.promise import choose, reason_for
from router.policy.protocol import WithoutWhatIf
from router.policy.queueing import accepted_s, best_rungs
from router.values.choice import Choice
from router.values.situation import Situation


class EarliestDeadline(WithoutWhatIf):
    """See the module."""

    def decide(self, situation: Situation) -> Choice:
        objective = situation.objective
        limits_s = [s for s in (objective.deadline_s, objective.ttft_s) if s is not None]
        rank = -(accepted_s(situation) + min(limits_s, default=0.0))
        everyone = best_rungs(situation)
        free = [c for c in everyone if c.prediction.free]
        best = min(free or everyone, key=lambda c: (c.info.remote, c.prediction.ttft_s))
        waits_for = {c.info.replica_id: rank for c in everyone}
        reason = reason_for(best, situation)
        return choose(best, situation, reason, rank=rank, waits_for=waits_for, good_for_s=math.inf)


POLICY = EarliestDeadline()
