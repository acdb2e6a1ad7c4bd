"""Nothing leaves this tier, whatever the request's locality says: for private sites, and links not to be paid for."""

from __future__ import annotations

from router.policy.promise import MIN_RETRY_AFTER_S, without
from router.policy.protocol import Choice, Hopeless, Situation
from router.policy.quality_in_objective import QualityInObjective


class LocalOnly:
    """Decides like `quality-in-objective` among the local replicas."""

    def decide(self, situation: Situation) -> Choice | Hopeless:
        local = [c for c in situation.candidates if not c.info.remote]
        if not local:
            return Hopeless("the policy `local-only` leaves no replica that may serve this request", MIN_RETRY_AFTER_S)
        choice = QualityInObjective().decide(without(situation, local))
        if isinstance(choice, Choice) and not choice.degraded and choice.reason not in {"pinned", "late"}:
            return Choice(choice.candidate, "local-only", choice.degraded, choice.max_tokens)
        return choice


POLICY = LocalOnly()
