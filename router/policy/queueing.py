"""What the simple rules share: they choose a replica, wait there for their turn, first come, first served."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from router.policy.promise import choose, reason_for
from router.policy.protocol import WithoutWhatIf
from router.values.choice import Choice
from router.values.situation import Candidate, Situation


class FirstComeFirstServed(WithoutWhatIf, ABC):
    """Takes what `pick` says among the best rungs; never steps down, never gives anybody up before their time."""

    def decide(self, situation: Situation) -> Choice:
        picked = self.pick(best_rungs(situation), situation)
        return wait_for(picked, situation, -accepted_s(situation))

    @abstractmethod
    def pick(self, candidates: Sequence[Candidate], situation: Situation) -> Candidate:
        """Choose one of the candidates, all of the best quality there is."""


def best_rungs(situation: Situation) -> list[Candidate]:
    """The candidates of the best quality, near equals included."""
    best = max(c.info.quality for c in situation.candidates)
    slack = situation.settings.device_first_quality_slack + 1e-9
    return [c for c in situation.candidates if c.info.quality >= best - slack]


def accepted_s(situation: Situation) -> float:
    """When the request was accepted, on the tier's clock."""
    return situation.now_s - situation.waited_s


def wait_for(candidate: Candidate, situation: Situation, rank: float) -> Choice:
    """Send it there, or let it wait for that replica alone until a slot is free."""
    return choose(candidate, situation, reason_for(candidate, situation), rank=rank, good_for_s=math.inf)
