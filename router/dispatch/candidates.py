"""From replicas to a `Situation`: what may serve a request, what may not and why, and what each would cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from router.base.errors import (
    ContextTooLong,
    InvalidRequest,
    ModelNotFound,
    OverspillError,
    ReplicasFailed,
    Unavailable,
)
from router.dispatch.pool import MANY, Pool, ReplicaView
from router.dispatch.record import Rejection
from router.dispatch.served import Served, Sides, other_model
from router.signals.affinity import Affinity
from router.signals.length import LengthWatch
from router.values.prediction import Demand
from router.values.replica import ReplicaInfo, SpeedPrior
from router.values.request import ChatPrompt, InferenceRequest, Locality, Objective
from router.values.settings import FREE, Prices, RouterSettings
from router.values.situation import Candidate, Situation

_RETRY_AFTER_S = 1.0
_NEVER = {"other-model", "locality", "lacks", "canary"}
"""Rejections of replicas that the request may never be served by."""


@dataclass(slots=True)
class PendingRequest:
    """A request as the filters see it.

    Attributes:
        request: what is left of it: `prompt_tokens` holds the text emitted so far, and so does `continuation_tokens`.
        failed: replica ids that failed for it.
        wait_until_s: when it is given up, on the tier's clock.
        length: what is believed of the length of its whole answer.
    """

    request: InferenceRequest
    failed: frozenset[str]
    wait_until_s: float
    length: LengthWatch
    _defaulted: Objective | None = None

    @property
    def left_tokens(self) -> int | None:
        """Longest rest of the answer under the caller's cap, None without one."""
        cap = self.request.sampling.max_tokens
        return None if cap is None else max(1, cap - self.request.continuation_tokens)

    def objective_with(self, ttft_s: float) -> Objective:
        """Return the objective with a default TTFT; the last one, if that is it: many decisions ask for the same."""
        found = self._defaulted
        if found is None or found.ttft_s != ttft_s:
            found = self._defaulted = replace(self.request.objective, ttft_s=ttft_s)
        return found


def assess(pending: PendingRequest, pool: Pool) -> tuple[Situation | None, tuple[Rejection, ...]]:
    """Filter and predict. The situation is None when every replica was rejected."""
    request = pending.request
    served = pool.served(request.model)
    rejections = _unreached(pending, pool) if pool.unreached is not None else []
    if served is None:
        rejections += [other_model(view.info, request.model) for view in pool.views.values()]
        return None, tuple(rejections)
    rejections += served.others
    own, other = served.drawn(request)
    names = pool.to_look_at(own, request, pending.failed)
    candidates, expected = _candidates(pending, pool, served, names, rejections)
    if other.names and (candidates or not served.may_cross(request)):
        text = _other_side(request, pool)
        rejections += [Rejection(pool.views[name].info, "canary", text) for name in other.names[:MANY]]
    elif other.names:  # rather there than nowhere
        names = pool.to_look_at(other, request, pending.failed)
        candidates, expected = _candidates(pending, pool, served, names, rejections)
    short = [c.info for c in candidates if c.window_cap is not None]
    if short and len(short) < len(candidates):
        rejections += [Rejection(info, "context", _too_long(pending, info)) for info in short]
        candidates = [c for c in candidates if c.window_cap is None]  # cut only where no window holds it whole
    if not candidates:
        return None, tuple(rejections)
    whole = len(candidates) == len(names) and not other.names
    sides = served.sides if whole else _sides(request.model, candidates, rejections, pool)
    return _situation(pending, pool, candidates, sides, expected), tuple(rejections)


def _candidates(
    pending: PendingRequest, pool: Pool, served: Served, names: Sequence[str], rejections: list[Rejection]
) -> tuple[list[Candidate], int]:
    """Return the candidates among `names`, and the longest length expected on any of them; adds to `rejections`."""
    request, settings, signals = pending.request, pool.settings, pool.signals
    latency, affinity, ahead_of = signals.latency, signals.affinity, pool.ahead
    objective, views, now_s, failed = request.objective, pool.views, pool.now_s, pending.failed
    needed, least_quality = _needed_tokens(pending, settings), objective.min_quality
    bounded = pool.locality is not Locality.ANY or objective.locality is not Locality.ANY
    choosy = bounded or bool(failed) or needed > served.least_context_tokens or least_quality > served.least_quality
    session = pool.session_replica.get(objective.session) if objective.session is not None else None
    free, telling, priority = settings.prices is FREE, affinity.telling, objective.priority
    whole_tokens = _whole_tokens(pending)
    candidates: list[Candidate] = []
    by_window: dict[float, tuple[Demand, int | None]] = {}
    for name in names:
        view = views[name]
        info = view.info
        if (
            view.blocked
            or info.lacks
            or (choosy and (bounded or name in failed or needed > info.context_tokens or info.quality < least_quality))
        ):
            rejection = _reject(pending, view, pool)
            if rejection is not None:
                rejections.append(rejection)
                continue
        window = min(whole_tokens, info.context_tokens)
        asked = by_window.get(window)
        if asked is None:
            asked = by_window[window] = _asked_within(pending, info.context_tokens)
        demand, window_cap = asked
        if telling and name in telling:
            cached = affinity.expected_cached(request, name)
            demand = msgspec.structs.replace(demand, cached_tokens=cached)
        state = view.state
        if state is None or not state.holds(now_s):
            state = view.state = latency.state(view.snapshot, view.link, view.mine, view.siblings, now_s)
        ahead, slots, occupied = ahead_of(name, priority), view.slots or 1, view.occupied
        room_tokens = view.kv_room
        kv_short = room_tokens is not None and _is_short(room_tokens, name, needed, pending, pool)
        candidates.append(
            Candidate(
                info,
                latency.predict_on(state, demand, 0 if view.room else ahead, now_s, full=kv_short),
                window_cap,
                session == name,
                0.0 if free and not view.metered else _price(request, view, settings.prices, demand.answer_tokens),
                occupied == 0,
                slots,
                (occupied + ahead) / slots,
                view.peak_latency_s,
                view.favoured,
                kv_short,
            )
        )
    return candidates, max([demand.answer_tokens for demand, _ in by_window.values()], default=0)


def _whole_tokens(pending: PendingRequest) -> float:
    """Length of the prompt and the longest answer that the caller's cap allows, infinity without one."""
    left_tokens = pending.left_tokens
    return math.inf if left_tokens is None else pending.request.least_prompt_tokens + left_tokens


def _asked_within(pending: PendingRequest, context_tokens: int) -> tuple[Demand, int | None]:
    """Return what a request asks of replicas with that window, and the longest answer where that is less than asked."""
    request, left_tokens, emitted = pending.request, pending.left_tokens, pending.request.continuation_tokens
    room = context_tokens - request.least_prompt_tokens
    most, longest = _most_tokens(pending, context_tokens), 0
    expected = _expected_of(pending, most)
    if not emitted:
        longest = min(pending.length.longest, most)
    cut = left_tokens is not None and left_tokens > room
    return Demand(request.prompt_tokens, expected, request.prompt_bytes, 0, longest), room + emitted if cut else None


def kv_tokens(pending: PendingRequest, settings: RouterSettings) -> int:
    """Return the room in a KV cache with which the request may begin."""
    return _needed_tokens(pending, settings) + pending.request.prompt_slack


def _is_short(room_tokens: int, name: str, needed: int, pending: PendingRequest, pool: Pool) -> bool:
    """Whether a KV cache has too little room, less what is kept for somebody else who has waited for it.

    Args:
        needed: the shortest window that the request may be served with.
    """
    request, kept = pending.request, pool.kv.kept_for(name)
    if kept is not None and kept.entry.pending is not pending and not request.continuation_tokens:
        room_tokens -= kept.from_others(request.objective.priority)
    return needed + request.prompt_slack > room_tokens


def _sides(model: str, candidates: list[Candidate], rejections: list[Rejection], pool: Pool) -> Sides:
    eligible = [c.info for c in candidates]
    eligible += [r.info for r in rejections if r.code not in _NEVER and r.info.replica_id in pool.views]
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
    request, settings, signals = pending.request, pool.settings, pool.signals
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
        length=pending.length.curve,
        now_s=pool.now_s,
        waiting=pool.waiting,
        caller_excess=signals.shares.excess(request.caller, pool.now_s) if settings.fairness.callers else 1.0,
    )


def _price(request: InferenceRequest, view: ReplicaView, prices: Prices, expected: int) -> float:
    """What the operator's prices make of serving it there, in answers of full quality."""
    if view.link is None:
        return prices.local_answer
    tokens = request.prompt_tokens + expected
    metered = view.link.price(request.prompt_bytes, expected)
    return prices.cloud_kilotoken * tokens / 1e3 + prices.uplink_mbyte * request.prompt_bytes / 1e6 + metered


def explain_none(pending: PendingRequest, rejections: Sequence[Rejection]) -> OverspillError:
    """Return the error for a request that every replica was rejected for; a temporary reason comes first."""
    request = pending.request
    of_model = [r for r in rejections if r.code != "other-model"]
    if not of_model:
        known = {r.info.family for r in rejections} | {r.info.variant for r in rejections}
        return ModelNotFound.of(request.model, known)
    temporary = [r for r in of_model if r.temporary]
    if temporary:
        reasons = "; ".join(f"{r.info.replica_id}: {r.text}" for r in temporary)
        again_s = min((r.again_s for r in temporary if r.again_s > 0), default=_RETRY_AFTER_S)
        # A replica that failed for this request may serve others: the refusal speaks for this request only.
        kind = ReplicasFailed if any(r.code == "already-failed" for r in temporary) else Unavailable
        return kind(f"no replica can take the request now ({reasons})", retry_after_s=again_s)
    too_long = [r.info for r in of_model if r.code == "context"]
    if too_long:
        largest = max(too_long, key=lambda info: info.context_tokens)
        return ContextTooLong(
            f"the prompt has {_length(request)} tokens; the largest window that may serve it is "
            f"{largest.context_tokens} tokens ({largest.replica_id}), prompt and answer together. Shorten the prompt",
            param="messages" if isinstance(request.prompt, ChatPrompt) else "prompt",
        )
    if any(r.code == "quality" for r in of_model):
        best = max(r.info.quality for r in of_model if r.code == "quality")
        return InvalidRequest(
            f"x-overspill-min-quality {request.objective.min_quality:g} is above the best rung that may serve "
            f"{request.model!r}, which has {best:g}",
            param="x-overspill-min-quality",
        )
    reasons = "; ".join(f"{r.info.replica_id}: {r.text}" for r in of_model)
    if {"lacks"} <= {r.code for r in of_model} <= {"lacks", "locality"}:
        return InvalidRequest(f"no replica of {request.model!r} can serve this request ({reasons})")
    return Unavailable(
        f"locality leaves no replica that may serve {request.model!r} at present ({reasons})",
        retry_after_s=_RETRY_AFTER_S,
    )


def expected_tokens(pending: PendingRequest, info: ReplicaInfo) -> int:
    """Expected length of the rest of the answer on a replica: never more than its window leaves."""
    return _expected_of(pending, _most_tokens(pending, info.context_tokens))


def demand_on(pending: PendingRequest, info: ReplicaInfo, affinity: Affinity, expected: int) -> Demand:
    """Return what a request asks of a replica that is expected to generate `expected` tokens for it."""
    request = pending.request
    cached = affinity.expected_cached(request, info.replica_id)
    most = _most_tokens(pending, info.context_tokens)
    longest = 0 if request.continuation_tokens else min(pending.length.longest, most)
    return Demand(request.prompt_tokens, expected, request.prompt_bytes, cached, longest)


def _expected_of(pending: PendingRequest, most: int) -> int:
    """Expected length of the rest of the answer, where it can become so long at most."""
    if pending.request.sampling.ignore_eos:
        return most
    return max(1, round(pending.length.curve.expected_left(pending.request.continuation_tokens, most)))


def _most_tokens(pending: PendingRequest, context_tokens: int) -> int:
    """Longest rest of the answer that the caller's cap and a window of that length allow."""
    room = context_tokens - pending.request.least_prompt_tokens
    return max(1, room if pending.left_tokens is None else min(pending.left_tokens, room))


def _unreached(pending: PendingRequest, pool: Pool) -> list[Rejection]:
    """Return a temporary rejection for an upstream that was never reached, where locality allows it."""
    upstream = pool.unreached
    if upstream is None or Locality.LOCAL_ONLY in {pool.locality, pending.request.objective.locality}:
        return []
    info = ReplicaInfo(
        replica_id=f"upstream {upstream.endpoint}",
        endpoint=upstream.endpoint,
        tier="cloud",
        remote=True,
        family=pending.request.model,
        variant="unknown",
        rung=0,
        quality=0.0,
        context_tokens=0,
        prior=SpeedPrior(0.0, 0.0),
    )
    return [Rejection(info, "unhealthy", upstream.text, temporary=True)]


def _reject(pending: PendingRequest, view: ReplicaView, pool: Pool) -> Rejection | None:
    """Say why a replica is no candidate: the request's own bounds first, then the replica's state."""
    info, request = view.info, pending.request
    if pool.locality is not Locality.ANY or request.objective.locality is not Locality.ANY:
        out_of_bounds = _out_of_bounds(request, info, pool)
        if out_of_bounds:
            return Rejection(info, "locality", out_of_bounds)
    if _needed_tokens(pending, pool.settings) > info.context_tokens:
        return Rejection(info, "context", _too_long(pending, info))
    if info.quality < request.objective.min_quality:
        return Rejection(info, "quality", f"quality {info.quality:g}, asked for {request.objective.min_quality:g}")
    lacking = info.lacks & request.needs() if info.lacks else ()
    if lacking:
        named = ", ".join(sorted(feature.value for feature in lacking))
        return Rejection(info, "lacks", f"its server does not do what the request needs: {named}")
    return _reject_now(pending, view)


def _needed_tokens(pending: PendingRequest, settings: RouterSettings) -> int:
    """Shortest window that the request may be served with."""
    left_tokens = pending.left_tokens
    least = 1 if left_tokens is None else min(left_tokens, settings.min_answer_tokens)
    return pending.request.least_prompt_tokens + least


def _reject_now(pending: PendingRequest, view: ReplicaView) -> Rejection | None:
    info, health, snapshot = view.info, view.health, view.snapshot
    if info.replica_id in pending.failed:
        return Rejection(info, "already-failed", "failed for this request", temporary=True)
    if not snapshot.available:
        why = snapshot.why or "not available"
        return Rejection(info, "unhealthy", why, temporary=True, again_s=snapshot.back_in_s)
    if health.code and health.against(pending.request.objective.priority):
        return Rejection(info, health.code, health.text, temporary=True, waits=health.waits, again_s=health.again_s)
    return None


def _out_of_bounds(request: InferenceRequest, info: ReplicaInfo, pool: Pool) -> str:
    """Say why a replica lies outside of what the policy or the caller allows; empty if it does not."""
    if not _within(pool.locality, info):
        return f"{_side(info)}, the policy `{pool.settings.policy}` keeps to {pool.locality.value}"
    asked = request.objective.locality
    return "" if _within(asked, info) else f"{_side(info)}, x-overspill-locality asks for {asked.value}"


def _within(locality: Locality, info: ReplicaInfo) -> bool:
    if locality is Locality.LOCAL_ONLY:
        return not info.remote
    return locality is not Locality.CLOUD_ONLY or info.tier == "cloud"


def _side(info: ReplicaInfo) -> str:
    return "remote" if info.remote else "local"


def _too_long(pending: PendingRequest, info: ReplicaInfo) -> str:
    answer = f" + answer {pending.left_tokens}" if pending.left_tokens is not None else ""
    return f"prompt {_length(pending.request)}{answer} tokens, window {info.context_tokens}"


def _other_side(request: InferenceRequest, pool: Pool) -> str:
    canary = pool.canary_of(request)
    if canary is None:
        return ""
    if canary.why:
        return f"canary {canary.name} stepped back: {canary.why}"
    return (
        f"drawn for the {canary.side} deployment of canary {canary.name}, which has {canary.weight:.3g} of the requests"
    )


def _length(request: InferenceRequest) -> str:
    estimated = "at least about " if request.prompt_slack else ""
    return f"{estimated}{request.least_prompt_tokens}"


def _is(rejected: Mapping[str, Rejection], info: ReplicaInfo, code: str) -> bool:
    return info.replica_id in rejected and rejected[info.replica_id].code == code


def _is_down(rejected: Mapping[str, Rejection], info: ReplicaInfo) -> bool:
    return info.replica_id in rejected and rejected[info.replica_id].temporary
