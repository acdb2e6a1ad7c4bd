"""Requests that a made-up replica serves one after the other, told to a `LatencyModel` as the dispatcher would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from router.signals.in_flight import Attempt
from router.signals.latency import LatencyModel
from router.values.choice import Choice
from router.values.prediction import NOTHING_IN_FLIGHT, Demand, Prediction
from router.values.replica import ReplicaSnapshot
from router.values.situation import Candidate


class SetClock:
    """A clock that goes where it is set."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s

    def call_at(self, due_s: float, ring: Callable[[], None]) -> NoReturn:
        raise AssertionError("nothing rings on this clock: it is set by hand")


@dataclass
class Bench:
    """A model and its clock."""

    clock: SetClock = field(default_factory=SetClock)
    model: LatencyModel = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.model = self.model or LatencyModel(self.clock)

    def begin(self, snapshot: ReplicaSnapshot, demand: Demand, **given: Any) -> Attempt:
        """Send one request."""
        model, mine = self.model, given.pop("mine", NOTHING_IN_FLIGHT)
        link = given.pop("link", None)
        work = model.sent(snapshot, link, demand, mine, **given)
        assert work.told is not None
        choice = Choice(Candidate(snapshot.info, work.told), "test", degraded=False)
        return Attempt(
            None,  # type: ignore[arg-type]
            choice,
            self.clock.now_s(),
            work,
            prompt_tokens=demand.prompt_tokens,
            expected_tokens=demand.answer_tokens,
        )

    def first(self, attempt: Attempt, after_s: float, cached: int | None = None) -> None:
        """Its first token comes."""
        self.clock.time_s += after_s
        attempt.first_at_s, attempt.tokens = self.clock.now_s(), 1
        attempt.mark = self.model.first_token(attempt, self.clock.now_s(), cached)

    def end(self, attempt: Attempt, tokens: int, after_s: float, *, cut: bool = False) -> None:
        """It ends, or its deadline cuts it."""
        self.clock.time_s += after_s
        attempt.tokens, attempt.overdue, attempt.last_at_s = tokens, cut, self.clock.now_s()
        self.model.ended(attempt, self.clock.now_s(), whole=not cut)

    def serve(
        self, snapshot: ReplicaSnapshot, demand: Demand, ttft_s: float, pace_s: float, tokens: int, **given: Any
    ) -> Prediction:
        """Serve one request to its end; returns what it was told."""
        attempt = self.begin(snapshot, demand, **given)
        self.first(attempt, ttft_s)
        self.end(attempt, tokens, (tokens - 1) * pace_s)
        assert attempt.work.told is not None
        return attempt.work.told
