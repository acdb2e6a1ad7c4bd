"""Late binding, earliest deadline first, mean length: the best rung that keeps it."""

from __future__ import annotations

from benchmarks.late_binding import Judged, LateBinding
from router.values.situation import Situation

_NEVER_S = 1e6


class EarliestDeadline(LateBinding):
    """See the module. Who promised a TTFT alone has it for a deadline, who promised nothing comes last."""

    def rank(self, judged: Judged, situation: Situation) -> float:
        del judged
        objective = situation.objective
        limit_s = objective.deadline_s
        if limit_s is None:
            limit_s = objective.ttft_s if situation.ttft_promised else None
        accepted_s = situation.now_s - situation.waited_s
        return -(accepted_s + (_NEVER_S if limit_s is None else limit_s))

    def preference(self, judged: Judged) -> tuple[float, ...]:
        return (judged.candidate.info.quality, judged.slack_s)


POLICY = EarliestDeadline()
