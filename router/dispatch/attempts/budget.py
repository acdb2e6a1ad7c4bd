"""What one request was tried on: who may not serve it again, and what is left of its budget of attempts."""

from __future__ import annotations

from router.base.errors import InvalidRequest, ModelNotFound, NoTokenizer, OverspillError, ReplicaCrashed
from router.dispatch.attempts.blame import Verdict, verdict
from router.dispatch.records.record import DecisionRecord
from router.signals.in_flight import Attempt
from router.values.replica import ReplicaInfo

_MAX_CRASHES = 2  # replicas on which one request may crash: its content may be what does it


class Tries:
    """The attempts at one request.

    Attributes:
        most: replicas that may be tried, here and in upstream tiers together.
        failed: replica ids that may not serve it again, and what it met there.
        refused_by: who refused it as its caller's mistake: those that are like them (`peers.alike`) are not asked.
        number: replicas that were tried.
        spent: attempts that failed, those told by upstream tiers included: what the budget has lost.
        crashes: how many of them crashed.
    """

    def __init__(self, record: DecisionRecord, most: int) -> None:
        self.record = record
        self.most = most
        self.failed: dict[str, str] = {}
        self.refused_by: tuple[ReplicaInfo, ...] = ()
        self.number = self.spent = self.crashes = 0

    @property
    def left(self) -> int:
        """Replicas that may still be tried."""
        return self.most - self.spent

    @property
    def over(self) -> bool:
        """No other replica may try."""
        return self.left < 1 or self.crashes >= _MAX_CRASHES

    def left_for(self, attempt: Attempt) -> int:
        """Return how many an upstream may try; one attempt is kept where the request might still go another way."""
        return max(1, self.left - 1 if self._another_way(attempt) else self.left)

    def note(self, attempt: Attempt, error: OverspillError) -> Verdict:
        """Note that an attempt failed, and say whose fault that was."""
        found = verdict(error)
        self.spent += (error.attempts or 1) if attempt.info.remote else 1
        self.crashes += isinstance(error, ReplicaCrashed)
        if found.excludes:
            self.failed[attempt.info.replica_id] = error.message.removeprefix(f"{attempt.info.called}: ")
        if isinstance(error, InvalidRequest) and not isinstance(error, (ModelNotFound, NoTokenizer)):
            self.refused_by += (attempt.info,)
        return found

    def keep_one_for_others(self, attempt: Attempt) -> None:
        """Where the one attempt is left that was kept for other endpoints, leave that of a failed attempt alone."""
        if attempt.info.remote and self.left == 1 and self._another_way(attempt):
            kept = "its server had all attempts but the one that is kept for others"
            self.failed = {**dict.fromkeys(self._at(attempt.info.endpoint), kept), **self.failed}

    def _another_way(self, attempt: Attempt) -> bool:
        """Whether the request might be served at another endpoint than the one of this attempt."""
        situation, endpoint = self.record.situation, attempt.info.endpoint
        return situation is not None and any(c.info.endpoint != endpoint for c in situation.candidates)

    def _at(self, endpoint: str) -> set[str]:
        """Replicas of an endpoint, as the last decision knew them: those that could serve, and those that could not."""
        situation = self.record.situation
        infos = [c.info for c in situation.candidates] if situation is not None else []
        infos += [rejection.info for rejection in self.record.rejections]
        return {info.replica_id for info in infos if info.endpoint == endpoint}
