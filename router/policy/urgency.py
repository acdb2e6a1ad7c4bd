"""How much of a request's value is lost if those who wait beside it go first.

The value a device-second says who is worth most, and not who can wait: where a burst leaves more requests than slots
and all of them could be kept, it lets those wait who came first and whose chance is falling, and takes newcomers until
the old ones are lost. So its rank counts for as much as would be lost by another turn:

    turn    = requests that wait / Σ over devices of 1 / device-seconds     until all who wait now were served
    urgency = patience + (1 − patience) · share of its value that is lost after a turn

Where all can wait for one another, the value a second decides among them, and where nobody can, too: a turn longer than
anybody's time left makes all of them urgent. Between, those go first who cannot wait: by the earliest deadline all is
kept that can be (Dertouzos, 1974), but under overload little (Baruah and others, Real-Time Systems 4, 1992).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from router.base.structs import FrozenStruct
from router.policy.worth import FLOOR, Worth, latest_starts_s
from router.values.situation import Situation

_PATIENCE: Final = 0.5
_SURELY: Final = 0.8  # quantile of the length with which a promise that begins in time is rather sure to be kept


class Urgency(FrozenStruct, frozen=True):
    """How long one of several who wait can wait.

    Attributes:
        factor: on its rank, in (0, 1].
        grows_in_s: after which time it is to be judged again, since its value begins to be lost; infinity where it is
            lost already.
        lost_in_s: after which time its promise is all but lost on all replicas, were they free; infinity: never.
    """

    factor: float
    grows_in_s: float
    lost_in_s: float


def urgency_of(promised: Sequence[Worth], situation: Situation) -> Urgency:
    """Judge one whose promise these may keep, were they free."""
    others, length, most_s = situation.waiting - 1, situation.length, situation.wait_left_s
    turn_s = others * _each_s(promised) if others > 0 else 0.0
    candidates = [worth.candidate for worth in promised]
    short, long = length.quantile(FLOOR), length.quantile(_SURELY)
    lost_in_s, unsure_in_s = latest_starts_s(candidates, situation, short, long)
    last_s, sure_s = min(lost_in_s, most_s), min(unsure_in_s, most_s)
    if turn_s >= last_s:
        return Urgency(1.0, math.inf, lost_in_s)
    lost = max((turn_s - sure_s) / (last_s - sure_s), 0.0) if last_s > sure_s else 0.0
    half_s = (sure_s + last_s) / 2 - turn_s
    return Urgency(_PATIENCE + (1.0 - _PATIENCE) * lost, half_s if half_s > 0.0 else last_s - turn_s, lost_in_s)


def _each_s(promised: Sequence[Worth]) -> float:
    """Return the seconds in which all devices together serve one such request."""
    least_s: dict[str, float] = {}
    for worth in promised:
        device = worth.candidate.info.device_key
        known_s = least_s.get(device)
        if known_s is None or worth.cost_s < known_s:
            least_s[device] = worth.cost_s
    return 1.0 / sum([1.0 / cost_s for cost_s in least_s.values()])


PATIENT: Final = Urgency(_PATIENCE, math.inf, math.inf)
"""Of one that waits for nobody."""
