"""What a policy may answer."""

from __future__ import annotations

from dataclasses import dataclass

from router.values.situation import Candidate


@dataclass(frozen=True, slots=True)
class Choice:
    """Send it there; if the candidate is not free, wait for it and decide again when anything changes.

    Attributes:
        degraded: a smaller rung, or a cap that is expected to cut the answer or takes back what the caller asked for.
        max_tokens: a lower cap than the caller's on the whole answer, None if the caller's stands. Where it only bounds
            what might run past the deadline, nothing is given up before it is reached.
    """

    candidate: Candidate
    reason: str
    degraded: bool
    max_tokens: int | None = None


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
