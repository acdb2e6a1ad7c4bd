"""Nothing leaves this tier, whatever the request's locality says: for private sites, and links not to be paid for."""

from __future__ import annotations

import msgspec

from router.policy.quality_in_objective import QualityInObjective
from router.values.choice import Choice, Hopeless
from router.values.request import Locality
from router.values.situation import Situation


class LocalOnly(QualityInObjective):
    """Decides like its base among the local replicas."""

    locality = Locality.LOCAL_ONLY

    def decide(self, situation: Situation) -> Choice | Hopeless:
        choice = super().decide(situation)
        if isinstance(choice, Choice) and not choice.degraded and choice.reason not in {"pinned", "late"}:
            return msgspec.structs.replace(choice, reason="local-only")
        return choice


POLICY = LocalOnly()
