"""Promises that were given up, so that what is learnt a moment later turns no priorities round.

Whether a promise is lost is judged by learnt figures. Those get better, too: a request of a lower priority that asks
for the same and came no later could be served a moment after one of a higher priority was turned away for good. The
verdict on the higher one holds for the lower one.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from router.values.request import InferenceRequest

_KEPT = 1024  # of different wishes


class LostPromises:
    """When those came whose promise was given up, by what they asked for and by priority."""

    def __init__(self) -> None:
        self._came_s: OrderedDict[tuple[object, ...], dict[int, float]] = OrderedDict()
        self._highest = -math.inf

    def add(self, request: InferenceRequest) -> None:
        """A request was turned away because its promise was lost."""
        wish, priority = _wish(request), request.objective.priority
        came_s = self._came_s.setdefault(wish, {})
        came_s[priority] = max(request.accepted_at_s, came_s.get(priority, -math.inf))
        self._highest = max(self._highest, priority)
        self._came_s.move_to_end(wish)
        if len(self._came_s) > _KEPT:
            self._came_s.popitem(last=False)

    def hold_for(self, request: InferenceRequest) -> bool:
        """Whether one of a higher priority that asked for the same, and came no earlier, was turned away."""
        priority = request.objective.priority
        if priority >= self._highest:
            return False
        came_s = self._came_s.get(_wish(request), {})
        return any(level > priority and at_s >= request.accepted_at_s for level, at_s in came_s.items())


def _wish(request: InferenceRequest) -> tuple[object, ...]:
    """All that a request asks for but its priority."""
    asked, sampling = request.objective, request.sampling
    promise = (asked.ttft_s, asked.tpot_s, asked.deadline_s, asked.late_s, asked.shorten)
    rungs = (request.model, asked.locality, asked.min_quality, asked.session)
    answer = (sampling.max_tokens, sampling.ignore_eos, sampling.stop, request.continuation_tokens)
    return (*promise, *rungs, *answer, request.prompt_tokens, request.caller, request.cache_salt)
