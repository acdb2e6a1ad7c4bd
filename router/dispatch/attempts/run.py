"""One attempt at an answer: its chunks under every bound, until all that it held is given back."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Protocol

import structlog
from msgspec.structs import replace

from router.base.alarms import Alarms
from router.base.clock import Clock
from router.base.errors import (
    OverspillError,
    ReplicaBroken,
    ReplicaCrashed,
    ReplicaError,
    ReplicaFailed,
    ReplicaUnreachable,
)
from router.dispatch.attempts.answer_room import AnswerRoom
from router.dispatch.attempts.stream import AttemptStream, Elapsed
from router.signals.in_flight import Attempt
from router.values.answer import Tap
from router.values.chunk import FinishReason, Origin, TokenChunk
from router.values.request import InferenceRequest
from router.values.settings import RouterSettings

log = structlog.get_logger("router")


class Surroundings(Protocol):
    """What a tier gives to each attempt."""

    settings: RouterSettings
    clock: Clock
    alarms: Alarms


class Traveller(Protocol):
    """The journey that an attempt is part of.

    Attributes:
        tap: see `router.values.answer.Tapped`.
    """

    tap: Tap | None

    @property
    def counts_own_text(self) -> bool:
        """The prompt of the attempt holds text of the answer."""
        ...

    def ends_s(self) -> float:
        """When the answer has to end, on the tier's clock."""
        ...

    def take(self, attempt: Attempt, chunk: TokenChunk, origin: Origin | None, now_s: float) -> None:
        """A chunk goes to the caller."""
        ...

    def sign_of_life(self, attempt: Attempt) -> None:
        """The first tokens came, and show nothing."""
        ...

    def cap_exceeded(self, attempt: Attempt) -> None:
        """The replica went on past its cap; the answer ends there."""
        ...

    def deadline_passed(self, attempt: Attempt) -> None:
        """The time of the answer is over."""
        ...

    def end_at_deadline(self, attempt: Attempt) -> TokenChunk:
        """Return the last chunk of an answer whose time is over; raises `DeadlineLost` without any text."""
        ...

    def caller_left(self, attempt: Attempt) -> None:
        """The caller left before the first token."""
        ...

    def give_up(self, attempt: Attempt) -> None:
        """The attempt gives its slot up."""
        ...

    def end_given_up(self, attempt: Attempt) -> TokenChunk:
        """Return the last chunk of an answer that gave its slot up; raises `DeadlineLost` without any text."""
        ...

    def over(self, attempt: Attempt, finished: FinishReason | None) -> None:
        """All that the attempt held can be given back: called once."""
        ...


class AttemptRun:
    """One attempt, from the moment its replica gets the request until all that it held is given back.

    Chunks without text (half a character, the beginning of a stop string) are held back and counted with the next one,
    so that what the caller has got is always whole tokens, and a break loses none of them. From the first one on chunks
    are counted as they come, and the slot is given back as the replica ends: who reads slowly holds up nobody, and no
    replica looks slow for it.
    """

    def __init__(
        self, journey: Traveller, surroundings: Surroundings, attempt: Attempt, request: InferenceRequest
    ) -> None:
        self._journey = journey
        self.attempt = attempt
        self._request_id = request.request_id
        self._surroundings = surroundings
        self._clock = surroundings.clock
        # What is held up for others may be silent for as long as these are there; its replica tells when it has died.
        self._timeout_s = math.inf if attempt.held_up else surroundings.settings.first_token_timeout_ms / 1e3
        self._ends_s = journey.ends_s()
        self._room = AnswerRoom(request.most_answer_tokens(attempt.info.context_tokens))
        self._held = TokenChunk("", 0)  # what chunks without text have told
        self._origin: Origin | None = None
        self._cached_tokens: int | None = None
        self._finished: FinishReason | None = None
        self._quiet_since_s = self._clock.now_s()
        self._over = False
        self._silent = False  # it was ended for that, while its reader was away
        self.stream = AttemptStream(attempt, request, self._clock, surroundings.alarms)

    async def __aenter__(self) -> AttemptRun:
        await self.stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        waited = not self._over and self.attempt.first_at_s is None and self.stream.quiet
        if waited and isinstance(error, asyncio.CancelledError):
            self._journey.caller_left(self.attempt)
        try:
            await self.stream.__aexit__(kind, error, trace)
        finally:
            self._give_back()

    def give_up(self) -> bool:
        """End the work on the replica now; see `Attempt.give_up`."""
        if self.attempt.gave_up or self._over or self.stream.whole:
            return False
        self._journey.give_up(self.attempt)
        if self.attempt.first_at_s is not None:
            self._finished = FinishReason.LENGTH
        self.stream.stop(self._give_back)
        return True

    def _give_back(self) -> None:
        if not self._over:
            self._over = True
            if self.attempt.give_up is not None:
                self.attempt.give_up = _is_over  # its own holds this run, which holds the attempt
            self._journey.over(self.attempt, self._finished)

    def let_go(self) -> None:
        """End the work on the replica now, and free its slot, without waiting for either: another one answers."""
        if not self._over:
            self.stream.stop(self._give_back)

    async def begins(self, due_s: float) -> bool:
        """Return as soon as anything comes of it, an end included; False if that was not by `due_s`."""
        await self.stream.news(min(due_s, self._quiet_since_s + self._timeout_s, self._ends_s))
        return not self.stream.quiet

    async def receive(self) -> TokenChunk:
        """Wait for the next chunk that the caller is to get; every wait is bounded.

        Raises:
            OverspillError: the attempt failed.
        """
        if self.attempt.first_at_s is None:
            return self.begin(await self.first())
        chunk = self.stream.pop()
        if chunk is None:
            self._quiet_since_s = self._clock.now_s()
            tapped = None if self._journey.tap is None else self._pass_on
            await self.stream.news(min(self._quiet_since_s + self._timeout_s, self._ends_s), tapped)
            chunk = self.stream.pop()
            if chunk is None:
                chunk = self._hand_on(self._nothing_came(), self._clock.now_s())
        return chunk

    async def first(self) -> TokenChunk:
        """Wait for the first chunk that shows something, or ends the answer: `begin` counts it.

        Raises:
            OverspillError: the attempt failed.
        """
        while True:
            read = self._at_hand()
            if read is None:
                await self.stream.news(min(self._quiet_since_s + self._timeout_s, self._ends_s))
                read = self.stream.pop()
                if read is None:
                    read = self._nothing_came()
            chunk = self._fit(read)
            if chunk is not None:
                return chunk
            if self._clock.now_s() > self._quiet_since_s + self._timeout_s:
                raise self._broken("nothing but empty chunks for too long")

    def begin(self, first: TokenChunk) -> TokenChunk:
        """The answer is this attempt's, and begins with that chunk."""
        chunk = self._hand_on(first, self._clock.now_s())
        self.stream.follow(self._arrived, self._give_back, self._due)
        self._quiet_since_s = self._clock.now_s()
        self.stream.wait_until(min(self._quiet_since_s + self._timeout_s, self._ends_s))
        return chunk

    def _fit(self, read: TokenChunk) -> TokenChunk | None:
        """Return what of a chunk has room, None where it shows nothing and is held back."""
        chunk, over = self._room.fit(read)
        if over:
            self._journey.cap_exceeded(self.attempt)
        self._origin = chunk.origin or self._origin
        if chunk.text or chunk.reasoning or chunk.output is not None or chunk.finish_reason is not None:
            return chunk
        self._held = _joined(self._held, chunk)
        self._cached_tokens = chunk.cached_tokens if self._cached_tokens is None else self._cached_tokens
        if chunk.tokens:
            if not self.attempt.alive:
                self._journey.sign_of_life(self.attempt)
            self._quiet_since_s = self._clock.now_s()
            self.stream.wait_until(min(self._quiet_since_s + self._timeout_s, self._ends_s))
        return None

    def _arrived(self, read: TokenChunk) -> TokenChunk | None:
        """Count a chunk that has come, wherever its reader is."""
        if self._finished is not None:
            return None  # it goes on after its end
        now_s = self._clock.now_s()
        if now_s > self._ends_s:
            self._end_late()
            return None
        fitting = self._fit(read)
        if fitting is None:
            return None
        chunk = self._hand_on(fitting, now_s)
        self._quiet_since_s = now_s
        if read.finish_reason is None and chunk.finish_reason is not None:  # it was cut, and would go on
            self.stream.stop(self._give_back)
        return chunk

    def _due(self) -> None:
        """Time has passed while the reader is away: at the deadline, or where it is silent for too long, it ends."""
        if self._finished is not None:
            return
        now_s = self._clock.now_s()
        if now_s >= self._ends_s:
            self._end_late()
            return
        if self.stream.waits_for_reader:
            self._quiet_since_s = now_s + self._timeout_s  # that is none of its silence, and it may go on at any moment
        elif now_s >= self._quiet_since_s + self._timeout_s:
            self._silent = True
            self.stream.stop(self._give_back)
            return
        self.stream.wait_until(min(self._quiet_since_s + self._timeout_s, self._ends_s))

    def _end_late(self) -> None:
        """The deadline has passed while the reader was away: the slot is free now, the reader is told when it comes."""
        self._journey.deadline_passed(self.attempt)
        self._finished = FinishReason.LENGTH
        self.stream.stop(self._give_back)

    def _hand_on(self, chunk: TokenChunk, now_s: float) -> TokenChunk:
        """Count a chunk as the caller's, with what was held back before it."""
        journey = self._journey
        if chunk.prompt_tokens is not None and journey.counts_own_text:
            chunk = replace(chunk, prompt_tokens=None)
        if self._held.tokens or self._held.prompt_logprobs:
            chunk, self._held = _joined(self._held, chunk), TokenChunk("", 0)
        if self._cached_tokens is not None:
            chunk, self._cached_tokens = replace(chunk, cached_tokens=self._cached_tokens), None
        self._finished = chunk.finish_reason or self._finished
        if not self.attempt.held_up:
            self._timeout_s = self._surroundings.settings.stall_timeout_ms / 1e3
        journey.take(self.attempt, chunk, self._origin, now_s)
        if chunk.cached_tokens is not None and journey.counts_own_text:
            return replace(chunk, cached_tokens=None)  # text of the answer may be part of what was found
        return chunk

    def _pass_on(self, chunks: list[TokenChunk]) -> bool:
        """Hand on what is no more than text, past who waits for it; returns whether it was."""
        tap, now_s = self._journey.tap, self._clock.now_s()
        if tap is None or tap.full or now_s >= self._ends_s or not self._room.take(chunks):
            return False
        tap.give([self._hand_on(chunk, now_s) for chunk in chunks])
        self._quiet_since_s = now_s
        self.stream.wait_until(min(now_s + self._timeout_s, self._ends_s))
        return True

    def _at_hand(self) -> TokenChunk | None:
        """Return the next chunk if nobody has to wait for it."""
        if self._ends_s < math.inf and self._clock.now_s() >= self._ends_s and not self.attempt.gave_up:
            return self._journey.end_at_deadline(self.attempt)  # its reader took too long
        return self.stream.pop()

    def _nothing_came(self) -> TokenChunk:
        """Say why a wait ended without a chunk; what a replica did wrong becomes an error of the tree."""
        attempt = self.attempt
        try:
            return self.stream.take()
        except (StopAsyncIteration, Elapsed) as nothing:
            if attempt.gave_up:
                return self._journey.end_given_up(attempt)
            if attempt.overdue:
                return self._journey.end_at_deadline(attempt)
            if self._silent:
                raise self._stood_still() from None
            if isinstance(nothing, StopAsyncIteration):
                raise self._broken("the stream ended without a finish reason") from None
            if self._clock.now_s() >= self._ends_s:
                return self._journey.end_at_deadline(attempt)
            if attempt.first_at_s is None:
                silent = f"no first token within {self._timeout_s:g} s (`router.first_token_timeout_ms`)"
                raise ReplicaUnreachable(f"{attempt.info.called}: {silent}") from None
            raise self._stood_still() from None
        except OverspillError:
            raise
        except Exception as error:  # its bug is its failure, or the request's: one other replica may try
            log.exception("replica crashed", replica=attempt.info.replica_id, request_id=self._request_id)
            raise ReplicaCrashed(f"{attempt.info.called}: crashed with {type(error).__name__}") from error

    def _stood_still(self) -> ReplicaError:
        return self._broken(f"silent for {self._timeout_s:g} s in its answer (`router.stall_timeout_ms`)")

    def _broken(self, why: str) -> ReplicaError:
        kind = ReplicaFailed if self.attempt.first_at_s is None else ReplicaBroken
        return kind(f"{self.attempt.info.called}: {why}")


def _is_over() -> bool:
    """An attempt that is over gives nothing up."""
    return False


def _joined(held: TokenChunk, chunk: TokenChunk) -> TokenChunk:
    """Return the chunk with what was told before it, of chunks without text."""
    return replace(
        chunk,
        tokens=held.tokens + chunk.tokens,
        logprobs=(*held.logprobs, *chunk.logprobs),
        prompt_logprobs=(*held.prompt_logprobs, *chunk.prompt_logprobs),
    )
