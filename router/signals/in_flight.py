"""Requests that this tier has sent and that have not ended, by replica; known before any load report shows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from router.signals.token_clock import Mark
from router.values.choice import Choice
from router.values.length import LengthCurve
from router.values.prediction import NOTHING_IN_FLIGHT, InFlightLoad, TtftFeatures
from router.values.replica import Replica, ReplicaInfo

_AWAY_SHARE = 0.25  # of an answer's time; above it, the pace is the reader's


@dataclass(eq=False, slots=True)
class Attempt:
    """One request on one replica.

    Attributes:
        sent_at_s: when it was bound.
        expected_tokens: what the answer was expected to run to.
        trial: it is the trial of a half-open breaker.
        opened: the replica has it, so its snapshots can show it.
        own_s: what the replica says that it took for all of it; see `TokenChunk.own_s`.
        first_at_s: when its first text came, None before; last_at_s: its last until now; tokens: how many came.
        away_s: how long its reader was busy with what had come, while nobody waited for more.
        handed_at_s: since when it is so now, None while it waits for more.
        overdue: the deadline came before its end; silent: and long after its first text should have come.
        overran: it went on past the cap that it was sent.
        mark: where its device's clock stood at its first token.
        ends_s: when its answer is worth nothing any more, on the tier's clock; infinity without a deadline.
        give_up: ends it now and frees its slot, with the text so far: for one that can no longer keep its promise while
            others wait. Returns whether it did; False where it is over anyway. None where the promise or the setting
            `router.give_up` does not allow it.
        gave_up: it did.
        length: the distribution of the whole answer's length, None where nobody needs it.
        held_up: it yields, where it is held up for others: it is no load, and its times teach nothing.
        outrun: another attempt at the same answer had its first token sooner.
        counted: called when what its replica has to do for it has changed.
    """

    replica: Replica
    choice: Choice
    sent_at_s: float
    work: TtftFeatures
    prompt_tokens: int
    expected_tokens: int
    trial: bool = False
    opened: bool = False
    first_at_s: float | None = None
    own_s: float | None = None
    last_at_s: float = 0.0
    tokens: int = 0
    away_s: float = 0.0
    handed_at_s: float | None = None
    overdue: bool = False
    silent: bool = False
    overran: bool = False
    mark: Mark | None = None
    ends_s: float = math.inf
    give_up: Callable[[], bool] | None = None
    length: LengthCurve | None = None
    gave_up: bool = False
    outrun: bool = False
    held_up: bool = False
    counted: Callable[[Attempt], None] | None = None
    info: ReplicaInfo = field(init=False)

    def __post_init__(self) -> None:
        self.info = self.choice.candidate.info

    def opens(self) -> None:
        """The replica has it from now on."""
        self.opened = True
        if self.counted is not None:
            self.counted(self)

    def came(self, tokens: int, now_s: float) -> None:
        """So many tokens more came."""
        self.tokens += tokens
        if tokens:
            self.last_at_s = now_s
        if self.counted is not None:
            self.counted(self)

    @property
    def pace_s(self) -> float | None:
        """Seconds a token until the last one, None where the reader set the pace, or too little came to tell.

        A replica generates on while its reader is away, so that time can not just be taken off: what is left would
        make it look faster than it is.
        """
        if self.first_at_s is None or self.tokens < 2:
            return None
        lasted_s = self.last_at_s - self.first_at_s
        away_s = self.away_s
        if self.handed_at_s is not None:
            away_s += max(0.0, self.last_at_s - self.handed_at_s)
        return None if away_s > _AWAY_SHARE * lasted_s else lasted_s / (self.tokens - 1)


class InFlight:
    """The attempts that run, in the order in which they began; every `begin` has exactly one `end`.

    Those that are held up for others are not among them.
    """

    def __init__(self) -> None:
        self._by_replica: dict[str, dict[Attempt, None]] = {}
        self._loads: dict[str, InFlightLoad] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_replica.values()))

    def __iter__(self) -> Iterator[Attempt]:
        return iter([attempt for attempts in self._by_replica.values() for attempt in attempts])

    def begin(self, attempt: Attempt) -> None:
        if attempt.held_up:
            return
        attempt.counted = self._changed
        self._changed(attempt)
        self._by_replica.setdefault(attempt.info.replica_id, {})[attempt] = None

    def end(self, attempt: Attempt) -> None:
        if attempt.held_up:
            return
        in_flight = self._by_replica[attempt.info.replica_id]
        del in_flight[attempt]
        self._changed(attempt)
        if not in_flight:
            del self._by_replica[attempt.info.replica_id]

    def count(self, replica_id: str) -> int:
        """Count the requests on a replica."""
        return len(self._by_replica.get(replica_id, ()))

    def without_text(self, replica_id: str) -> int:
        """Count the requests on a replica of which no text has come yet."""
        return sum(attempt.first_at_s is None for attempt in self._by_replica.get(replica_id, ()))

    def unopened_at(self, endpoint: str) -> int:
        """Count the requests bound to an endpoint of which it knows nothing yet."""
        attempts = (attempt for in_flight in self._by_replica.values() for attempt in in_flight)
        return sum(attempt.info.endpoint == endpoint and not attempt.opened for attempt in attempts)

    def _changed(self, attempt: Attempt) -> None:
        self._loads.pop(attempt.info.replica_id, None)

    def at(self, replica_id: str) -> InFlightLoad:
        """Return what was sent to a replica and has not ended; the same object until that changes."""
        load = self._loads.get(replica_id)
        if load is not None:
            return load
        in_flight = self._by_replica.get(replica_id)
        if in_flight is None:
            return NOTHING_IN_FLIGHT
        load = self._loads[replica_id] = _load_of(in_flight)
        return load


def _load_of(in_flight: Collection[Attempt]) -> InFlightLoad:
    """Sum them up. An answer that outran what was expected of it may go on for a quarter of its length."""
    prefill_tokens = unopened = unopened_prefill_tokens = unopened_decode_tokens = 0
    left_tokens: list[int] = []
    for attempt in in_flight:
        left, more = attempt.expected_tokens - attempt.tokens, attempt.tokens // 4 or 1
        left_tokens.append(left if left > more else more)  # noqa: FURB136 - for each attempt, at each change of any
        if attempt.first_at_s is None:
            prefill_tokens += attempt.prompt_tokens
        if not attempt.opened:
            unopened += 1
            unopened_prefill_tokens += attempt.prompt_tokens
            unopened_decode_tokens += attempt.expected_tokens
    left_tokens.sort()
    return InFlightLoad(
        len(in_flight), prefill_tokens, left_tokens, unopened, unopened_prefill_tokens, unopened_decode_tokens
    )
