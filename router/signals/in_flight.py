"""Requests that this tier has sent and that have not ended, by replica; known before any load report shows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import overload

from router.signals.token_clock import Mark
from router.values.choice import Choice
from router.values.length import LengthCurve
from router.values.prediction import NOTHING_IN_FLIGHT, Awaited, InFlightLoad, TtftFeatures
from router.values.replica import Replica, ReplicaInfo
from router.values.request import Objective

_NOTHING = Objective()


class Attempt:
    """One request on one replica.

    Attributes:
        sent_at_s: when it was bound.
        expected_tokens: what the answer was expected to run to.
        trial: it is the trial of a half-open breaker.
        opened: the replica has it, so its snapshots can show it.
        own_s: what the replica says that it took for all of it; see `TokenChunk.own_s`.
        first_at_s: when its first text came, None before; last_at_s: its last until now; tokens: how many came.
        alive: tokens of it came, though they may show nothing yet.
        held_back: its replica had to wait, as its reader left too much unread: its times are the reader's.
        overdue: the deadline came before its end.
        silent: nobody waits any more, long after its first token should have come.
        overran: it went on past the cap that it was sent.
        mark: where its device's clock stood at its first token.
        ends_s: when its answer is worth nothing any more, on the tier's clock; infinity without a deadline.
        give_up: ends it now and frees its slot, with the text so far: for one that can no longer keep its promise while
            others wait. Returns whether it did; False where it is over anyway. None where the promise or the setting
            `router.give_up` does not allow it.
        gave_up: it did.
        length: the distribution of the whole answer's length, None where nobody needs it.
        objective: what its caller asked for.
        held_up: it yields, where it is held up for others: it is no load, and its times teach nothing.
        outrun: another attempt at the same answer had its first token sooner.
        counted: called when what its replica has to do for it has changed.
    """

    def __init__(
        self,
        replica: Replica,
        choice: Choice,
        sent_at_s: float,
        work: TtftFeatures,
        *,
        prompt_tokens: int,
        expected_tokens: int,
        length: LengthCurve | None = None,
        objective: Objective = _NOTHING,
        held_up: bool = False,
    ) -> None:
        self.replica = replica
        self.info: ReplicaInfo = choice.candidate.info
        self.choice = choice
        self.sent_at_s = sent_at_s
        self.work = work
        self.prompt_tokens = prompt_tokens
        self.expected_tokens = expected_tokens
        self.length = length
        self.objective = objective
        self.held_up = held_up
        self.trial = self.opened = False
        self.first_at_s: float | None = None
        self.own_s: float | None = None
        self.last_at_s = 0.0
        self.tokens = 0
        self.alive = self.held_back = self.overdue = self.silent = self.overran = self.gave_up = self.outrun = False
        self.mark: Mark | None = None
        self.ends_s = math.inf
        self.give_up: Callable[[], bool] | None = None
        self.counted: Callable[[Attempt], None] | None = None

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
        """Seconds a token until the last one, None where the reader set the pace, or too little came to tell."""
        if self.first_at_s is None or self.tokens < 2 or self.held_back:
            return None
        return (self.last_at_s - self.first_at_s) / (self.tokens - 1)


class _Left(Sequence[int]):
    """Tokens that each of some attempts may still generate, ascending: found and sorted once somebody asks for any.

    Only who has to wait asks. An answer that outran what was expected of it may go on for a quarter of its length.
    """

    def __init__(self, attempts: Collection[Attempt]) -> None:
        self._attempts = tuple(attempts)
        self._found: list[int] | None = None

    def __len__(self) -> int:
        return len(self._attempts)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._tokens()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens())

    def _tokens(self) -> list[int]:
        found = self._found
        if found is None:
            found = self._found = []
            for attempt in self._attempts:
                left, more = attempt.expected_tokens - attempt.tokens, attempt.tokens // 4 or 1
                found.append(left if left > more else more)  # noqa: FURB136 - for each attempt
            found.sort()
        return found


class _Sent:
    """What was sent to one replica and has not ended.

    Attributes:
        attempts: in the order in which they began; textless: those without any text yet; unopened: those that the
            replica does not have yet; both with what of their prompts goes before that of a newcomer.
        load: what decisions read of them, None until somebody asks.
        answered_s: when the one was sent that was sent last of those with text, whether or not it still runs.
    """

    __slots__ = (
        "_textless_tokens",
        "_unopened_answer_tokens",
        "_unopened_tokens",
        "answered_s",
        "attempts",
        "load",
        "textless",
        "unopened",
    )

    def __init__(self) -> None:
        self.attempts: dict[Attempt, None] = {}
        self.textless: dict[Attempt, int] = {}
        self.unopened: dict[Attempt, int] = {}
        self.load: InFlightLoad | None = None
        self.answered_s = -math.inf
        # Sums, kept as they change: to look at each that runs would cost every decision as much as there are.
        self._textless_tokens = self._unopened_tokens = self._unopened_answer_tokens = 0

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self.attempts)

    def begin(self, attempt: Attempt) -> None:
        tokens = attempt.info.before_newcomers(attempt.prompt_tokens)
        self.attempts[attempt] = None
        self.textless[attempt] = self.unopened[attempt] = tokens
        self._textless_tokens += tokens
        self._unopened_tokens += tokens
        self._unopened_answer_tokens += attempt.expected_tokens
        self.changed(attempt)

    def end(self, attempt: Attempt) -> None:
        del self.attempts[attempt]
        self.load = None
        self._has_text(attempt)
        self._has_opened(attempt)

    def changed(self, attempt: Attempt) -> None:
        """One of them has opened, or got a piece of its answer."""
        self.load = None
        if attempt in self.textless and attempt.first_at_s is not None:
            self._has_text(attempt)
            self.answered_s = max(self.answered_s, attempt.sent_at_s)
        if attempt in self.unopened and attempt.opened:
            self._has_opened(attempt)

    def _has_text(self, attempt: Attempt) -> None:
        self._textless_tokens -= self.textless.pop(attempt, 0)

    def _has_opened(self, attempt: Attempt) -> None:
        tokens = self.unopened.pop(attempt, None)
        if tokens is not None:
            self._unopened_tokens -= tokens
            self._unopened_answer_tokens -= attempt.expected_tokens

    def summed_up(self) -> InFlightLoad:
        return InFlightLoad(
            len(self.attempts),
            self._textless_tokens,
            _Left(self.attempts),
            unopened=len(self.unopened),
            unopened_prefill_tokens=self._unopened_tokens,
            unopened_decode_tokens=self._unopened_answer_tokens,
            awaited=self._awaited(),
        )

    def _awaited(self) -> Awaited | None:
        """Servers compute prompts side by side, and what may be shed is put off: neither tells how fast a prompt is."""
        for attempt in self.textless:
            if attempt.info.remote:  # and so are all: each decision would look at everyone who waits for a first text
                return None
            told = attempt.work.told
            if told is not None and attempt.objective.priority >= 0 and attempt.sent_at_s > self.answered_s:
                return Awaited(attempt.sent_at_s, told.ttft_high_s)
        return None


class InFlight:
    """The attempts that run, in the order in which they began; every `begin` has exactly one `end`.

    Those that are held up for others are not among them.
    """

    def __init__(self) -> None:
        self._by_replica: dict[str, _Sent] = {}

    def __len__(self) -> int:
        return sum([len(sent.attempts) for sent in self._by_replica.values()])

    @property
    def idle(self) -> bool:
        """Whether nothing runs anywhere."""
        return not self._by_replica

    def __iter__(self) -> Iterator[Attempt]:
        return iter([attempt for sent in self._by_replica.values() for attempt in sent.attempts])

    def begin(self, attempt: Attempt) -> None:
        if attempt.held_up:
            return
        name = attempt.info.replica_id
        sent = self._by_replica.get(name)
        if sent is None:
            sent = self._by_replica[name] = _Sent()
        attempt.counted = sent.changed
        sent.begin(attempt)

    def end(self, attempt: Attempt) -> None:
        if attempt.held_up:
            return
        sent = self._by_replica[attempt.info.replica_id]
        sent.end(attempt)
        if not sent.attempts:
            del self._by_replica[attempt.info.replica_id]

    def count(self, replica_id: str) -> int:
        """Count the requests on a replica."""
        sent = self._by_replica.get(replica_id)
        return 0 if sent is None else len(sent.attempts)

    def on(self, replica_ids: Iterable[str]) -> list[Attempt]:
        """Return the attempts on some replicas, in the order in which those of each began."""
        found: list[Attempt] = []
        for name in replica_ids:
            if name in self._by_replica:
                found += self._by_replica[name].attempts
        return found

    def without_text(self, replica_id: str) -> int:
        """Count the requests on a replica of which no text has come yet."""
        sent = self._by_replica.get(replica_id)
        return 0 if sent is None else len(sent.textless)

    def unopened_at(self, endpoint: str) -> int:
        """Count the requests bound to an endpoint of which it knows nothing yet."""
        attempts = [attempt for sent in self._by_replica.values() for attempt in sent.unopened]
        return sum([attempt.info.endpoint == endpoint for attempt in attempts])

    def at(self, replica_id: str) -> InFlightLoad:
        """Return what was sent to a replica and has not ended; the same object until that changes."""
        sent = self._by_replica.get(replica_id)
        if sent is None:
            return NOTHING_IN_FLIGHT
        load = sent.load
        if load is None:
            load = sent.load = sent.summed_up()
        return load
