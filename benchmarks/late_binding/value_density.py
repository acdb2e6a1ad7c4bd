"""Late binding, the most quality a device-second first, mean length."""

from __future__ import annotations

from benchmarks.late_binding import Judged, LateBinding
from router.values.situation import Situation


class ValueDensity(LateBinding):
    """See the module."""

    def rank(self, judged: Judged, situation: Situation) -> float:
        del situation
        return judged.candidate.info.quality / max(judged.cost_s, 1e-6)

    def preference(self, judged: Judged) -> tuple[float, ...]:
        return (judged.candidate.info.quality / max(judged.cost_s, 1e-6),)


POLICY = ValueDensity()
