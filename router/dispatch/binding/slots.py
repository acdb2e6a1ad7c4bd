"""Slots: a decision becomes an attempt that holds one, and one that nobody came for is given back."""

from __future__ import annotations

from router.base.clock import Clock
from router.dispatch.assessment.candidates import demand_on
from router.dispatch.assessment.pending import PendingRequest
from router.dispatch.binding.queue import QueueEntry, RequestQueue
from router.dispatch.records.telemetry import Telemetry
from router.dispatch.replicas.pool import Pool
from router.signals.in_flight import Attempt
from router.signals.signals import Signals
from router.values.choice import Choice
from router.values.prediction import TtftFeatures


class Slots:
    """Takes slots for requests, and says so to everything that counts them."""

    def __init__(self, signals: Signals, clock: Clock, telemetry: Telemetry, queue: RequestQueue, pool: Pool) -> None:
        self._signals = signals
        self._clock = clock
        self._telemetry = telemetry
        self._queue = queue
        self._pool = pool

    def take(self, entry: QueueEntry, choice: Choice) -> None:
        """Bind an entry as decided: it leaves the queue with an attempt that holds a slot."""
        now_s = self._clock.now_s()
        pending, record, info = entry.pending, entry.record, choice.candidate.info
        attempt = self.attempt(pending, choice)
        self._pool.remember_session(pending.request.objective.session, info.replica_id)
        self._learn_wait(entry, attempt, now_s)
        if not entry.continuing:
            record.waited_s = now_s - pending.request.accepted_at_s
            self._count(choice, None if entry.in_slack else record.waited_s)
        record.happened(now_s, "sent", replica=info.replica_id, reason=choice.reason, max_tokens=choice.max_tokens)
        self._charge(entry, attempt, now_s)
        attempt.trial = self._signals.health.breaker(info).begin()
        self.begin(attempt)  # last: nothing may fail between taking the slot and handing it over
        self._queue.leave(entry)
        entry.bound.set_result(attempt)

    def attempt(self, pending: PendingRequest, choice: Choice) -> Attempt:
        """Return what would be sent now."""
        info, pool = choice.candidate.info, self._pool.look()
        view = pool.views[info.replica_id]
        expected = expected_tokens(pending, choice)
        demand = demand_on(pending, info, self._signals.affinity, expected)
        held_up = info.holds_up and pending.request.objective.yields
        return Attempt(
            replica=view.replica,
            choice=choice,
            sent_at_s=self._clock.now_s(),
            work=TtftFeatures(demand.prompt_tokens, choice.candidate.prediction.network_s)
            if held_up
            else self._signals.latency.sent(view.snapshot, view.link, demand, view.mine, siblings=view.siblings),
            prompt_tokens=demand.prompt_tokens,
            expected_tokens=expected,
            length=None if pending.request.continuation_tokens else pending.length.curve,
            objective=pending.request.objective,
            held_up=held_up,
        )

    def begin(self, attempt: Attempt) -> None:
        """Take the slot of an attempt."""
        self._signals.in_flight.begin(attempt)
        self._pool.changed(attempt.info.device_key)
        self._queue.stand_back()

    def give_back(self, attempt: Attempt) -> None:
        """Free the slot of an attempt that was never sent."""
        self._signals.in_flight.end(attempt)
        if not attempt.held_up:
            self._signals.latency.ended(attempt, self._clock.now_s(), whole=False)
        if attempt.trial:
            self._signals.health.breaker(attempt.info).abandon()

    def _learn_wait(self, entry: QueueEntry, attempt: Attempt, now_s: float) -> None:
        """Hold the wait that was first hoped for against the one that came."""
        if entry.promised is None or attempt.held_up:
            return
        hoped, info = entry.promised.candidate, attempt.info
        if hoped.info.replica_id == info.replica_id and not self._pool.by_credits(info.replica_id):
            waited_s = now_s - entry.entered_s
            self._signals.latency.observe_wait(info, hoped.prediction.wait_s, entry.wait_factor, waited_s)

    def _charge(self, entry: QueueEntry, attempt: Attempt, now_s: float) -> None:
        """Charge what it is expected to take to its caller's share, and to that of the oldest."""
        prediction = attempt.choice.candidate.prediction
        device_s = prediction.prefill_s + attempt.expected_tokens * prediction.token_device_s
        if not entry.in_slack:
            self._signals.shares.took(entry.request.caller, now_s, device_s)
        if len(self._queue) > 1:
            oldest = self._queue.oldest(self._pool.line(attempt.info.replica_id))
            self._signals.oldest_first.took(
                device_s,
                self._pool.settings.fairness.oldest_first,
                oldest=oldest is None or (entry.age_key, entry.order) <= (oldest[0], oldest[1].order),
            )

    def _count(self, choice: Choice, waited_s: float | None) -> None:
        if waited_s is not None:
            self._telemetry.queue_wait_s.observe(waited_s)
        if choice.reason == "step-down":
            self._telemetry.step_downs.labels(choice.candidate.info.variant).inc()


def expected_tokens(pending: PendingRequest, choice: Choice) -> int:
    """Expected length of the rest of the answer under the cap of the choice."""
    expected, cap = pending.expected_tokens(choice.candidate.info.context_tokens), choice.max_tokens
    return expected if cap is None else max(1, min(expected, cap - pending.request.continuation_tokens))
