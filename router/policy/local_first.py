"""The device whatever its rung, as long as it keeps the objective: for metered or weak uplinks."""

from __future__ import annotations

from router.policy.promise import choose, keeps, late_or_hopeless, reason_for
from router.policy.protocol import WithoutWhatIf
from router.values.choice import Choice, Hopeless
from router.values.situation import Situation


class LocalFirst(WithoutWhatIf):
    """See the module."""

    def decide(self, situation: Situation) -> Choice | Hopeless:
        ranked = sorted(situation.candidates, key=lambda c: (c.info.remote, -c.info.quality, c.prediction.ttft_s))
        for candidate in ranked:
            if keeps(candidate, situation):
                return choose(candidate, situation, reason_for(candidate, situation))
        return late_or_hopeless(situation)


POLICY = LocalFirst()
