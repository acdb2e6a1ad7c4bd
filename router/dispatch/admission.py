"""Credits of admission at both ends of a tier: what tiers below may send here, what it wants of the tier above."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from router.base.clock import Clock
from router.dispatch.binding.queue import RequestQueue
from router.dispatch.records.telemetry import Telemetry
from router.policy.registry import load_policy
from router.signals.credits import CreditIssuer
from router.signals.signals import Signals
from router.values.credits import NOTHING_WANTED, Asker, Grant, Room, Want
from router.values.replica import ReplicaSnapshot
from router.values.request import Locality
from router.values.settings import RouterSettings


class Admission:
    """One tier's credits; its dispatcher tells it of waits and answers.

    Args:
        load: a snapshot of every replica that does not lead back to the instance named.
        queue: who waits in the tier.
    """

    def __init__(
        self,
        settings: RouterSettings,
        signals: Signals,
        clock: Clock,
        load: Callable[[str], Sequence[ReplicaSnapshot]],
        queue: RequestQueue,
    ) -> None:
        self._settings = settings
        self._signals = signals
        self._load = load
        self._queue = queue
        self._issuer = CreditIssuer(settings.credits, clock)
        self.waited = self._issuer.waited
        self.served = self._issuer.served

    def reconfigure(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._issuer.settings = settings.credits

    def grant(self, asker: Asker, want: Want) -> Grant | None:
        """Say what an instance of a tier below may send from now on; None sets no limit."""
        if not self._settings.credits.enabled:
            return None
        return self._issuer.ask(asker, want, self.room(asker.instance))

    def charge(self, asker: Asker) -> Callable[[], None]:
        """A request of an instance has come. Call the result if it is refused before it cost anything."""
        batch = self._issuer.used(asker) if self._settings.credits.enabled else None
        return _nothing if batch is None else partial(self._issuer.returned, asker, batch)

    def want(self) -> Want:
        """Count the waiting requests that may leave this tier."""
        if load_policy(self._settings.policy).locality is Locality.LOCAL_ONLY:
            return NOTHING_WANTED
        objectives = [entry.request.objective for entry in self._queue]
        leave = [objective for objective in objectives if objective.locality is not Locality.LOCAL_ONLY]
        return Want(len(leave), sum(objective.priority > 0 for objective in leave))

    def room(self, asker: str = "") -> Room:
        """Return what the replicas can take that do not lead back to `asker`; those of one device share its slots."""
        slots: Counter[str] = Counter()
        occupied: Counter[str] = Counter()
        for snapshot in self._load(asker):
            if snapshot.available and not self._signals.health.of(snapshot).code:
                device = snapshot.info.device_key
                slots[device] = max(slots[device], snapshot.slots)
                sent = self._signals.in_flight.count(snapshot.info.replica_id)
                occupied[device] += max(snapshot.running + snapshot.queued, sent)
        free = sum(max(0, slots[device] - occupied[device]) for device in slots)
        inside = sum(max(0, occupied[device] - slots[device]) for device in slots)
        return Room(sum(slots.values()), free, self._queue.wanted + inside)

    def watch(self, telemetry: Telemetry) -> None:
        """Register the gauges."""
        issuer = self._issuer
        telemetry.watch(
            "overspill_credits_outstanding",
            "Credits that instances of tiers below may still use.",
            (),
            lambda: [((), float(issuer.outstanding))],
        )
        telemetry.watch(
            "overspill_credits_in_line",
            "Instances of tiers below that wait for a credit.",
            (),
            lambda: [((), float(issuer.in_line))],
        )
        telemetry.watch(
            "overspill_credits",
            "Credits since the start, by what became of them; `unbacked`: requests of an instance that held none.",
            ("event",),
            lambda: [((name,), float(number)) for name, number in asdict(issuer.counts).items()],
        )


def _nothing() -> None:
    """A request without a credit gives none back."""
