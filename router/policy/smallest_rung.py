"""The smallest rung that keeps the objective: for batteries, and for work where any answer above the floor will do."""

from __future__ import annotations

import msgspec

from router.policy.promise import choose, keeps, late_or_hopeless
from router.policy.protocol import WithoutWhatIf
from router.values.choice import Choice, Hopeless
from router.values.situation import Situation


class SmallestRung(WithoutWhatIf):
    """See the module. The request's `min_quality` is the floor."""

    def decide(self, situation: Situation) -> Choice | Hopeless:
        ranked = sorted(situation.candidates, key=lambda c: (c.info.remote, c.info.quality, c.prediction.ttft_s))
        for candidate in ranked:
            if keeps(candidate, situation):
                choice = choose(candidate, situation, "pinned" if situation.pinned else "smallest-rung")
                return (
                    msgspec.structs.replace(choice, reason="smallest-rung") if choice.reason == "step-down" else choice
                )
        return late_or_hopeless(situation)


POLICY = SmallestRung()
