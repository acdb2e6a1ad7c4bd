"""Late binding, the most quality a device-second first, with the length of every answer known.

The benchmark tells the length as the caller's cap: no policy of this project knows that answers grow to theirs.
"""

from __future__ import annotations

from benchmarks.late_binding.value_density import ValueDensity
from router.values.situation import Situation


class ValueDensityKnown(ValueDensity):
    """See the module."""

    def tokens(self, situation: Situation) -> float:
        return max(situation.length.cap - situation.emitted_tokens, 1.0)


POLICY = ValueDensityKnown()
