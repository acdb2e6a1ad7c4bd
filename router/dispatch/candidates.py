"""From replicas to a `Situation`: what may serve a request, what may not and why, and what each would cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from router.base.errors import (
    ContextTooLong,
    InvalidRequest,
    ModelNotFound,
    OverspillError,
    ReplicasFailed,
    Unavailable,
)
from router.dispatch.record import Rejection, ReplicaLoad
from router.signals.affinity import Affinity
from router.signals.fairness import CallerShares
from router.signals.health import Health
from router.signals.ladder import Ladder
from router.signals.latency import LatencyModel
from router.signals.length import LengthWatch
from router.signals.occupancy import occupied_slots, sibling_load
from router.signals.peak_latency import PeakLatency
from router.signals.prices import CapacityPrices
from router.values.link import LinkSnapshot
from router.values.prediction import Demand, InFlightLoad, SiblingLoad
from router.values.replica import Replica, ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import ChatPrompt, InferenceRequest, Locality
from router.values.settings import FREE, Prices, RouterSettings
from router.values.situation import Candidate, Situation

_RETRY_AFTER_S = 1.0
_NEVER = {"other-model", "locality"}
"""Rejections of replicas that the request may never be served by."""


@dataclass(slots=True)
class ReplicaView:
    """One replica as it stands now; shared by the decisions of one moment."""

    replica: Replica
    info: ReplicaInfo
    snapshot: ReplicaSnapshot
    link: LinkSnapshot | None
    health: Health
    mine: InFlightLoad

    @classmethod
    def of(
        cls, replica: Replica, health: Callable[[ReplicaSnapshot], Health], in_flight: Callable[[str], InFlightLoad]
    ) -> ReplicaView:
        snapshot = replica.snapshot()
        return cls(
            replica=replica,
            info=snapshot.info,
            snapshot=snapshot,
            link=replica.link,
            health=health(snapshot),
            mine=in_flight(snapshot.info.replica_id),
        )


@dataclass(frozen=True, slots=True)
class Unreached:
    """A configured upstream that was never reached: what it serves is not known yet.

    Attributes:
        why: what the last attempt met.
    """

    endpoint: str
    why: str

    @property
    def text(self) -> str:
        return f"not reached yet, so what it serves is not known; {self.why}"


class Standing(msgspec.Struct, frozen=True, gc=False):
    """What holds of a replica for whoever asks at one moment.

    Attributes:
        siblings: the other rungs of its device that have sequences.
        occupied, slots: of its device.
        room: a slot is free, its own and its device's.
        favoured, device_second_price, peak_latency_s: as in `Candidate`.
    """

    siblings: tuple[SiblingLoad, ...]
    occupied: int
    slots: int
    room: bool
    favoured: bool
    device_second_price: float
    peak_latency_s: float


@dataclass(slots=True)
class PoolView:
    """What one moment's decisions need besides the request.

    Attributes:
        replicas: by replica id.
        ahead: requests that wait for a replica and go before one of that priority.
        waiting: requests in the queue.
        session_replica: session → the replica that served it last.
        locality: what the tier's policy allows at all.
        unreached: an upstream that might serve anything, and cannot be asked yet.
        standings: by replica id.
    """

    now_s: float
    replicas: Mapping[str, ReplicaView]
    settings: RouterSettings
    latency: LatencyModel
    affinity: Affinity
    ladder: Ladder
    ahead: Callable[[str, int], int]
    waiting: int
    prices: CapacityPrices
    peaks: PeakLatency
    shares: CallerShares
    session_replica: Mapping[str, str]
    locality: Locality = Locality.ANY
    unreached: Unreached | None = None
    standings: Mapping[str, Standing] = field(init=False)
    loads: tuple[ReplicaLoad, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.loads = tuple([(view.snapshot, view.link) for view in self.replicas.values()])
        by_device: dict[str, list[SiblingLoad]] = {}
        for view in self.replicas.values():
            if occupied_slots(view.snapshot, view.mine):
                load = sibling_load(view.snapshot, view.mine)
                by_device.setdefault(view.info.device_key, []).append(load)
        self.standings = {
            name: self._standing(view, by_device.get(view.info.device_key, ())) for name, view in self.replicas.items()
        }

    def _standing(self, view: ReplicaView, on_device: Sequence[SiblingLoad]) -> Standing:
        info, snapshot = view.info, view.snapshot
        name, device = info.replica_id, info.device_key
        siblings: tuple[SiblingLoad, ...] = ()
        own = occupied_slots(snapshot, view.mine)
        occupied, slots = own, snapshot.slots
        if len(on_device) > (1 if own else 0):
            siblings = tuple([load for load in on_device if load.info is not info])
            for sibling in siblings:
                occupied += sibling.occupied
                slots = max(slots, sibling.slots)
        room = own < snapshot.slots and occupied < slots
        if snapshot.credits is not None:  # they count what waits there, and what others send
            room = snapshot.credits > 0
        prices = self.prices
        return Standing(
            siblings,
            occupied,
            slots,
            room,
            prices.favours(device, name),
            prices.price(device),
            self.peaks.of(name),
        )

    def has_room(self, replica_id: str) -> bool:
        """Whether a request that is sent to a replica now would start at once."""
        view = self.replicas.get(replica_id)
        return view is not None and view.snapshot.available and not view.health.code and self.standings[replica_id].room


@dataclass(frozen=True, slots=True)
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

    @property
    def left_tokens(self) -> int | None:
        """Longest rest of the answer under the caller's cap, None without one."""
        cap = self.request.sampling.max_tokens
        return None if cap is None else max(1, cap - self.request.continuation_tokens)


def assess(pending: PendingRequest, pool: PoolView) -> tuple[Situation | None, tuple[Rejection, ...]]:
    """Filter and predict. The situation is None when every replica was rejected."""
    rejections = _unreached(pending, pool) if pool.unreached is not None else []
    candidates: list[Candidate] = []
    request, latency, settings, affinity = pending.request, pool.latency, pool.settings, pool.affinity
    session = pool.session_replica.get(request.objective.session or "")
    priority, prompt_tokens, emitted = (
        request.objective.priority,
        request.least_prompt_tokens,
        request.continuation_tokens,
    )
    left_tokens, curve, exact = pending.left_tokens, pending.length.curve, request.sampling.ignore_eos
    expected_of: dict[int, int] = {}
    free = settings.prices is FREE
    for name, view in pool.replicas.items():
        rejection = _reject(pending, view, pool)
        if rejection is not None:
            rejections.append(rejection)
            continue
        info = view.info
        room = info.context_tokens - prompt_tokens
        most = max(1, room if left_tokens is None or left_tokens > room else left_tokens)
        expected = expected_of.get(most)
        if expected is None:
            expected = expected_of[most] = most if exact else max(1, round(curve.expected_left(emitted, most)))
        longest = 0 if emitted else min(pending.length.longest, most)
        cached = affinity.expected_cached(request, name)
        demand = Demand(request.prompt_tokens, expected, request.prompt_bytes, cached, longest)
        stands = pool.standings[name]
        ahead, slots = pool.ahead(name, priority), stands.slots or 1
        behind = 0 if stands.room else ahead
        prediction = latency.predict(view.snapshot, view.link, demand, view.mine, behind, siblings=stands.siblings)
        candidates.append(
            Candidate(
                info,
                prediction,
                room + emitted if left_tokens is not None and left_tokens > room else None,
                session == name,
                0.0 if free and not _is_metered(view) else _price(request, view, settings.prices, expected),
                stands.occupied == 0,
                slots,
                (stands.occupied + ahead) / slots,
                stands.peak_latency_s,
                stands.favoured,
                stands.device_second_price if pool.waiting > 1 or stands.occupied else 0.0,
            )
        )
    if any(c.window_cap is not None for c in candidates) and any(c.window_cap is None for c in candidates):
        short = [c.info for c in candidates if c.window_cap is not None]  # cut only where no window holds it whole
        rejections += [Rejection(info, "context", _too_long(pending, info)) for info in short]
        candidates = [c for c in candidates if c.window_cap is None]
    if not candidates:
        return None, tuple(rejections)
    answer_tokens = max(expected_of.values())
    return _situation(pending, pool, candidates, rejections, answer_tokens), tuple(rejections)


def _situation(
    pending: PendingRequest,
    pool: PoolView,
    candidates: list[Candidate],
    rejections: list[Rejection],
    answer_tokens: int,
) -> Situation:
    request, settings = pending.request, pool.settings
    eligible = [c.info for c in candidates]
    eligible += [r.info for r in rejections if r.code not in _NEVER and r.info.replica_id in pool.replicas]
    rejected = {r.info.replica_id: r for r in rejections}
    local = [info for info in eligible if not info.remote]
    remote = [info for info in eligible if info.remote]
    begun = request.continuation_tokens > 0
    objective = request.objective
    if objective.ttft_s is None and not begun:
        objective = replace(objective, ttft_s=settings.ttft_slo_ms / 1e3)
    shortened = not begun and request.objective.shorten
    return Situation(
        objective=objective,
        ttft_promised=request.objective.ttft_s is not None,
        waited_s=pool.now_s - request.accepted_at_s,
        wait_left_s=max(0.0, pending.wait_until_s - pool.now_s),
        candidates=tuple(candidates),
        best_quality=max(info.quality for info in eligible),
        answer_tokens=answer_tokens,
        open_ended=request.sampling.max_tokens is None,
        emitted_tokens=request.continuation_tokens,
        answer_cap=pool.ladder.answer_cap(request.sampling.max_tokens, settings) if shortened else None,
        overloaded=pool.ladder.overloaded,
        pinned=all(request.model != info.family for info in eligible),
        only_remote_fits=bool(local) and all(_is(rejected, info, "context") for info in local),
        remote_served=bool(remote),
        local_down=bool(local) and all(_is_down(rejected, info) for info in local),
        remote_down=bool(remote) and all(_is_down(rejected, info) for info in remote),
        settings=settings,
        length=pending.length.curve,
        now_s=pool.now_s,
        waiting=pool.waiting,
        caller_excess=pool.shares.excess(request.caller, pool.now_s) if settings.fairness.callers else 1.0,
        usual_cost_s=pool.prices.usual_cost_s,
    )


def _is_metered(view: ReplicaView) -> bool:
    return view.link is not None and view.link.price_per_byte > 0.0


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
    return Unavailable(
        f"locality leaves no replica that may serve {request.model!r} at present ({reasons})",
        retry_after_s=_RETRY_AFTER_S,
    )


def expected_tokens(pending: PendingRequest, info: ReplicaInfo) -> int:
    """Expected length of the rest of the answer on a replica: never more than its window leaves."""
    most = _most_tokens(pending, info)
    if pending.request.sampling.ignore_eos:
        return most
    return max(1, round(pending.length.curve.expected_left(pending.request.continuation_tokens, most)))


def demand_on(pending: PendingRequest, info: ReplicaInfo, affinity: Affinity, expected: int) -> Demand:
    """Return what a request asks of a replica that is expected to generate `expected` tokens for it."""
    request = pending.request
    cached = affinity.expected_cached(request, info.replica_id)
    longest = 0 if request.continuation_tokens else min(pending.length.longest, _most_tokens(pending, info))
    return Demand(request.prompt_tokens, expected, request.prompt_bytes, cached, longest)


def _most_tokens(pending: PendingRequest, info: ReplicaInfo) -> int:
    """Longest rest of the answer that the caller's cap and the replica's window allow."""
    room = info.context_tokens - pending.request.least_prompt_tokens
    return max(1, room if pending.left_tokens is None else min(pending.left_tokens, room))


def _unreached(pending: PendingRequest, pool: PoolView) -> list[Rejection]:
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


def _reject(pending: PendingRequest, view: ReplicaView, pool: PoolView) -> Rejection | None:
    """Say why a replica is no candidate: the request's own bounds first, then the replica's state."""
    info, request = view.info, pending.request
    model = request.model
    if model not in (info.family, info.variant):
        return Rejection(info, "other-model", f"serves {info.variant}, asked for {request.model}")
    if pool.locality is not Locality.ANY or request.objective.locality is not Locality.ANY:
        out_of_bounds = _out_of_bounds(request, info, pool)
        if out_of_bounds:
            return Rejection(info, "locality", out_of_bounds)
    needed = 1 if pending.left_tokens is None else min(pending.left_tokens, pool.settings.min_answer_tokens)
    if request.least_prompt_tokens + needed > info.context_tokens:
        return Rejection(info, "context", _too_long(pending, info))
    if info.quality < request.objective.min_quality:
        return Rejection(info, "quality", f"quality {info.quality:g}, asked for {request.objective.min_quality:g}")
    return _reject_now(pending, view)


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


def _out_of_bounds(request: InferenceRequest, info: ReplicaInfo, pool: PoolView) -> str:
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


def _length(request: InferenceRequest) -> str:
    estimated = "at least about " if request.prompt_slack else ""
    return f"{estimated}{request.least_prompt_tokens}"


def _is(rejected: Mapping[str, Rejection], info: ReplicaInfo, code: str) -> bool:
    return info.replica_id in rejected and rejected[info.replica_id].code == code


def _is_down(rejected: Mapping[str, Rejection], info: ReplicaInfo) -> bool:
    return info.replica_id in rejected and rejected[info.replica_id].temporary
