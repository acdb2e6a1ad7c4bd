"""Which replicas may serve a request, why the others may not, and what the caller is told where none may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.base.errors import (
    ContextTooLong,
    InvalidRequest,
    ModelNotFound,
    OverspillError,
    ReplicasFailed,
    Unavailable,
)
from router.dispatch.assessment.pending import PendingRequest
from router.dispatch.records.record import Rejection
from router.dispatch.replicas.peers import alike
from router.dispatch.replicas.pool import Pool
from router.dispatch.replicas.served import Served
from router.dispatch.replicas.view import ReplicaView
from router.values.feature import NOTHING, Feature
from router.values.prompt import ChatPrompt
from router.values.replica import ReplicaInfo, SpeedPrior, Unreached
from router.values.request import InferenceRequest, Locality
from router.values.task import Call, Task

_RETRY_AFTER_S = 1.0
_TAKES = "is declared with `modalities` in [[backends.models]]"
_REMEDIES: Mapping[Feature, tuple[str, str]] = {
    Feature.IMAGES: (f": send text, or ask a model that takes images; one behind this tier {_TAKES}", "messages"),
    Feature.AUDIO: (f": send text, or ask a model that takes sounds; one behind this tier {_TAKES}", "messages"),
    Feature.BAD_WORDS: (": vLLM servers take it; elsewhere ban ids of /tokenize with `logit_bias`", "bad_words"),
    Feature.TOKENIZE: (": its tokenizer is not on this tier, ask the server that runs the model", "model"),
}
NEVER = {"other-model", "locality", "lacks", "canary", "task"}
"""Rejections of replicas that the request may never be served by."""


def eligible(
    pending: PendingRequest, pool: Pool, served: Served, names: Sequence[str], rejections: list[Rejection]
) -> list[ReplicaView]:
    """Return those of `names` that may serve a request; adds to `rejections` why the others may not.

    Most requests ask for nothing that any replica of their model could refuse, and `reject` is asked of none.
    """
    request, objective, views = pending.request, pending.request.objective, pool.views
    needed, least_quality = pending.needed_tokens(pool.settings), objective.min_quality
    plain = (
        pending.task is Task.GENERATE
        and pool.locality is Locality.ANY
        and objective.locality is Locality.ANY
        and not request.wants
        and not pending.failed
    )
    suits_all = plain and needed <= served.least_context_tokens and least_quality <= served.least_quality
    found: list[ReplicaView] = []
    for name in names:
        view = views[name]
        if not view.open_to_all or not (
            suits_all or (plain and needed <= view.info.context_tokens and least_quality <= view.info.quality)
        ):
            rejection = reject(pending, view, pool)
            if rejection is not None:
                rejections.append(rejection)
                continue
        found.append(view)
    return found


def reject(pending: PendingRequest, view: ReplicaView, pool: Pool) -> Rejection | None:
    """Say why a replica is no candidate: the request's own bounds first, then the replica's state."""
    info, request = view.info, pending.request
    if pending.task not in info.tasks and pending.task is not Task.TOKENIZE:
        does = ", ".join(sorted(task.value for task in info.tasks))
        return Rejection(info, "task", f"its model can {does}, asked to {pending.task.value}")
    if pool.locality is not Locality.ANY or request.objective.locality is not Locality.ANY:
        out_of_bounds = _out_of_bounds(request, info, pool)
        if out_of_bounds:
            return Rejection(info, "locality", out_of_bounds)
    if pending.needed_tokens(pool.settings) > info.context_tokens:
        return Rejection(info, "context", too_long(pending, info))
    if info.quality < request.objective.min_quality:
        return Rejection(info, "quality", f"quality {info.quality:g}, asked for {request.objective.min_quality:g}")
    lacking = (info.lacks & pending.needs if info.lacks else NOTHING) | (request.wants - info.offers)
    if lacking:
        named = ", ".join(sorted(feature.value for feature in lacking))
        return Rejection(info, "lacks", f"its server does not do what the request needs: {named}")
    return _reject_now(pending, view)


def _reject_now(pending: PendingRequest, view: ReplicaView) -> Rejection | None:
    info, health, snapshot = view.info, view.health, view.snapshot
    if pending.failed:
        met = pending.failed.get(info.replica_id)
        if met is not None:
            return Rejection(info, "already-failed", f"failed for this request: {met}", temporary=True)
        for other in pending.refused_by:
            if alike(other, info):
                text = f"like {other.called}, which refused it as the caller's mistake"
                return Rejection(info, "already-failed", text, temporary=True)
    if not snapshot.available:
        why = snapshot.why or "not available"
        return Rejection(info, "unhealthy", why, temporary=True, again_s=snapshot.back_in_s)
    if health.code and health.against(pending.request.objective.priority):
        return Rejection(info, health.code, health.text, temporary=True, waits=health.waits, again_s=health.again_s)
    return None


def unreached(pending: PendingRequest, pool: Pool) -> list[Rejection]:
    """Return a temporary rejection for each source that was never reached, where locality allows it."""
    asked = pending.request.objective.locality
    return [
        _unreached(source, pending.request.model) for source in pool.unreached if source.within(asked, pool.locality)
    ]


def _unreached(source: Unreached, model: str) -> Rejection:
    info = ReplicaInfo(
        replica_id=source.who,
        endpoint=source.who,
        tier="cloud",
        remote=source.remote,
        family=model,
        variant="unknown",
        rung=0,
        quality=0.0,
        context_tokens=0,
        prior=SpeedPrior(0.0, 0.0),
    )
    return Rejection(info, "unhealthy", source.text, temporary=True)


def _out_of_bounds(request: InferenceRequest, info: ReplicaInfo, pool: Pool) -> str:
    """Say why a replica lies outside of what the policy or the caller allows; empty if it does not."""
    if not within(pool.locality, info):
        return f"{_side(info)}, the policy `{pool.settings.policy}` keeps to {pool.locality.value}"
    asked = request.objective.locality
    return "" if within(asked, info) else f"{_side(info)}, x-overspill-locality asks for {asked.value}"


def within(locality: Locality, info: ReplicaInfo) -> bool:
    """Whether a request that keeps to `locality` may go to a replica."""
    if locality is Locality.LOCAL_ONLY:
        return not info.remote
    return locality is not Locality.CLOUD_ONLY or info.tier == "cloud"


def _side(info: ReplicaInfo) -> str:
    return "remote" if info.remote else "local"


def too_long(pending: PendingRequest, info: ReplicaInfo) -> str:
    answer = f" + answer {pending.left_tokens}" if pending.left_tokens is not None else ""
    return f"prompt {_length(pending.request)}{answer} tokens, window {info.context_tokens}"


def other_side(request: InferenceRequest, pool: Pool) -> str:
    canary = pool.canary_of(request)
    if canary is None:
        return ""
    if canary.why:
        return f"canary {canary.name} stepped back: {canary.why}"
    return (
        f"drawn for the {canary.side} deployment of canary {canary.name}, which has {canary.weight:.3g} of the requests"
    )


def explain_none(pending: PendingRequest, rejections: Sequence[Rejection]) -> OverspillError:
    """Return the error for a request that every replica was rejected for; a temporary reason comes first."""
    request = pending.request
    of_model = [r for r in rejections if r.code != "other-model"]
    if all(r.code == "task" for r in of_model):
        return _nobody_does(request, of_model, rejections)
    temporary = [r for r in of_model if r.temporary]
    if temporary:
        reasons = _told(temporary)
        again_s = min((r.again_s for r in temporary if r.again_s > 0), default=_RETRY_AFTER_S)
        # A replica that failed for this request may serve others: the refusal speaks for this request only.
        kind = ReplicasFailed if any(r.code == "already-failed" for r in temporary) else Unavailable
        return kind(f"no replica can take the request now ({reasons})", retry_after_s=again_s)
    too_long = [r.info for r in of_model if r.code == "context"]
    if too_long:
        return _fits_nowhere(request, max(too_long, key=lambda info: info.context_tokens))
    if any(r.code == "quality" for r in of_model):
        best = max(r.info.quality for r in of_model if r.code == "quality")
        return InvalidRequest(
            f"x-overspill-min-quality {request.objective.min_quality:g} is above the best rung that may serve "
            f"{request.model!r}, which has {best:g}",
            param="x-overspill-min-quality",
        )
    reasons = _told(of_model)
    if {"lacks"} <= {r.code for r in of_model} <= {"lacks", "locality"}:
        return _lacking(request, reasons)
    return Unavailable(
        f"locality leaves no replica that may serve {request.model!r} at present ({reasons})",
        retry_after_s=_RETRY_AFTER_S,
    )


def _told(rejections: Sequence[Rejection]) -> str:
    """Say why each was rejected; servers of one backend that were rejected for the same are told of once."""
    return "; ".join(dict.fromkeys(f"{r.info.called}: {r.text}" for r in rejections))


def _lacking(request: InferenceRequest, reasons: str) -> InvalidRequest:
    why = f"no replica of {request.model!r} can serve this request ({reasons})"
    wanted = sorted(request.wants, key=lambda feature: feature.value)
    remedy, param = _REMEDIES[wanted[0]] if wanted else ("", None)
    return InvalidRequest(why + remedy, param=param)


def _nobody_does(
    request: InferenceRequest, of_model: Sequence[Rejection], rejections: Sequence[Rejection]
) -> InvalidRequest:
    if of_model:
        return InvalidRequest(f"`model`: `{request.model}` does not serve this: {of_model[0].text}", param="model")
    return ModelNotFound.of(request.model, {name for r in rejections for name in (r.info.family, r.info.variant)})


def _fits_nowhere(request: InferenceRequest, largest: ReplicaInfo) -> ContextTooLong:
    if isinstance(request.prompt, Call):
        least = request.window_tokens or request.prompt_tokens
        what, param = f"the longest input has at least {least} tokens", "input"
    else:
        what = f"the prompt has {_length(request)} tokens"
        param = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
    return ContextTooLong.of(
        largest.context_tokens,
        f"{what}, and no window that may serve it is larger than that of {largest.called}",
        param=param,
    )


def _length(request: InferenceRequest) -> str:
    estimated = "at least about " if request.prompt_slack else ""
    return f"{estimated}{request.least_prompt_tokens}"
