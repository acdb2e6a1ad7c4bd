"""Late binding, the most value a device-second first, by the whole distribution of the answer's length.

    value = quality · P(the whole promise is kept)
    cost  = prefill + E[min(length, tokens that fit)] · device-seconds a token at a full batch

Each request goes to the free rung of highest value, and of all who wait the one of highest value / cost goes first. The
cost counts twice where the answer would start a rung that is empty while another of its device runs. Nothing else keeps
a device from mixing: no rung is favoured, no tier imagined, no device-second has a price.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import msgspec

from router.policy.promise import backlog_s, choose, reason_for
from router.policy.protocol import WithoutWhatIf
from router.policy.worth import FLOOR, deadline_chance, without_backlog
from router.values.choice import Choice, Hopeless
from router.values.situation import Candidate, Situation

_SIGMA = 0.3  # spread of log(actual / predicted), of prefill and of pace
_STARTS_A_RUNG = 2.0  # how often the cost counts
_LOOK_AGAIN_S = 0.2
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class _Pairing:
    """A request on a replica, were it to begin now."""

    candidate: Candidate
    kept: float
    value: float
    cost_s: float

    @property
    def rank(self) -> float:
        return self.value / self.cost_s

    @property
    def promising(self) -> bool:
        return self.kept > FLOOR and self.value > 0.0


class ExpectedValue(WithoutWhatIf):
    """See the module."""

    def decide(self, situation: Situation) -> Choice | Hopeless:
        starting = starting_rungs(situation.candidates)
        judged = [_pairing(candidate, situation, starting) for candidate in situation.candidates]
        promised = [pairing for pairing in judged if pairing.promising]
        free = [pairing for pairing in promised if pairing.candidate.prediction.free]
        if not promised:  # only what stands before it may be in its way
            judged = [_pairing(without_backlog(c), situation, starting) for c in situation.candidates]
            promised = [pairing for pairing in judged if pairing.promising]
        if not promised:
            lost = situation.objective.deadline_s is not None
            return Hopeless("it is all but lost everywhere", backlog_s(situation), deadline_lost=lost)
        best = max(free or promised, key=_value_of)
        of_device = {p.candidate.info.device_key: p for p in sorted(promised, key=_value_of)}
        of_device[best.candidate.info.device_key] = best
        return choose(
            best.candidate,
            situation,
            reason_for(best.candidate, situation),
            rank=best.rank,
            waits_for={p.candidate.info.replica_id: p.rank for p in of_device.values()},
            good_for_s=_LOOK_AGAIN_S,
            kept=best.kept,
            not_now=not free,
        )


def _value_of(pairing: _Pairing) -> float:
    return pairing.value


def _pairing(candidate: Candidate, situation: Situation, starting: Collection[str]) -> _Pairing:
    prediction, objective, length = candidate.prediction, situation.objective, situation.length
    elapsed_s = situation.waited_s + prediction.network_s + prediction.backlog_s
    pace_s, tokens, kept = prediction.tpot_s, length.expected(), 1.0
    if objective.deadline_s is not None:
        judged_by = msgspec.structs.replace(prediction, pace_log_sigma=_SIGMA)
        kept = deadline_chance(judged_by, situation, elapsed_s, pace_s)
        tokens = length.expected(1.0 + (objective.deadline_s - elapsed_s - prediction.prefill_s) / pace_s)
    if objective.ttft_s is not None and situation.ttft_promised:
        kept *= _within(objective.ttft_s - elapsed_s, prediction.prefill_s)
    if objective.tpot_s is not None:
        kept *= _within(objective.tpot_s, pace_s)
    cost_s = prediction.prefill_s + tokens * prediction.token_device_s
    if candidate.info.replica_id in starting:
        cost_s *= _STARTS_A_RUNG
    return _Pairing(candidate, kept, candidate.info.quality * kept - candidate.price, max(cost_s, 1e-6))


def _within(limit_s: float, predicted_s: float) -> float:
    """P(a log-normal time with that median stays within the limit)."""
    return _NORMAL.cdf(math.log(limit_s / max(predicted_s, 1e-6)) / _SIGMA) if limit_s > 0.0 else 0.0


def starting_rungs(candidates: Sequence[Candidate]) -> set[str]:
    """Return the rungs that are empty while another of their device runs.

    No candidate says so, but their paces do: each is the device's step now and what the newcomer adds to it, which is a
    whole step on an empty rung and `decode_batch_slope` of it on one that runs.
    """
    devices: defaultdict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if not candidate.idle:
            devices[candidate.info.device_key].append(candidate)
    found: set[str] = set()
    for rungs in devices.values():
        some_run = [runs for runs in itertools.product((True, False), repeat=len(rungs)) if any(runs)]
        likely = min(some_run, key=lambda runs: _disagreement_s(rungs, runs))
        found.update(rung.info.replica_id for rung, runs in zip(rungs, likely, strict=True) if not runs)
    return found


def _disagreement_s(rungs: Sequence[Candidate], runs: Sequence[bool]) -> float:
    """Return by how much the rungs of a device differ on its step now, were it those that run."""
    steps_s = []
    for rung, running in zip(rungs, runs, strict=True):
        slope = rung.info.prior.decode_batch_slope
        alone_s = rung.prediction.token_device_s * rung.slots / (1.0 + slope * (rung.slots - 1))
        steps_s.append(rung.prediction.tpot_s - (slope if running else 1.0) * alone_s)
    return max(steps_s) - min(steps_s)


POLICY = ExpectedValue()
