"""How many slots a load needs: queueing formulas, without state or clock.

    a      = λ · S                          offered load: slots that would be busy on average
    C(N,a) = B / (1 − ρ · (1 − B))          chance to wait in M/M/N (Erlang, 1917); ρ = a / N
    B(n,a) = a·B(n−1) / (n + a·B(n−1))      Erlang's loss formula, by its recursion from B(0) = 1
    P(W>t) = C · exp(−(N − a) · t / (S·v))  wait beyond t; v = (c_a² + c_s²) / 2 for arrivals and answers that vary more
                                            or less than Poisson's (Allen and Cunneen, 1978; Whitt, 1993)

The least N with P(W > t) ≤ 1 − share is what square-root staffing, a + β·√a, approximates (Halfin and Whitt, 1981); the
exact sum is cheap enough. t is what promises leave for waiting.

A backlog of Q that is to begin within d, while R run: at once N − R can, and N·d/S slots become free. d is t where a
replica starts as soon as that; else the promises of who waits are lost before it can help, and d is the cold start:

    N ≥ (R + Q + λ·d) / (1 + d / S)
"""

from __future__ import annotations

import math

import msgspec

_MOST_SLOTS = 1_000_000
_LEAST_BUDGET_S = 0.05


class Work(msgspec.Struct, frozen=True):
    """A load, as the formulas take it.

    Attributes:
        arrivals_per_s: λ, as it is expected when a replica that is asked for now serves.
        service_s: S, seconds that an answer holds its slot on a replica all of whose slots are taken.
        variability: v; 1 for Poisson arrivals and exponential answers.
        budget_s: t, seconds that promises leave for waiting; drain_s: seconds of a cold start.
        running: R, answers in slots.
        backlog: Q, requests that will be waiting when a replica that is asked for now serves.
    """

    arrivals_per_s: float
    service_s: float
    variability: float = 1.0
    budget_s: float = 1.0
    drain_s: float = 0.0
    running: float = 0.0
    backlog: float = 0.0

    @property
    def offered_slots(self) -> float:
        return self.arrivals_per_s * self.service_s


def waits_longer(slots: int, work: Work) -> float:
    """Return P(W > budget) with so many slots; 1 where they cannot keep up at all."""
    offered = work.offered_slots
    if offered <= 0.0:
        return 0.0
    if slots <= offered:
        return 1.0
    blocked = 1.0
    for n in range(1, slots + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return _beyond(slots, offered, blocked, work)


def _beyond(slots: int, offered: float, blocked: float, work: Work) -> float:
    waits = blocked / (1.0 - offered / slots * (1.0 - blocked))
    drained = (slots - offered) * max(work.budget_s, _LEAST_BUDGET_S) / (work.service_s * work.variability)
    return waits * math.exp(-drained)


def slots_for_promises(work: Work, share: float) -> int:
    """Return the least number of slots with which `share` of the requests begin within their budget, 0 for no load."""
    offered = work.offered_slots
    if offered <= 0.0:
        return 0
    blocked, slots = 1.0, 0
    while slots < _MOST_SLOTS:
        slots += 1
        blocked = offered * blocked / (slots + offered * blocked)
        if slots > offered and _beyond(slots, offered, blocked, work) <= 1.0 - share:
            return slots
    return slots


def slots_for_backlog(work: Work) -> float:
    """Return how many slots let the backlog begin in time, beside those who come meanwhile; 0 without one."""
    if work.backlog <= 0.0:
        return 0.0
    drain_s = max(work.budget_s, work.drain_s, _LEAST_BUDGET_S)
    asked = work.running + work.backlog + work.arrivals_per_s * drain_s
    return asked / (1.0 + drain_s / work.service_s)


def service_at_full_s(measured_s: float, batch: float, slots: int, slope: float) -> float:
    """Return seconds in a slot with all slots taken, from what was measured at a mean batch.

    A step of b sequences takes 1 + slope · (b − 1) of one alone (`router.values.replica.SpeedPrior`).
    """
    full, then = 1.0 + slope * (slots - 1), 1.0 + slope * (max(batch, 1.0) - 1.0)
    return measured_s * max(1.0, full / then)
