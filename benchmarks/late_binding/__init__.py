"""Plain late binding, as peers for `benchmarks.routing`: policies in no registry but that benchmark's.

All but `expected_value` judge by one length, the mean, and predicted medians: what then misses its promise waits no
longer. They differ in who goes first and where to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from router.policy.promise import backlog_s, choose, reason_for
from router.policy.protocol import WithoutWhatIf
from router.values.choice import Choice, Hopeless
from router.values.situation import Candidate, Situation


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate that would keep the promise if it began now.

    Attributes:
        slack_s: how much later it may begin.
        cost_s: device-seconds.
    """

    candidate: Candidate
    slack_s: float
    cost_s: float


class LateBinding(WithoutWhatIf, ABC):
    """The frame of those that judge by one length."""

    @abstractmethod
    def rank(self, judged: Judged, situation: Situation) -> float:
        """Who goes first: the higher."""

    @abstractmethod
    def preference(self, judged: Judged) -> tuple[float, ...]:
        """Where to: the higher."""

    def tokens(self, situation: Situation) -> float:
        """Return the length that all is judged by."""
        return situation.length.expected_left(situation.emitted_tokens)

    def decide(self, situation: Situation) -> Choice | Hopeless:
        tokens = self.tokens(situation)
        kept = [j for candidate in situation.candidates if (j := _judge(candidate, situation, tokens)).slack_s >= 0]
        if not kept:
            lost = situation.objective.deadline_s is not None
            return Hopeless("nobody would keep it, were it to begin now", backlog_s(situation), deadline_lost=lost)
        free = [judged for judged in kept if judged.candidate.prediction.free]
        best = max(free or kept, key=self.preference)
        return choose(
            best.candidate,
            situation,
            reason_for(best.candidate, situation),
            rank=self.rank(best, situation),
            waits_for={j.candidate.info.replica_id: self.rank(j, situation) for j in kept},
            good_for_s=max([0.05, *(j.slack_s for j in kept)]),
        )


def _judge(candidate: Candidate, situation: Situation, tokens: float) -> Judged:
    prediction, objective = candidate.prediction, situation.objective
    first_s = situation.waited_s + prediction.network_s + prediction.backlog_s + prediction.prefill_s
    slack_s = float("inf")
    if objective.deadline_s is not None:
        slack_s = objective.deadline_s - first_s - (tokens - 1.0) * prediction.tpot_s
    if objective.ttft_s is not None and situation.ttft_promised:
        slack_s = min(slack_s, objective.ttft_s - first_s)
    if objective.tpot_s is not None and prediction.tpot_s > objective.tpot_s:
        slack_s = -1.0
    return Judged(candidate, slack_s, prediction.prefill_s + tokens * prediction.token_device_s)
