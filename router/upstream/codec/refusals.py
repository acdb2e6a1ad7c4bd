"""Refusals and errors of an upstream back into the errors that the router understands."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.base.errors import (
    BodyShed,
    BudgetSpent,
    ContextTooLong,
    DeadlineLost,
    Evicted,
    InvalidRequest,
    ModelNotFound,
    OverspillError,
    PromiseLost,
    RateLimited,
    Refused,
    ReplicaFailed,
    ReplicasFailed,
    RequestFailed,
    Shed,
    Unavailable,
)
from router.base.json_input import UNREADABLE
from router.wire import headers as wire_headers
from router.wire import names as wire_names
from router.wire.openai.passed import TOKENIZER_PATH

COMPLETIONS_PATH = "/v1/completions"


def counted(told: Any, least: int, most: int) -> int | None:
    """Return a figure that an upstream tells; None where it cannot be true."""
    return told if type(told) is int and least <= told <= most else None


class UpstreamError(msgspec.Struct):
    """The `error` object of a body or an event; servers fill it in unevenly."""

    message: str = ""
    code: str | int | None = None
    param: str | None = None
    attempts: Any = None

    @property
    def told_attempts(self) -> int | None:
        """Replicas that it tried; None where it tells nothing that can be true."""
        return counted(self.attempts, 1, wire_headers.MAX_ATTEMPTS)


# What a tier of ours says with its code: whether a refusal speaks for one request, or for more.
_REFUSALS: dict[tuple[int, str], type[Refused]] = {
    (kind.status, kind.code): kind for kind in (BodyShed, Evicted, PromiseLost, ReplicasFailed, DeadlineLost)
}

# Limits of this tier's own key: the upstream stays away for this tier, and its requests may well be served elsewhere.
_LIMITS = frozenset({RateLimited.code, BudgetSpent.code})


class _ErrorBody(msgspec.Struct):
    error: UpstreamError | str | None = None


# vLLM, SGLang and llama.cpp have no code for it.
_OVERFLOW = re.compile(r"maximum context length|longer than the model's context|available context size", re.IGNORECASE)


# Of a page that is there; what else is said with 404 speaks of the page.
_NO_SUCH_MODEL = re.compile(r"\bmodel\b.*(does not exist|not found|not loaded|no access)", re.IGNORECASE | re.DOTALL)


_CIRCLE_RETRY_S = 5.0  # a server that is restarted may be back by then

_OF_PAGES: Mapping[str, str] = {
    COMPLETIONS_PATH: "ask it by /v1/chat/completions, or name a model whose server has it",
    TOKENIZER_PATH: "vLLM has it with --enable-tokenizer-info-endpoint",
}
"""Pages that not every server has, and what a caller can do about it."""


class PageMissing(InvalidRequest):
    """The server does not have what this kind of request goes to. It is well, and serves other kinds."""


def not_offered(path: str, status: int, body: bytes, who: str) -> PageMissing | None:
    """Return the refusal of a page that only some servers have, where a status says that this one has not.

    Such a server is well, and whether it has the page is its operator's choice.
    """
    if path not in _OF_PAGES or status not in {404, 405}:
        return None
    told = _told(body)
    if told.code == ModelNotFound.code or _NO_SUCH_MODEL.search(told.message):
        return None
    return PageMissing(f"{who} has no {path} (HTTP {status}); {_OF_PAGES[path]}")


def decode_error(status: int, headers: Mapping[str, str], body: bytes, who: str) -> OverspillError:
    """Turn an upstream's refusal into the error that the router understands."""
    told = _told(body)
    error = _error_of(status, told, headers, who)
    error.attempts = told.told_attempts
    return error


def as_first_tier(error: OverspillError, passed_on: Sequence[tuple[str, str]], who: str) -> OverspillError:
    """Return an upstream's error as the tier tells it that a request came to first.

    The refusal of one that went through too many tiers is no mistake of a caller who counted none: tiers that are each
    other's upstream sent it round, since each took the other for one that serves it. All others stay as they are.

    Args:
        passed_on: the request's headers; see `router.wire.headers.passed_on`.
    """
    hops = wire_names.HOPS
    if error.param != hops or not isinstance(error, InvalidRequest) or any(name == hops for name, _ in passed_on):
        return error
    return ReplicasFailed(
        f"{who}: nobody serves this now: tiers that are each other's upstream sent the request round in a circle, "
        f"until `{hops}` ended it",
        retry_after_s=_CIRCLE_RETRY_S,
    )


def _error_of(status: int, told: UpstreamError, headers: Mapping[str, str], who: str) -> OverspillError:
    message = f"{who}: {told.message or f'HTTP {status}'}"
    if status in {401, 403}:
        return ReplicaFailed(f"{who} does not accept this tier's API key (HTTP {status}): {told.message}")
    if status in {429, 503}:
        return _refusal(status, told, headers, message)
    if status == 404 and told.code != ModelNotFound.code:
        return ReplicaFailed(f"{who}: HTTP 404, is the base URL right? {told.message}")
    if 400 <= status < 500 and status not in {408, 409, 425}:
        if told.code != ContextTooLong.code and _OVERFLOW.search(told.message or ""):
            return ContextTooLong(f"{message}; the prompt is too long", param=told.param)
        kinds = {ModelNotFound.code: ModelNotFound, ContextTooLong.code: ContextTooLong}
        return kinds.get(str(told.code), InvalidRequest)(message, param=told.param)
    return (RequestFailed if told.code == RequestFailed.code else ReplicaFailed)(message)


def _refusal(status: int, told: UpstreamError, headers: Mapping[str, str], message: str) -> Refused:
    kind = _REFUSALS.get((status, str(told.code)), Shed if status == 429 else Unavailable)
    if headers.get("x-should-retry") == "false" and str(told.code) not in _LIMITS:
        kind = DeadlineLost
    return kind(message, retry_after_s=retry_after_s(headers))


def _told(body: bytes) -> UpstreamError:
    try:
        found = msgspec.json.decode(body, type=_ErrorBody).error
    except UNREADABLE:
        found = None
    if isinstance(found, str):
        return UpstreamError(message=found)
    return found or UpstreamError(message=body[:200].decode("utf-8", "replace").strip())


def retry_after_s(headers: Mapping[str, str], default_s: float = 1.0) -> float:
    """Read `retry-after-ms`, then `retry-after` in seconds; an HTTP date, or nothing, gives the default."""
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            value = float(headers.get(name, "nan")) / scale
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            return value
    return default_s
