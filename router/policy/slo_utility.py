"""The default: who waits with the most value a device-second goes first, to the rung that serves it best.

1. Each pairing of the request with a replica has a value and a cost (`router.policy.worth`): the probability that the
   whole promise is kept, by the quality of the rung, against the device-seconds that it takes.
2. Among the replicas that can start now it takes the one of highest value; of near equals the device goes before the
   cloud, the one that knows the session before others, the quicker before the slower; among replicas of one variant,
   the one where the answer and those beside it are delayed least.
   What those who run there would lose by its prompt is taken off: it goes where it holds up few, or waits.
3. While none can start, it waits, and its rank says who goes first when one can: value a device-second, of those who
   can wait for all others less (`router.policy.urgency`). What lacks room in a KV cache leaves the slot to those that
   need less.
4. It leaves the queue once its promise is all but lost everywhere, with a time to come back; on a device that has
   nothing to do it is served late instead, unless a deadline would end it. A refusal is for good: while only the
   prompts that stand before it are in its way, it waits for those, and leaves what is free to others.

No answer is capped by a prediction: it ends at its own deadline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from router.policy.promise import backlog_s, choose, look_again_s, reason_for, to_keep
from router.policy.urgency import PATIENT, urgency_of
from router.policy.worth import FLOOR, Worth, ask_of, without_backlog, worths_of
from router.values.choice import Choice, Hopeless
from router.values.offer import Ask
from router.values.request import Locality
from router.values.situation import Situation

_NEAR: Final = 0.02  # probability by which the device may be worse than the best and still goes first
_LIKELY: Final = 0.4  # below this probability nobody joins others on a device: it would slow down what is likely
_LATER_SHARE: Final = 0.5  # a free replica is taken if it is worth so much of what a busy one is after its wait
_TAKEN_SOON_S: Final = 1.0  # for one that found a free slot, and waits behind others for it
_STEEP: Final = 32  # how steeply a caller is put back beyond its share
_GROWS_AT_LEAST_S: Final = 0.5  # so long it keeps its urgency
_LOOK_AGAIN_S: Final = 0.05  # at the earliest, for one that may be lost


class SloUtility:
    """See the module."""

    locality = Locality.ANY

    def ask(self, situation: Situation) -> Ask:
        return ask_of(situation)

    def decide(self, situation: Situation) -> Choice | Hopeless:
        judged = worths_of(situation.candidates, situation)
        promised = [w for w in judged if w.kept > FLOOR and w.value > 0.0]
        if not promised:
            return self._late(judged, situation)
        free = self._worth_a_slot(promised, situation)
        unknown = [w for w in free if w.candidate.prediction.explore]
        if unknown and not _tight(situation):
            return choose(unknown[0].candidate, situation, "explore", rank=fair_rank(unknown[0], situation))
        calm = situation.calm
        best = self._best(free or promised, situation, calm=calm)
        urgency = PATIENT if free and situation.waiting <= 1 else urgency_of(promised, situation)
        good_for_s = _TAKEN_SOON_S
        if not free:
            good_for_s = min(urgency.lost_in_s, max(urgency.grows_in_s, _GROWS_AT_LEAST_S))
        not_now = not free and (best.candidate.prediction.free or best.candidate.kv_short)
        if not_now:
            good_for_s = min(good_for_s, look_again_s(situation))
        return choose(
            best.candidate,
            situation,
            reason_for(best.candidate, situation),
            rank=fair_rank(best, situation) * urgency.factor,
            waits_for=self._waits_for(promised, best, situation, put_back(situation) / urgency.factor, calm=calm),
            good_for_s=max(good_for_s, _LOOK_AGAIN_S),
            kept=best.kept,
            not_now=not_now,
        )

    @staticmethod
    def _worth_a_slot(promised: list[Worth], situation: Situation) -> list[Worth]:
        """Return who can start now and should: likely enough to be kept there, and not far better kept by waiting."""
        free = [w for w in promised if w.free]
        taken = [w for w in free if w.kept_in_all >= _LIKELY or w.candidate.idle]
        if not taken or len(free) == len(promised) or min([w.kept_in_all for w in taken]) >= _LATER_SHARE:
            return taken
        busy = [w.candidate for w in promised if not w.free]
        later = max([w.value for w in worths_of(busy, situation, wait_s=None)])
        return [w for w in taken if w.value - w.lost >= _LATER_SHARE * later]

    @staticmethod
    def _best(judged: Sequence[Worth], situation: Situation, *, calm: bool) -> Worth:
        """Return the pairing of highest value; of near equals the device's, the session's, the quicker one."""
        best = judged[0]
        for worth in judged:
            if worth.net > best.net:
                best = worth
        if len(judged) == 1 or not (calm or best.favoured):
            return best
        slack = situation.settings.device_first_quality_slack + 1e-9
        least_kept, least_quality, most_price = best.kept_in_all - _NEAR, best.quality - slack, best.price + slack
        first = best
        for worth in judged:
            if (
                worth.kept_in_all >= least_kept
                and (calm or worth.favoured)
                and worth.quality >= least_quality
                and worth.price <= most_price
                and worth is not best
                and _order_of_equals(worth) < _order_of_equals(first)
            ):
                first = worth
        return _least_delay(first, judged, least_kept)

    def _waits_for(
        self, promised: Sequence[Worth], best: Worth, situation: Situation, back: float, *, calm: bool
    ) -> Mapping[str, float]:
        """Return the best rung of each device, and the chosen one, with the rank there, put `back` by that factor."""
        by_device: defaultdict[str, list[Worth]] = defaultdict(list)
        for worth in promised:
            by_device[worth.candidate.info.device_key].append(worth)
        waits_for = {}
        for of_one in by_device.values():
            worth = of_one[0] if len(of_one) == 1 else self._best(of_one, situation, calm=calm)
            waits_for[worth.candidate.info.replica_id] = worth.rank / back
        waits_for[best.candidate.info.replica_id] = best.rank / back
        return waits_for

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
        alone = worths_of([without_backlog(w.candidate) for w in judged], situation)
        later = [w for w, then in zip(judged, alone, strict=True) if then.kept > FLOOR]
        if later:
            return _not_now(later, situation)
        return Hopeless(
            why=f"it would be kept with a probability of {kept:.2f} if it began now, "
            f"after {situation.waited_s * 1e3:.0f} ms of waiting; to be kept: {to_keep(situation)}; "
            f"the soonest first token is expected in {soonest.prediction.ttft_s * 1e3:.0f} ms",
            retry_after_s=backlog_s(situation),
            deadline_lost=objective.deadline_s is not None,
        )


def _order_of_equals(worth: Worth) -> tuple[bool, bool, float]:
    """Sorts near equals: the device's, the session's, the quicker one."""
    return worth.remote, not worth.session, -worth.rank


def _least_delay(first: Worth, judged: Sequence[Worth], least_kept: float) -> Worth:
    """Return the one of equal replicas that delays least: this answer, and by its prompt those that run there.

    A cached beginning of the prompt counts twice so: it need not be waited for, nor taken from the others' time.
    """
    equals = [
        worth
        for worth in judged
        if worth.kept_in_all >= least_kept
        and worth.variant == first.variant
        and worth.remote == first.remote
        and worth.session == first.session
    ]
    return min(equals, key=_delay_s) if len(equals) > 1 else first


def _delay_s(worth: Worth) -> float:
    candidate, prediction = worth.candidate, worth.candidate.prediction
    return prediction.finish_s + candidate.load * candidate.slots * prediction.prefill_s


def _not_now(later: Sequence[Worth], situation: Situation) -> Choice:
    """Wait for what stands before it to be computed: a refusal is for good, so no passing backlog is its reason."""
    best = max(later, key=lambda w: (w.kept, -w.candidate.prediction.backlog_s, w.value))
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
    return worth.rank / put_back(situation)


def put_back(situation: Situation) -> float:
    """How far the request's caller is put back: 1 where callers do not share, or it took no more than its share.

    Steeply: value a second differs by tens between short requests and long ones, and who floods a tier may well send
    the short ones. A tenth more than the share counts 20 times, a quarter more 1,000 times.
    """
    most = situation.settings.fairness.callers
    return min(situation.caller_excess**_STEEP, most) if most > 1.0 else 1.0


def _tight(situation: Situation) -> bool:
    """Whether the caller asked for any time: such a request is not spent on finding out."""
    objective = situation.objective
    return situation.ttft_promised or objective.tpot_s is not None or objective.deadline_s is not None


POLICY = SloUtility()
