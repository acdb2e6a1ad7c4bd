"""The cloud while it keeps the objective, the device when it does not: for devices on mains and fibre."""

from __future__ import annotations

from router.policy.promise import choose, is_smaller, keeps, late_or_hopeless, reason_for
from router.policy.protocol import WithoutWhatIf
from router.values.choice import Choice, Hopeless
from router.values.situation import Candidate, Situation


class CloudFirst(WithoutWhatIf):
    """See the module."""

    def decide(self, situation: Situation) -> Choice | Hopeless:
        ranked = sorted(situation.candidates, key=lambda c: self._rank(c, situation))
        for candidate in ranked:
            if keeps(candidate, situation):
                return choose(candidate, situation, self._reason(candidate, situation))
        return late_or_hopeless(situation)

    @staticmethod
    def _rank(candidate: Candidate, situation: Situation) -> tuple[bool, bool, float, float]:
        """A full-quality device goes before a smaller rung in the cloud."""
        info = candidate.info
        return (is_smaller(candidate, situation), not info.remote, -info.quality, candidate.prediction.ttft_s)

    @staticmethod
    def _reason(candidate: Candidate, situation: Situation) -> str:
        if candidate.info.remote and not situation.pinned:
            return "cloud-first"
        return "upstream-down" if situation.remote_down else reason_for(candidate, situation)


POLICY = CloudFirst()
