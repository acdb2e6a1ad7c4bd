"""What this tier has sent and not seen the end of, by replica: counted at once, before any report shows it."""

from __future__ import annotations

from dataclasses import dataclass

from router.policy.protocol import Choice
from router.signals.latency import NOTHING_IN_FLIGHT, InFlight, SentWork
from router.values.replica import Replica, ReplicaInfo

_AWAY_SHARE = 0.25  # a reader that is away for more of an answer tells nothing about the replica


@dataclass(eq=False, slots=True)
class Flight:
    """One request on its way on one replica.

    Attributes:
        sent_at_s: when it was bound.
        expected_tokens: what the answer was expected to run to.
        trial: it is the trial of a half-open breaker.
        opened: the replica has it, so its snapshots can show it.
        first_at_s: when its first text came, None before; tokens: how many came.
        away_s: how long its reader was busy with what had come, while nobody waited for more.
        overdue: the deadline came before its end; silent: and long after its first text should have come.
        batch: answers that ran at its endpoint at its first token, itself included.
    """

    replica: Replica
    choice: Choice
    sent_at_s: float
    work: SentWork
    prompt_tokens: int
    expected_tokens: int
    trial: bool = False
    opened: bool = False
    first_at_s: float | None = None
    tokens: int = 0
    away_s: float = 0.0
    overdue: bool = False
    silent: bool = False
    batch: int = 1

    def pace_s(self, now_s: float) -> float | None:
        """Seconds a token until now, None where the reader set the pace, or too little came to tell.

        A replica generates on while its reader is away, so that time can not just be taken off: what is left would
        make it look faster than it is.
        """
        if self.first_at_s is None or self.tokens < 2:
            return None
        lasted_s = now_s - self.first_at_s
        return None if self.away_s > _AWAY_SHARE * lasted_s else lasted_s / (self.tokens - 1)

    @property
    def info(self) -> ReplicaInfo:
        return self.choice.candidate.info

    @property
    def left_tokens(self) -> int:
        """Tokens still expected; an answer that outran the expectation may go on for a quarter of its length."""
        return max(self.expected_tokens - self.tokens, self.tokens // 4, 1)


class Flights:
    """All of them; every `begin` has exactly one `end`."""

    def __init__(self) -> None:
        self._by_replica: dict[str, set[Flight]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_replica.values()))

    def begin(self, flight: Flight) -> None:
        self._by_replica.setdefault(flight.info.replica_id, set()).add(flight)

    def end(self, flight: Flight) -> None:
        flights = self._by_replica[flight.info.replica_id]
        flights.remove(flight)
        if not flights:
            del self._by_replica[flight.info.replica_id]

    def beside(self, info: ReplicaInfo) -> int:
        """Requests at an endpoint, on any of its replicas: they share its cores or its GPU."""
        return sum(len(flights) for flights in self._by_replica.values() if _endpoint(flights) == info.endpoint)

    def at(self, replica_id: str) -> InFlight:
        flights = self._by_replica.get(replica_id)
        if not flights:
            return NOTHING_IN_FLIGHT
        unopened = [flight for flight in flights if not flight.opened]
        return InFlight(
            requests=len(flights),
            prefill_tokens=sum(flight.prompt_tokens for flight in flights if flight.first_at_s is None),
            left_tokens=sorted(flight.left_tokens for flight in flights),
            unopened=len(unopened),
            unopened_prefill_tokens=sum(flight.prompt_tokens for flight in unopened),
            unopened_decode_tokens=sum(flight.expected_tokens for flight in unopened),
        )


def _endpoint(flights: set[Flight]) -> str:
    return next(iter(flights)).info.endpoint
