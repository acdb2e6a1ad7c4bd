"""What a policy may answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from router.base.structs import FrozenStruct
from router.values.situation import Candidate


class Choice(FrozenStruct, frozen=True):
    """Send it there; if the candidate is not free, wait, and decide again when a slot is.

    Attributes:
        degraded: a smaller rung, or a cap that takes back what the caller asked for.
        max_tokens: a lower cap than the caller's on the whole answer, None if the caller's stands.
        rank: who of those that wait goes first, among equal priority: the higher.
        waits_for: replica id → the rank with which its next free slot is waited for, the candidate's included.
        good_for_s: how long it may wait by this decision before it is to be decided again; infinity: until a slot is
            free.
        kept: probability of keeping the whole promise that it was chosen for, None where the policy asks for none.
        not_now: what is free is left to others, even to those of a lower priority: the promise would be lost there as
            things stand, and may be kept a little later.
    """

    candidate: Candidate
    reason: str
    degraded: bool
    max_tokens: int | None = None
    rank: float = 0.0
    waits_for: Mapping[str, float] = msgspec.field(default_factory=dict)
    good_for_s: float = math.inf
    kept: float | None = None
    not_now: bool = False

    @property
    def starts(self) -> bool:
        """Whether it can be sent at once."""
        return self.candidate.prediction.free and not self.not_now


@dataclass(frozen=True, slots=True)
class Hopeless:
    """No candidate can keep what the caller asked for.

    Attributes:
        why: for the message and the decision record.
        retry_after_s: when the backlog that stands in the way should be gone.
        deadline_lost: not even an idle replica could meet the deadline any more.
    """

    why: str
    retry_after_s: float
    deadline_lost: bool = False
