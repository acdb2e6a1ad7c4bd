"""The default: who waits with the most value a device-second goes first, to the rung that serves it best.

1. Each pairing of the request with a replica has a value and a cost (`router.policy.worth`): the probability that the
   whole promise is kept, by the quality of the rung, against the device-seconds that it takes.
2. Among the replicas that can start now it takes the one of highest value; of near equals the device goes before the
   cloud, the one that knows the session before others, the quicker before the slower.
3. While none can start, it waits, and its rank, value a device-second, says who goes first when one can.
4. It leaves the queue once its promise is all but lost everywhere, with a time to come back; on a device that has
   nothing to do it is served late instead, unless a deadline would end it. A refusal is for good: while only the
   prompts that stand before it are in its way, it waits for those, and leaves what is free to others.

No answer is capped by a prediction: it ends at its own deadline.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.promise import backlog_s, choose, reason_for, to_keep
from router.policy.worth import FLOOR, Worth, ask_of, latest_start_s, without_backlog, worth_of
from router.values.choice import Choice, Hopeless
from router.values.offer import Ask
from router.values.request import Locality
from router.values.situation import Situation

_NEAR = 0.02  # probability by which the device may be worse than the best and still goes first
_LIKELY = 0.4  # below this probability nobody joins others on a device: it would slow down what is likely
_LATER_SHARE = 0.5  # a free replica is taken if it is worth so much of what a busy one is after its wait
_TAKEN_SOON_S = 1.0  # for one that found a free slot, and waits behind others for it
_LOOK_AGAIN_S = 0.05  # at the earliest, for one that may be lost


class SloUtility:
    """See the module."""

    locality = Locality.ANY

    def ask(self, situation: Situation) -> Ask:
        return ask_of(situation)

    def decide(self, situation: Situation) -> Choice | Hopeless:
        judged = [worth_of(candidate, situation) for candidate in situation.candidates]
        promised = [w for w in judged if w.kept > FLOOR and w.value > 0.0]
        if not promised:
            return self._late(judged, situation)
        free = self._worth_a_slot(promised, situation)
        unknown = [w for w in free if w.candidate.prediction.explore]
        if unknown and not _tight(situation):
            return choose(unknown[0].candidate, situation, "explore", rank=fair_rank(unknown[0], situation))
        best = self._best(free or promised, situation)
        listed = [*self._of_each_device(promised, situation), best]
        waits_for = {w.candidate.info.replica_id: fair_rank(w, situation) for w in listed}
        good_for_s = _TAKEN_SOON_S
        if not free:
            shortest = situation.length.quantile(FLOOR)
            good_for_s = max(latest_start_s(w.candidate, situation, shortest) for w in promised)
        return choose(
            best.candidate,
            situation,
            reason_for(best.candidate, situation),
            rank=fair_rank(best, situation),
            waits_for=waits_for,
            good_for_s=max(good_for_s, _LOOK_AGAIN_S),
            kept=best.kept,
            not_now=not free and best.candidate.prediction.free,
        )

    @staticmethod
    def _worth_a_slot(promised: list[Worth], situation: Situation) -> list[Worth]:
        """Return who can start now and should: likely enough to be kept there, and not far better kept by waiting."""
        free = [w for w in promised if w.candidate.prediction.free]
        taken = [w for w in free if w.kept >= _LIKELY or w.candidate.idle]
        if not taken or len(free) == len(promised) or min(w.kept for w in taken) >= _LATER_SHARE:
            return taken
        later = max(
            worth_of(w.candidate, situation, wait_s=w.candidate.prediction.wait_s).value
            for w in promised
            if not w.candidate.prediction.free
        )
        return [w for w in taken if w.value >= _LATER_SHARE * later]

    @staticmethod
    def _best(judged: list[Worth], situation: Situation) -> Worth:
        if len(judged) == 1:
            return judged[0]
        best = max(judged, key=lambda w: w.net)
        calm = situation.calm
        if not (best.candidate.favoured or calm):
            return best
        slack = situation.settings.device_first_quality_slack + 1e-9
        least_quality, most_price = best.candidate.info.quality - slack, best.candidate.price + slack
        near = [
            w
            for w in judged
            if (w.candidate.favoured or calm)
            and w.kept >= best.kept - _NEAR
            and w.candidate.info.quality >= least_quality
            and w.candidate.price <= most_price
        ]
        return min(near, key=lambda w: (w.candidate.info.remote, not w.candidate.session, -w.rank))

    def _of_each_device(self, judged: list[Worth], situation: Situation) -> list[Worth]:
        by_device: dict[str, list[Worth]] = {}
        for worth in judged:
            by_device.setdefault(worth.candidate.info.device_key, []).append(worth)
        return [self._best(of_one, situation) for of_one in by_device.values()]

    @staticmethod
    def _late(judged: list[Worth], situation: Situation) -> Choice | Hopeless:
        objective = situation.objective
        if objective.deadline_s is None and not situation.overloaded:
            idle = [w for w in judged if w.candidate.idle]
            if idle:
                best = max(idle, key=lambda w: (w.candidate.info.quality, -w.candidate.prediction.ttft_s))
                return choose(best.candidate, situation, "late")
        soonest = min((w.candidate for w in judged), key=lambda c: c.prediction.ttft_s)
        kept = max(w.kept for w in judged)
        later = [w for w in judged if worth_of(without_backlog(w.candidate), situation).kept > FLOOR]
        if later:
            return _not_now(later, situation)
        return Hopeless(
            why=f"it would be kept with a probability of {kept:.2f} if it began now, "
            f"after {situation.waited_s * 1e3:.0f} ms of waiting; to be kept: {to_keep(situation)}; "
            f"the soonest first token is expected in {soonest.prediction.ttft_s * 1e3:.0f} ms",
            retry_after_s=backlog_s(situation),
            deadline_lost=objective.deadline_s is not None,
        )


def _not_now(later: Sequence[Worth], situation: Situation) -> Choice:
    """Wait for what stands before it to be computed: a refusal is for good, so no passing backlog is its reason."""
    best = max(later, key=lambda w: (w.kept, -w.candidate.prediction.backlog_s))
    gone_s = min(w.candidate.prediction.backlog_s for w in later)
    return choose(
        best.candidate,
        situation,
        reason_for(best.candidate, situation),
        rank=fair_rank(best, situation),
        waits_for={w.candidate.info.replica_id: fair_rank(w, situation) for w in later},
        good_for_s=max(gone_s, _LOOK_AGAIN_S),
        kept=best.kept,
        not_now=True,
    )


def fair_rank(worth: Worth, situation: Situation) -> float:
    """Value a device-second, within the bound of how far busy callers may be put back."""
    most = situation.settings.fairness.callers
    return worth.rank / min(situation.caller_excess, most) if most > 1.0 else worth.rank


def _tight(situation: Situation) -> bool:
    """Whether the caller asked for any time: such a request is not spent on finding out."""
    objective = situation.objective
    return situation.ttft_promised or objective.tpot_s is not None or objective.deadline_s is not None


POLICY = SloUtility()
