"""The best quality that keeps the objective, the device first among near equals.

1. Among the candidates that keep the objective, take the best quality. Rungs closer than `device_first_quality_slack`
   are equals: then the device goes before the cloud, the replica that knows the session before others, and the sooner
   first token before the later.
2. If only smaller rungs keep what the caller asked for, step down; for the tier's default TTFT, only
   when the better ones are busy: a slow model is what it is, a queue is load.
3. Else serve late where that is of use, or say when to come back (`router.policy.promise.late_or_hopeless`).

A choice may fall on a busy replica, whose predicted wait keeps the promise: the device is worth waiting for as long as
the promise holds. Under overload all rungs count as equals, so that every one of them works, and answers are capped.
"""

from __future__ import annotations

from router.policy.promise import choose, is_smaller, keeps, late_or_hopeless, reason_for
from router.policy.protocol import WithoutWhatIf
from router.values.choice import Choice, Hopeless
from router.values.situation import Candidate, Situation


class QualityInObjective(WithoutWhatIf):
    """See the module."""

    def decide(self, situation: Situation) -> Choice | Hopeless:
        everyone = situation.candidates
        keepers = [c for c in everyone if keeps(c, situation)]
        if not _promised(situation) and any(c.prediction.free and not is_smaller(c, situation) for c in everyone):
            keepers = [c for c in keepers if not is_smaller(c, situation)]
        if keepers:
            winner = self._best(keepers, situation)
            return choose(winner, situation, reason_for(winner, situation))
        return late_or_hopeless(situation)

    @staticmethod
    def _best(keepers: list[Candidate], situation: Situation) -> Candidate:
        if situation.overloaded:
            return min(keepers, key=lambda c: (not c.prediction.free, -c.info.quality, c.prediction.ttft_s))
        full = [c for c in keepers if not is_smaller(c, situation)]
        floor = max(c.info.quality for c in keepers) - situation.settings.device_first_quality_slack - 1e-9
        equals = full or [c for c in keepers if c.info.quality >= floor]
        return min(equals, key=lambda c: (c.info.remote, -c.info.quality, not c.session, c.prediction.ttft_s))


def _promised(situation: Situation) -> bool:
    """Whether the caller asked for any of the times, rather than getting the tier's default TTFT."""
    objective = situation.objective
    return situation.ttft_promised or objective.tpot_s is not None or objective.deadline_s is not None


POLICY = QualityInObjective()
