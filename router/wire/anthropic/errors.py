"""Errors → Anthropic's error bodies and events, and the statuses that its clients know."""

from __future__ import annotations

import orjson

from router.base.errors import BudgetSpent, InvalidRequest, OverspillError, RateLimited, Refused

OVERLOADED = 529
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class ThreadsUnserved(InvalidRequest):
    """The conversation is to be held here between its turns: clients go on without that by this code alone."""

    code = "thread_unsupported_request"


def status_of(error: OverspillError) -> int:
    """Return the HTTP status: this API has one of its own for a server that is full, for whomever it is.

    429 is left for what the caller's own limits refuse.
    """
    own = isinstance(error, (RateLimited, BudgetSpent))
    return OVERLOADED if isinstance(error, Refused) and not own else error.status


def error_body(error: OverspillError, request_id: str | None) -> dict[str, object]:
    """Return the object that tells of an error; `code` is this project's, finer than the types of the API."""
    kind = _KINDS.get(status_of(error), "invalid_request_error" if isinstance(error, InvalidRequest) else "api_error")
    told: dict[str, object] = {"type": kind, "message": error.message, "code": error.code}
    if isinstance(error, ThreadsUnserved):
        told["details"] = {"error_code": error.code}
    return {"type": "error", "error": told, "request_id": request_id}


def encode_error(error: OverspillError, request_id: str | None) -> bytes:
    return orjson.dumps(error_body(error, request_id))


def encode_error_event(error: OverspillError, request_id: str | None) -> bytes:
    """The event that ends a stream which cannot go on: no `message_stop` follows."""
    return b"event: error\ndata: " + encode_error(error, request_id) + b"\n\n"
