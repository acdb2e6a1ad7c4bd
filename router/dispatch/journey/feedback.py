"""What attempts teach: each event of an attempt goes into estimates, breakers, the decision record, metrics and logs.

Binding decides by the estimates; this is where they are written. It learns alike from answers and from what did not
come: a first token that is late took at least so long.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Protocol, final

import structlog

from router.base.clock import Clock
from router.base.errors import OverspillError, Refused
from router.dispatch.admission import Admission
from router.dispatch.attempts.blame import Verdict, source_of, verdict
from router.dispatch.binding.binder import Binder
from router.dispatch.probes.self_test import SelfTests
from router.dispatch.records.record import DecisionRecord
from router.dispatch.records.telemetry import Telemetry
from router.signals.in_flight import Attempt
from router.signals.length import LengthWatch
from router.signals.signals import Signals
from router.values.chunk import FinishReason, TokenChunk
from router.values.request import InferenceRequest

log = structlog.get_logger("router")

# No first token in so many times its predicted upper figure, until nobody waits for it: it is broken rather than slow.
_SILENT = 4.0
_SILENT_LEAST_S = 1.0  # callers choose how long they wait, and a short time says nothing about the replica


class Progress(Protocol):
    """How far a request has come: what of its journey there is to learn from.

    Attributes:
        request: what is left to do.
        length: what is believed of the whole answer's length, told how it goes on.
        tokens, chars: what was made for the caller.
    """

    request: InferenceRequest
    record: DecisionRecord
    length: LengthWatch
    tokens: int
    chars: int


@dataclass(frozen=True, slots=True)
class _Bar:
    """The upper figure of a first token, its wait apart, that stood for so many tokens to prefill."""

    high_s: float
    tokens: float


@final
class Feedback:
    """Called by journeys, on the event loop; `attempt_ended` once for each attempt.

    What is waited for in vain raises what is predicted, and by that alone a replica that hangs would be expected to
    take ever longer, and never be silent. So each that lets callers wait in vain has a bar: what was predicted before
    the first of them taught anything. It stands until the replica shows a sign of life.
    """

    def __init__(
        self,
        signals: Signals,
        binder: Binder,
        self_tests: SelfTests,
        admission: Admission,
        *,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._signals = signals
        self._binder = binder
        self._self_tests = self_tests
        self._admission = admission
        self._telemetry = telemetry
        self._clock = clock
        self._bars: dict[str, _Bar] = {}  # by replica id

    def keep_only(self, replica_ids: set[str]) -> None:
        """Forget replicas that are gone."""
        self._bars = {name: bar for name, bar in self._bars.items() if name in replica_ids}

    def hedge_decided(self, winner: Attempt, journey: Progress, *, second: bool) -> None:
        """Count who was first with a token; the other one teaches that it would have taken at least so long."""
        self._telemetry.hedges.labels("won" if second else "lost").inc()
        if second:
            journey.record.choice = winner.choice
            self._binder.pool.remember_session(journey.request.objective.session, winner.info.replica_id)
        event = "hedge_won" if second else "hedge_lost"
        journey.record.happened(self._clock.now_s(), event, replica=winner.info.replica_id)

    def sign_of_life(self, attempt: Attempt) -> None:
        """The first tokens of an attempt came, with or without text."""
        attempt.alive = True
        self._bars.pop(attempt.info.replica_id, None)

    def chunk_arrived(self, attempt: Attempt, journey: Progress, chunk: TokenChunk, now_s: float) -> None:
        """A chunk arrived: learn TTFT from the first, count the tokens of all."""
        info = attempt.info
        if attempt.first_at_s is None:
            self.sign_of_life(attempt)
            attempt.first_at_s = now_s
            attempt.own_s = chunk.own_s
            if not attempt.held_up:
                attempt.mark = self._signals.latency.first_token(attempt, now_s, chunk.cached_tokens)
            self._signals.affinity.began(journey.request, info.replica_id, chunk.cached_tokens, attempt.sent_at_s)
            if len(self._signals.canaries) and not attempt.held_up:
                took_s = now_s - attempt.sent_at_s
                self._signals.canaries.first_token(info, journey.request, attempt.sent_at_s, took_s)
            journey.record.happened(now_s, "first_token", replica=info.replica_id)
            if journey.record.ttft_s is None:
                self._note_ttft(attempt, journey, now_s - journey.request.accepted_at_s)
        elif chunk.cached_tokens is not None:
            self._signals.affinity.told(journey.request, info.replica_id, chunk.cached_tokens)
        attempt.came(chunk.tokens, now_s)
        if journey.tokens >= journey.length.next_tokens:
            self._signals.lengths.grew(journey.length, journey.tokens)
        self._telemetry.tokens.labels(info.tier, info.variant).inc(chunk.tokens)

    def _note_ttft(self, attempt: Attempt, journey: Progress, ttft_s: float) -> None:
        record, info = journey.record, attempt.info
        record.ttft_s = ttft_s
        if attempt.held_up:
            return
        if not record.objective.in_slack:  # what nobody waits for is no figure of what callers see
            self._telemetry.ttft_s.labels(info.tier, info.variant).observe(ttft_s)
        if record.promised_ttft_s and record.promised_ttft_high_s:
            ratio = self._telemetry.ttft_ratio.labels(info.tier, info.variant)
            ratio.observe(ttft_s / record.promised_ttft_s)
            within = ttft_s <= record.promised_ttft_high_s
            self._telemetry.ttft_predictions.labels("yes" if within else "no").inc()

    def attempt_ended(self, attempt: Attempt, journey: Progress, finished: FinishReason | None) -> None:
        """An attempt ended, whichever way: give the slot back, and learn from a finished answer."""
        now_s, info = self._clock.now_s(), attempt.info
        self._signals.in_flight.end(attempt)
        whole = finished is not None and not attempt.overdue and not attempt.gave_up
        if not attempt.held_up:
            self._learn_times(attempt, journey, now_s, finished=finished is not None, whole=whole)
        self._tell_breaker(attempt, journey, whole=whole)
        if not attempt.outrun:
            journey.record.finished = finished
        if finished is not None:
            self._signals.affinity.ended(journey.request, info.replica_id, journey.tokens)
            pace_s = None if attempt.held_up else attempt.pace_s
            self._signals.canaries.ended(info, journey.request, attempt.sent_at_s, pace_s)
            if pace_s is not None:
                self._telemetry.tpot_s.labels(info.tier, info.variant).observe(pace_s)
            if not attempt.overran:
                stopped = finished is FinishReason.STOP
                self._signals.lengths.ended(journey.length, info.family, journey.tokens, by_itself=stopped)
        self._binder.wake(info.replica_id)

    def left(self, journey: Progress) -> None:
        """A request left the tier: where nobody else is there, who comes next does not wait for what it taught."""
        self._signals.affinity.left(journey.request)
        if self._signals.in_flight.idle and not len(self._binder.queue):
            self._signals.lengths.settle(journey.length)

    def _learn_times(self, attempt: Attempt, journey: Progress, now_s: float, *, finished: bool, whole: bool) -> None:
        """Learn how long an attempt took that has ended."""
        if not attempt.held_back:
            if finished:
                self._signals.peaks.observe(attempt.info.replica_id, now_s, now_s - attempt.sent_at_s)
            if attempt.first_at_s is not None:
                self._admission.served(now_s - attempt.sent_at_s)
        whole = whole and not attempt.held_back
        self._signals.latency.ended(attempt, now_s, whole=whole, length=journey.length.curve)
        if attempt.outrun:
            self._late_to_begin(attempt)

    def deadline_passed(self, attempt: Attempt, journey: Progress) -> None:
        """The deadline ends an answer. One that did not even begin would have taken at least so long: learn that."""
        attempt.overdue = True
        journey.record.happened(self._clock.now_s(), "deadline", replica=attempt.info.replica_id)
        if attempt.first_at_s is None:
            self._waited_in_vain(attempt, journey)
            self._late_to_begin(attempt)

    def caller_left(self, attempt: Attempt, journey: Progress) -> None:
        """Nobody waits any more for an answer that did not begin; a line that is stopped was held up for others."""
        if not attempt.held_up and not journey.request.objective.in_slack:
            self._waited_in_vain(attempt, journey)
            if not attempt.silent:  # else a self-test tells first whether it is broken, or only slow
                self._late_to_begin(attempt)

    def _waited_in_vain(self, attempt: Attempt, journey: Progress) -> None:
        """Whoever waited for a first token waits no more, and none had come."""
        took_s = self._clock.now_s() - attempt.sent_at_s
        self._signals.canaries.first_token(attempt.info, journey.request, attempt.sent_at_s, took_s)
        counted = journey.request.prompt_slack == 0  # an estimate may be that far off by itself
        attempt.silent = counted and not attempt.alive and took_s > self._silent_s(attempt)

    def _silent_s(self, attempt: Attempt) -> float:
        """Return the seconds from which on an attempt without a sign of life is silent."""
        prediction, bar = attempt.choice.candidate.prediction, self._bars.get(attempt.info.replica_id)
        high_s = prediction.ttft_high_s
        if bar is not None:
            longer = max(1.0, attempt.work.prefill_tokens / bar.tokens)
            high_s = min(high_s, prediction.wait_s + bar.high_s * longer)
        return max(_SILENT * high_s, _SILENT_LEAST_S)

    def given_up(self, attempt: Attempt, journey: Progress) -> None:
        """An answer gives its slot up before its deadline. It is told, counted, and no verdict on its replica."""
        attempt.gave_up = True
        began = attempt.first_at_s is not None
        info = attempt.info
        journey.record.happened(self._clock.now_s(), "given_up", replica=info.replica_id, emitted_tokens=journey.tokens)
        self._telemetry.given_up.labels("yes" if began else "no").inc()
        self._late_to_begin(attempt)

    def _late_to_begin(self, attempt: Attempt) -> None:
        """Learn of an attempt that ends before its first token that it would have taken at least so long."""
        self._took_at_least(attempt, self._clock.now_s() - attempt.sent_at_s)

    def _took_at_least(self, attempt: Attempt, took_s: float) -> None:
        prediction = attempt.choice.candidate.prediction
        if attempt.first_at_s is None and took_s > prediction.ttft_s:
            if not attempt.alive:
                bar = _Bar(prediction.ttft_high_s - prediction.wait_s, attempt.work.prefill_tokens)
                self._bars.setdefault(attempt.info.replica_id, bar)
            self._signals.latency.observe_ttft(attempt.info, attempt.work, took_s, censored=True)

    def _only_slow(self, attempt: Attempt, took_s: float) -> None:
        """A replica has answered our own word: what its callers waited in vain, 0 for nothing, is how slow it is."""
        self._took_at_least(attempt, took_s)
        self._bars.pop(attempt.info.replica_id, None)

    def cap_exceeded(self, attempt: Attempt, journey: Progress) -> None:
        """A replica went on past the cap that it was sent: the answer ends there, and teaches nothing of lengths."""
        info = attempt.info
        attempt.overran = True
        journey.record.happened(self._clock.now_s(), "cap_exceeded", replica=info.replica_id)
        self._telemetry.replica_failures.labels(info.endpoint, "cap_exceeded").inc()
        log.warning("replica ignores the cap", request_id=journey.request.request_id, replica=info.replica_id)

    def failed(self, attempt: Attempt, journey: Progress, error: OverspillError) -> None:
        """An attempt failed: tell the breaker, or remember when the replica wants to be asked again, if at all."""
        info, found, health = attempt.info, verdict(error), self._signals.health
        if found is Verdict.REQUEST:
            self._signals.canaries.failed(info, journey.request, attempt.sent_at_s)
        if found.counts:
            self._count_failure(attempt, journey, found)
        elif isinstance(error, Refused) and found.cools:
            everyone = found is Verdict.REFUSED_ALL
            health.refused(info, error.retry_after_s, None if everyone else journey.request.objective.priority)
        began = attempt.first_at_s is not None
        journey.record.happened(
            self._clock.now_s(),
            "failover" if began else "attempt_failed",
            replica=info.replica_id,
            code=error.code,
            error=error.message,
            emitted_tokens=journey.tokens,
            emitted_chars=journey.chars,
        )
        self._telemetry.failovers.labels("mid_stream" if began else "before_first_token", info.endpoint).inc()
        self._telemetry.replica_failures.labels(info.endpoint, error.code).inc()
        log.log(
            logging.WARNING if found.counts else logging.INFO,
            "attempt failed",
            request_id=journey.request.request_id,
            replica=info.replica_id,
            fault=found.value,
            error=error.message,
        )

    def _tell_breaker(self, attempt: Attempt, journey: Progress, *, whole: bool) -> None:
        """Say how an attempt ended that raised no error; `failed` says it of the others."""
        breaker = self._signals.health.breaker(attempt.info)
        if whole:
            breaker.succeed()
        elif attempt.silent:
            self._count_failure(attempt, journey, Verdict.DOWN)
        elif attempt.trial:
            breaker.abandon()

    def _count_failure(self, attempt: Attempt, journey: Progress, found: Verdict) -> None:
        """Tell the breaker; where that makes it suspicious, test the replica with a prompt of our own."""
        breaker, request = self._signals.health.breaker(attempt.info), journey.request
        self._signals.canaries.failed(attempt.info, request, attempt.sent_at_s)
        if breaker.fail(source=source_of(request, found), trial=attempt.trial):
            silent_s, took_s = self._silent_s(attempt), self._clock.now_s() - attempt.sent_at_s
            waited = found is Verdict.DOWN and not attempt.alive and took_s > silent_s
            learns = waited and not (attempt.held_up or attempt.overdue)  # what a deadline cut is learnt already
            passed = partial(self._only_slow, attempt, took_s if learns else 0.0)
            self._self_tests.begin(attempt.replica, breaker, request.prompt, silent_s, passed)
