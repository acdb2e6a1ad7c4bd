"""One request from the queue to its last chunk, over as many replicas as that takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from router.base.errors import (
    DeadlineLost,
    OverspillError,
    ReplicaBroken,
    ReplicaCrashed,
    ReplicaError,
    ReplicasFailed,
)
from router.dispatch.assessment.pending import PendingRequest
from router.dispatch.attempts.blame import Verdict, outcome_of
from router.dispatch.attempts.budget import Tries
from router.dispatch.attempts.hedge import HedgedRun
from router.dispatch.attempts.run import AttemptRun, Surroundings
from router.dispatch.journey.feedback import Feedback
from router.dispatch.records.record import DecisionRecord
from router.signals.in_flight import Attempt
from router.signals.length import LengthWatch
from router.values.answer import Answer, Route, Tap
from router.values.chunk import FinishReason, Origin, TokenChunk
from router.values.request import InferenceRequest, Outcome
from router.values.usage import Usage

_RETRY_AFTER_S = 1.0


class Dispatching(Surroundings, Protocol):
    """What a journey asks of its tier: replicas for its attempts, and to be taken leave of."""

    async def bind(self, journey: Journey) -> Attempt:
        """Wait for a replica; raises an `OverspillError` if there is none for this request, now or ever."""
        ...

    def hedge_due_s(self, journey: Journey, attempt: Attempt) -> float:
        """When the first token of an attempt is late enough for a second one; infinity: it is not to be hedged."""
        ...

    def hedge(self, journey: Journey, late: Attempt) -> Attempt | None:
        """Take a slot for a second attempt beside `late`, if there is one to be had now."""
        ...

    def has_alternative(self, journey: Journey) -> bool:
        """Whether any other replica may still serve what is left of the request."""
        ...

    def computed(self, journey: Journey, now_s: float) -> None:
        """No replica works on an answer any more; its caller may have to read it still. Before `ended`, if at all."""
        ...

    def ended(self, journey: Journey, outcome: Outcome, error: str | None) -> None:
        """A request left the tier: exactly once for each."""
        ...


class Journey:
    """What is known of the request on its way; `router.dispatch.journey.answer_chunks` leads it.

    Attributes:
        length: what is believed of the whole answer's length, told how it goes on.
        request: what is left to do: after a break, with the text emitted so far as its continuation.
        route: where the answer comes from, set before the first chunk; changed at its end if it was cut.
        answer: what the caller holds, kept like `route`.
        hedged: the answer comes from a second attempt, made beside a first one that was late.
        gave_up: the answer gave its slot up before its deadline.
        cut: the answer was ended before the caller's own cap and before the model's end, by a cap or by the deadline.
        last_at_s: when the last token came.
        ended_at_s: when the answer was whole and no replica worked on it any more, None where it never was.
        tap: who takes its text past its reader.
        tries: what it was tried on.
        tokens, chars: what was made for the caller, who may still have to read some of it.
    """

    def __init__(
        self,
        dispatcher: Dispatching,
        feedback: Feedback,
        request: InferenceRequest,
        record: DecisionRecord,
        length: LengthWatch,
    ) -> None:
        self.dispatcher = dispatcher
        self.feedback = feedback
        self.request = self._accepted = request
        self.record = record
        self.length = length
        self.route: Route | None = None
        self.tokens = self.chars = 0
        self.degraded = self.cut = self.hedged = self.gave_up = False
        self.answer: Answer | None = None
        self.last_at_s: float | None = None
        self.ended_at_s: float | None = None
        self.tap: Tap | None = None
        self._told: Callable[[], None] | None = None
        self._cap: int | None = None
        self._window_left = 0
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._text: list[str] = []
        self._family = ""  # of who answered
        self._passed = False  # a piece of a reply that nobody else can go on with
        self._run: HedgedRun | None = None
        most, told = dispatcher.settings.max_attempts, request.attempts_left
        self.tries = Tries(record, most if told is None else min(most, told))

    def ready(self) -> bool:
        """Return whether the next chunk is here already: reading it waits for nothing."""
        return self._run is not None and self._run.ready

    def let_tap(self, tap: Tap) -> None:
        """See `router.values.answer.Tapped`."""
        self.tap = tap

    def used(self) -> Usage:
        """Return what was made for the caller so far, and for which prompt."""
        counted = self._prompt_tokens
        return Usage(self._accepted.prompt_tokens if counted is None else counted, self.tokens, self._cached_tokens)

    def take_leave(self, outcome: Outcome, error: str | None) -> None:
        """The request leaves the tier, with this outcome: called once."""
        self.dispatcher.ended(self, outcome, error)
        self._tell_computed()
        # They hold the journey: nothing of it shall wait for a garbage collection.
        self._run = self.answer = self.tap = None

    def when_computed(self, told: Callable[[], None]) -> None:
        """See `router.values.answer.Answer`."""
        self._told = told
        if self.ended_at_s is not None:
            self._tell_computed()

    def _tell_computed(self) -> None:
        told, self._told = self._told, None
        if told is not None:
            told()

    def refused(self, error: OverspillError) -> Outcome:
        """Note what the caller is told of a request that nobody finished."""
        self.record.failed_with(error)
        error.attempts = self.tries.spent or error.attempts
        return outcome_of(error)

    async def bind(self) -> Attempt:
        """Wait for the next replica.

        Raises:
            OverspillError: there is none, now or ever.
        """
        try:
            return await self.dispatcher.bind(self)
        except OverspillError as error:
            if not self._text:
                raise
            raise self._broken(error) from error

    def pending(self, wait_until_s: float) -> PendingRequest:
        tries = self.tries
        return PendingRequest(self.request, dict(tries.failed), wait_until_s, self.length, tries.refused_by)

    def begin(self, attempt: Attempt) -> HedgedRun:
        """Return the attempt as it is led from now on: a second one may be made beside it."""
        self.tries.number += 1
        request = self._capped(attempt)
        if attempt.info.remote:
            request = replace(request, attempts_left=self.tries.left_for(attempt))
        due_s = self.dispatcher.hedge_due_s(self, attempt)
        self._run = HedgedRun(self, self._running(attempt, request), due_s)
        return self._run

    def _running(self, attempt: Attempt, request: InferenceRequest) -> AttemptRun:
        trace = self.record.trace
        if trace is not None:
            span_id = trace.link_id(len(self.record.events)) if attempt.info.remote else trace.span_id
            request = replace(request, headers=trace.onward(request.headers, span_id))
        run = AttemptRun(self, self.dispatcher, attempt, request)
        attempt.ends_s = self.ends_s()
        if self.dispatcher.settings.give_up == "deadline" and attempt.ends_s < math.inf:
            attempt.give_up = run.give_up
        return run

    def second(self, late: Attempt) -> AttemptRun | None:
        """Return an attempt beside one whose first token is late, None where there is none to be had.

        The attempt that was kept for another endpoint pays for it, so an upstream may not try others for it.
        """
        attempt = self.dispatcher.hedge(self, late)
        if attempt is None:
            return None
        request = self._capped(attempt)
        return self._running(attempt, replace(request, attempts_left=1) if attempt.info.remote else request)

    def failed_beside(self, attempt: Attempt, error: OverspillError) -> None:
        """Note that one of two attempts failed while the other one goes on."""
        if not self._is_out_of_time(attempt, error):
            self._note_failure(attempt, error)

    def hedge_decided(self, winner: Attempt, *, second: bool) -> None:
        """Say who answers: `second`, if it was the later attempt."""
        self.hedged = second
        self.feedback.hedge_decided(winner, self, second=second)

    def ends_s(self) -> float:
        """When the answer has to end; infinity without a deadline, or where it no longer applies."""
        ends_s = self.request.objective.ends_s
        return math.inf if ends_s is None else self.request.accepted_at_s + ends_s

    def deadline_passed(self, attempt: Attempt) -> None:
        """Note that the time of an answer is over."""
        if not attempt.overdue:
            self.feedback.deadline_passed(attempt, self)

    def caller_left(self, attempt: Attempt) -> None:
        """Note that nobody waits for an answer any more that did not begin."""
        if not attempt.overdue:
            self.feedback.caller_left(attempt, self)

    def end_at_deadline(self, attempt: Attempt) -> TokenChunk:
        """End an answer whose time is over with the text so far.

        Raises:
            DeadlineLost: there is no text yet.
        """
        self.deadline_passed(attempt)
        if not self._text:
            deadline_s = self.request.objective.deadline_s
            raise DeadlineLost(
                f"the deadline of {deadline_s:g} s passed before the first token of {attempt.info.called}",
                retry_after_s=_RETRY_AFTER_S,
            )
        return TokenChunk("", tokens=0, finish_reason=FinishReason.LENGTH)

    def give_up(self, attempt: Attempt) -> None:
        """Note that an attempt gives its slot up; its reader hears of it when it has read what was made by then."""
        self.feedback.given_up(attempt, self)

    def end_given_up(self, attempt: Attempt) -> TokenChunk:
        """End an answer that gave its slot up with the text so far.

        Raises:
            DeadlineLost: there is no text.
        """
        if not self._text:
            raise DeadlineLost(
                f"the request gave up its slot on {attempt.info.called}: it could no longer keep its deadline of "
                f"{self.request.objective.deadline_s:g} s, and others wait",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.gave_up = True
        return TokenChunk("", tokens=0, finish_reason=FinishReason.LENGTH)

    def sign_of_life(self, attempt: Attempt) -> None:
        """Note that the first tokens of an attempt came, and show nothing."""
        self.feedback.sign_of_life(attempt)

    def cap_exceeded(self, attempt: Attempt) -> None:
        """Note that a replica went on past the cap that it was sent."""
        self.feedback.cap_exceeded(attempt, self)

    def over(self, attempt: Attempt, finished: FinishReason | None) -> None:
        """Give back what an attempt held: exactly once for each."""
        self.feedback.attempt_ended(attempt, self, finished)
        if finished is not None and self.ended_at_s is None:
            self.ended_at_s = now_s = self.dispatcher.clock.now_s()
            self.dispatcher.computed(self, now_s)
            self._tell_computed()

    def take(self, attempt: Attempt, chunk: TokenChunk, origin: Origin | None, now_s: float) -> None:
        """Count a chunk that goes to the caller."""
        if attempt.first_at_s is None:
            self._family = attempt.info.family
            self.degraded = self.degraded or attempt.choice.degraded or (origin is not None and origin.degraded)
            if self.route is None:
                self.route = self._route(attempt, origin)
        if chunk.cached_tokens is not None and self._cached_tokens is None and not self.counts_own_text:
            self._cached_tokens = chunk.cached_tokens
        if chunk.prompt_tokens is not None:
            self._prompt_tokens = chunk.prompt_tokens
        if chunk.finish_reason is not None:
            self._cap = _cap_of(attempt, origin)
            self._window_left = attempt.info.context_tokens - self._accepted.least_prompt_tokens
        if chunk.tokens and not attempt.overdue:
            self.last_at_s = now_s
        if chunk.text:
            self._text.append(chunk.text)
            self.chars += len(chunk.text)
        elif chunk.output is not None and chunk.finish_reason is None:
            self._passed = True
        self.tokens += chunk.tokens
        self.feedback.chunk_arrived(attempt, self, chunk, now_s)

    @property
    def counts_own_text(self) -> bool:
        """The prompt of the attempt that runs holds text of the answer, so its count is none of the caller's prompt."""
        return self.request.continuation_tokens > self._accepted.continuation_tokens

    def _route(self, attempt: Attempt, origin: Origin | None) -> Route:
        info, choice = attempt.info, attempt.choice
        reason = "failover" if self.tries.number > 1 else "hedge" if self.hedged else choice.reason
        if origin is not None and origin.degraded and not choice.degraded and origin.reason:
            reason = origin.reason
        return Route(
            tier=origin.tier if origin else info.tier,
            variant=origin.variant if origin else info.variant,
            rung=origin.rung if origin else info.rung,
            reason=reason,
            degraded=self.degraded,
            predicted_ttft_s=self.record.promised_ttft_s,
            max_tokens=_cap_of(attempt, origin),
        )

    def note_end(self, last: TokenChunk, now_s: float) -> None:
        """The answer is whole. Say of one that was cut that it is degraded, wherever that can still be said.

        A head that was sent with the first text can not change, so an upstream that keeps the deadline too does not
        tell: an answer under a deadline that ends by length, short of the caller's cap and of the window, was cut.
        """
        if self.ended_at_s is None:
            self.ended_at_s = now_s
        accepted, route = self._accepted, self.route
        if last.finish_reason is not FinishReason.LENGTH or route is None:
            return
        length, asked = self.tokens + accepted.continuation_tokens, accepted.sampling.max_tokens
        if asked is not None and length >= asked:
            return
        capped = self._cap is not None and length >= self._cap
        early = self.request.objective.deadline_s is not None and length < self._window_left
        self.cut = capped or early
        if self.cut and (self.gave_up or not self.degraded):
            self.degraded = True
            self.route = replace(route, degraded=True, reason="given-up" if self.gave_up else "shorter-answer")
            if self.answer is not None:
                self.answer.route = self.route

    def _capped(self, attempt: Attempt) -> InferenceRequest:
        """The request under the cap of the choice."""
        cap, sampling = attempt.choice.max_tokens, self.request.sampling
        if cap is None or (sampling.max_tokens is not None and sampling.max_tokens <= cap):
            return self.request
        return replace(self.request, sampling=replace(sampling, max_tokens=cap))

    def is_complete(self) -> bool:
        """Whether the caller has got all that it asked for."""
        cap = self.request.sampling.max_tokens
        return bool(self._text) and cap is not None and self.request.continuation_tokens >= cap

    def give_up_on(self, attempt: Attempt, error: OverspillError) -> None:
        """Note the failure, and fold what was emitted into the request; raises if no other replica may try."""
        if self._is_out_of_time(attempt, error):
            raise error
        if self._text:
            accepted = self._accepted
            self.request = replace(
                self._capped(attempt),  # the cap was disclosed with the first text, so it stays
                continuation=accepted.continuation + "".join(self._text),
                continuation_tokens=accepted.continuation_tokens + self.tokens,
                prompt_tokens=accepted.prompt_tokens + self.tokens,
                # A broken answer is finished as soon as can be: late is better than cut off. All else holds.
                objective=replace(accepted.objective, ttft_s=None, tpot_s=None, deadline_s=None, late_s=None),
            )
        own = self._note_failure(attempt, error) in {Verdict.REQUEST, Verdict.REFUSED_ONE}
        if self._passed:
            raise ReplicaBroken(f"the reply broke off, nobody can finish it: {error.message}") from error
        self.tries.keep_one_for_others(attempt)
        own = own or isinstance(error, ReplicaCrashed)  # perhaps on what the request holds
        if self.tries.over or (own and not self.dispatcher.has_alternative(self)):
            raise self._final(error) from error

    def _is_out_of_time(self, attempt: Attempt, error: OverspillError) -> bool:
        """Whether an attempt ended by the request's own deadline, and not by anything its replica did."""
        late = attempt.gave_up or self.dispatcher.clock.now_s() >= self.ends_s()
        return late and isinstance(error, DeadlineLost)

    def _note_failure(self, attempt: Attempt, error: OverspillError) -> Verdict:
        found = self.tries.note(attempt, error)
        self.feedback.failed(attempt, self, error)
        return found

    def _final(self, error: OverspillError) -> OverspillError:
        if self._text:
            return self._broken(error)
        if isinstance(error, ReplicaError) and not isinstance(error, ReplicaCrashed):
            return ReplicasFailed(
                f"{self.tries.number} replicas failed, the last: {error.message}", retry_after_s=_RETRY_AFTER_S
            )
        return error

    def _broken(self, error: OverspillError) -> ReplicaBroken:
        told = f"the answer broke off after {self.tokens} tokens, nobody can finish it: {error.message}"
        if self._family not in ("", self.request.model):  # the caller named one variant
            told += f"; ask for `{self._family}`, which other variants may finish, or send it again"
        return ReplicaBroken(told)


def _cap_of(attempt: Attempt, origin: Origin | None) -> int | None:
    """The cap in force: of the upstream that answers if it set one, else of the choice made here."""
    return origin.max_tokens if origin is not None and origin.max_tokens is not None else attempt.choice.max_tokens
