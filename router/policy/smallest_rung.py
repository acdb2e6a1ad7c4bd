"""The smallest rung that keeps the objective: for batteries, and for work where any answer above the floor will do."""

from __future__ import annotations

from router.policy.promise import choose, keeps, late_or_hopeless, shorten
from router.values.choice import Choice, Hopeless
from router.values.request import Locality
from router.values.situation import Situation


class SmallestRung:
    """See the module. The request's `min_quality` is the floor."""

    locality = Locality.ANY

    def decide(self, situation: Situation) -> Choice | Hopeless:
        ranked = sorted(situation.candidates, key=lambda c: (c.info.remote, c.info.quality, c.prediction.ttft_s))
        for candidate in ranked:
            if keeps(candidate, situation):
                choice = choose(candidate, situation, "pinned" if situation.pinned else "smallest-rung")
                return (
                    choice
                    if choice.reason != "step-down"
                    else Choice(candidate, "smallest-rung", choice.degraded, choice.max_tokens)
                )
        return shorten(ranked, situation) or late_or_hopeless(situation)


POLICY = SmallestRung()
