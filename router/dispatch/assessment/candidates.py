"""From replicas to a `Situation`: what may serve a request, what may not and why, and what each would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from router.dispatch.assessment.pending import PendingRequest
from router.dispatch.assessment.rejections import NEVER, eligible, other_side, too_long, unreached
from router.dispatch.records.record import Rejection
from router.dispatch.replicas.pool import MANY, Pool
from router.dispatch.replicas.served import Sides, other_model
from router.dispatch.replicas.view import ReplicaView
from router.signals.affinity import Affinity
from router.signals.at_stake import AtStake
from router.signals.signals import Signals
from router.values.prediction import Demand, Prediction
from router.values.replica import ReplicaInfo
from router.values.request import InferenceRequest
from router.values.settings import FREE, Prices
from router.values.situation import Candidate, Situation
from router.values.task import Task

_BRIEF = frozenset({Task.EMBED, Task.RERANK, Task.SCORE, Task.TOKENIZE})
"""Calls of milliseconds; how long a sound takes is learnt alone."""
_CALL_S = 0.005
_CALL_SLOWER = 8.0
"""A call is believed to take so many times what the replica's prior says, at most. Calls take milliseconds, and the
deadlines that come with them are short: after a burst of callers, who all waited for each other, the learnt level alone
would refuse everyone on an idle replica, and nobody would find out that the burst is over. What really is too late, its
batches drop."""


def assess(pending: PendingRequest, pool: Pool) -> tuple[Situation | None, tuple[Rejection, ...]]:
    """Filter and predict. The situation is None when every replica was rejected."""
    request = pending.request
    served = pool.served(request.model)
    rejections = unreached(pending, pool) if pool.unreached else []
    if served is None:
        rejections += [other_model(view.info, request.model) for view in pool.views.values()]
        return None, tuple(rejections)
    rejections += served.others
    own, other = served.drawn(request)
    names = pool.to_look_at(own, request, pending.failed)
    views = eligible(pending, pool, served, names, rejections)
    candidates, expected = _candidates(pending, pool, views, rejections)
    if other.names and (candidates or not served.may_cross(request)):
        text = other_side(request, pool)
        rejections += [Rejection(pool.views[name].info, "canary", text) for name in other.names[:MANY]]
    elif other.names:  # rather there than nowhere
        names = pool.to_look_at(other, request, pending.failed)
        views = eligible(pending, pool, served, names, rejections)
        candidates, expected = _candidates(pending, pool, views, rejections)
    if not candidates:
        return None, tuple(rejections)
    whole = len(candidates) == len(names) and not other.names
    sides = served.sides if whole else _sides(request.model, candidates, rejections, pool)
    return _situation(pending, pool, candidates, sides, expected), tuple(rejections)


def _candidates(
    pending: PendingRequest, pool: Pool, views: Sequence[ReplicaView], rejections: list[Rejection]
) -> tuple[list[Candidate], int]:
    """Return what each of `views` would cost, and the longest length expected on any of them."""
    request, settings, signals = pending.request, pool.settings, pool.signals
    latency, affinity, ahead_of = signals.latency, signals.affinity, pool.ahead
    objective, now_s = request.objective, pool.now_s
    generates = pending.task is Task.GENERATE
    brief = not generates and pending.task in _BRIEF
    session = pool.session_replica.get(objective.session) if objective.session is not None else None
    free, telling, priority = settings.prices is FREE, affinity.telling, objective.priority
    interrupts = generates and not request.continuation_tokens  # the rest of an answer is awaited
    whole_tokens, lined_up = pending.whole_tokens, pool.lined_up
    candidates: list[Candidate] = []
    by_window: dict[float, tuple[Demand, int | None, int]] = {}
    running: dict[str, AtStake] = {}
    for view in views:
        info = view.info
        window = min(whole_tokens, info.context_tokens)
        asked = by_window.get(window)
        if asked is None:
            asked = by_window[window] = _asked_within(pending, info.context_tokens)
        demand, window_cap, longest_answer = asked
        if telling and view.name in telling:
            cached = affinity.expected_cached(request, view.name)
            demand = msgspec.structs.replace(demand, cached_tokens=cached)
        state = view.state
        if state is None or not state.holds(now_s):
            state = view.state = latency.state(view.snapshot, view.link, view.mine, view.siblings, now_s)
        ahead = ahead_of(view.name, priority) if lined_up else 0
        slots, occupied = view.slots or 1, view.occupied
        room_tokens = view.kv_room
        kv_short = room_tokens is not None and _is_short(room_tokens, view.name, pending, pool)
        prediction = latency.predict_on(state, demand, 0 if view.room else ahead, now_s, full=kv_short)
        if brief:
            prediction = _of_call(prediction, view, demand)
        at_stake = 0.0
        if occupied and prediction.free and interrupts:
            beside = _beside(view, running, signals, now_s)
            at_stake = beside.lost(prediction.prefill_s, priority) / view.snapshot.engines
        candidates.append(
            Candidate(
                info,
                prediction,
                window_cap,
                session == view.name,
                0.0 if free and not view.metered else _price(request, view, settings.prices, demand.answer_tokens),
                occupied == 0,
                slots,
                (occupied + ahead) / slots,
                view.peak_latency_s,
                view.favoured,
                kv_short,
                longest_answer,
                at_stake,
            )
        )
    if len(by_window) > 1:
        candidates = _least_cut(pending, candidates, rejections)
    return candidates, max([demand.answer_tokens for demand, _, _ in by_window.values()], default=0)


def _beside(view: ReplicaView, running: dict[str, AtStake], signals: Signals, now_s: float) -> AtStake:
    """Return the answers that run on the device of `view`, found once for all views of it."""
    device = view.info.device_key
    found = running.get(device)
    if found is None:
        names = [view.name, *[sibling.info.replica_id for sibling in view.siblings]]
        found = running[device] = AtStake(signals.in_flight.on(names), now_s)
    return found


def _least_cut(pending: PendingRequest, candidates: list[Candidate], rejections: list[Rejection]) -> list[Candidate]:
    """An answer may be cut by a window only where no candidate's window holds the whole of it."""
    short = [c.info for c in candidates if c.window_cap is not None]
    if not short or len(short) == len(candidates):
        return candidates
    rejections += [Rejection(info, "context", too_long(pending, info)) for info in short]
    return [c for c in candidates if c.window_cap is None]


def _of_call(prediction: Prediction, view: ReplicaView, demand: Demand) -> Prediction:
    """Bound what was learnt by what the prior says."""
    queued = max(view.snapshot.queued_prefill_tokens, view.mine.prefill_tokens)
    prior_s = _CALL_S + (queued + demand.prompt_tokens) / view.info.prior.prefill_tokens_per_s
    most_s = prediction.network_s + _CALL_SLOWER * prior_s
    if prediction.ttft_s <= most_s:
        return prediction
    share = most_s / prediction.ttft_s
    return msgspec.structs.replace(
        prediction,
        ttft_s=most_s,
        ttft_high_s=share * prediction.ttft_high_s,
        finish_s=share * prediction.finish_s,
        finish_high_s=share * prediction.finish_high_s,
        prefill_s=share * prediction.prefill_s,
    )


def _asked_within(pending: PendingRequest, context_tokens: int) -> tuple[Demand, int | None, int]:
    """Return what a request asks of replicas with that window, and how long an answer that window leaves.

    That length is told twice: first for those who asked for more, None for all others.
    """
    request, left_tokens = pending.request, pending.left_tokens
    room = context_tokens - pending.least_prompt_tokens
    expected, longest = pending.expected_tokens(context_tokens), pending.longest_tokens(context_tokens)
    cut = left_tokens is not None and left_tokens > room
    demand = Demand(request.prompt_tokens, expected, request.prompt_bytes, 0, longest)
    longest_answer = room + request.continuation_tokens
    return demand, longest_answer if cut else None, longest_answer


def _is_short(room_tokens: int, name: str, pending: PendingRequest, pool: Pool) -> bool:
    """Whether a KV cache has too little room, less what is kept for somebody else who has waited for it."""
    request, kept = pending.request, pool.kv.kept_for(name)
    if kept is not None and kept.entry.pending is not pending and not request.continuation_tokens:
        room_tokens -= kept.from_others(request.objective.priority)
    return pending.kv_tokens(pool.settings) > room_tokens


def _sides(model: str, candidates: list[Candidate], rejections: list[Rejection], pool: Pool) -> Sides:
    eligible = [c.info for c in candidates]
    eligible += [r.info for r in rejections if r.code not in NEVER and r.info.replica_id in pool.views]
    rejected = {r.info.replica_id: r for r in rejections}
    local = [info for info in eligible if not info.remote]
    remote = [info for info in eligible if info.remote]
    return Sides(
        best_quality=max(info.quality for info in eligible),
        pinned=all(model != info.family for info in eligible),
        only_remote_fits=bool(local) and all(_is(rejected, info, "context") for info in local),
        remote_served=bool(remote),
        local_down=bool(local) and all(_is_down(rejected, info) for info in local),
        remote_down=bool(remote) and all(_is_down(rejected, info) for info in remote),
    )


def _situation(
    pending: PendingRequest, pool: Pool, candidates: list[Candidate], sides: Sides, answer_tokens: int
) -> Situation:
    request, settings, signals, length = pending.request, pool.settings, pool.signals, pending.length.curve
    begun = request.continuation_tokens > 0
    objective = request.objective
    promised = objective.ttft_s is not None
    if not promised and not begun:
        objective = pending.objective_with(settings.ttft_slo_ms / 1e3)
    shortened = not begun and objective.shorten
    return Situation(
        objective=objective,
        ttft_promised=promised,
        waited_s=pool.now_s - request.accepted_at_s,
        wait_left_s=max(0.0, pending.wait_until_s - pool.now_s),
        candidates=tuple(candidates),
        best_quality=sides.best_quality,
        answer_tokens=answer_tokens,
        open_ended=request.sampling.max_tokens is None,
        emitted_tokens=request.continuation_tokens,
        answer_cap=signals.ladder.answer_cap(request.sampling.max_tokens, settings) if shortened else None,
        overloaded=signals.ladder.overloaded,
        pinned=sides.pinned,
        only_remote_fits=sides.only_remote_fits,
        remote_served=sides.remote_served,
        local_down=sides.local_down,
        remote_down=sides.remote_down,
        settings=settings,
        length=length,
        now_s=pool.now_s,
        waiting=pool.waiting,
        longest_answer=min(max([candidate.longest_answer for candidate in candidates]), length.cap),
        arrivals_per_s=signals.what_if.arrivals_per_s(candidates[0].info.family, pool.now_s),
        caller_excess=signals.shares.excess(request.caller, pool.now_s) if settings.fairness.callers else 1.0,
    )


def _price(request: InferenceRequest, view: ReplicaView, prices: Prices, expected: int) -> float:
    """What the operator's prices make of serving it there, in answers of full quality."""
    if view.link is None:
        return prices.local_answer
    tokens = request.prompt_tokens + expected
    metered = view.link.price(request.prompt_bytes, expected)
    return prices.cloud_kilotoken * tokens / 1e3 + prices.uplink_mbyte * request.prompt_bytes / 1e6 + metered


def demand_on(pending: PendingRequest, info: ReplicaInfo, affinity: Affinity, expected: int) -> Demand:
    """Return what a request asks of a replica that is expected to generate `expected` tokens for it."""
    request = pending.request
    cached = affinity.expected_cached(request, info.replica_id)
    longest = pending.longest_tokens(info.context_tokens)
    return Demand(request.prompt_tokens, expected, request.prompt_bytes, cached, longest)


def _is(rejected: Mapping[str, Rejection], info: ReplicaInfo, code: str) -> bool:
    return info.replica_id in rejected and rejected[info.replica_id].code == code


def _is_down(rejected: Mapping[str, Rejection], info: ReplicaInfo) -> bool:
    return info.replica_id in rejected and rejected[info.replica_id].temporary
