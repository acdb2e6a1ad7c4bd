"""Errors → HTTP replies, in the dialect of the API that was called."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec
import orjson
from starlette.types import Send

from router.base.errors import InvalidRequest, OverspillError, Refused, Unauthenticated
from router.wire import headers, names
from router.wire.anthropic import errors as anthropic
from router.wire.openai.errors import encode_error

JSON = "application/json"
NO_CONTENT = 204


class BodyTooLarge(InvalidRequest):
    """The body is larger than this tier reads."""

    status = 413
    code = "request_too_large"


class BodyTimeout(InvalidRequest):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"


class UnsupportedMedia(InvalidRequest):
    """The body's content type or encoding is not read here."""

    status = 415
    code = "unsupported_media_type"


class Misdirected(InvalidRequest):
    """The request was meant for another host: a web page of somebody else may have sent it."""

    status = 421
    code = "misdirected_request"


class NoSuchPage(InvalidRequest):
    """The path or the record asked for does not exist."""

    status = 404
    code = "not_found"


class WrongMethod(InvalidRequest):
    """The path exists, for another HTTP method."""

    status = 405
    code = "method_not_allowed"


class Dialect(enum.Enum):
    """How errors look."""

    OPENAI = "openai"
    KSERVE = "kserve"
    ANTHROPIC = "anthropic"


_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_HEADER = "anthropic-version"
"""What all clients of that API send: some of its paths are OpenAI's too."""


def dialect_of(path: str, request_headers: Mapping[str, str]) -> Dialect:
    """Return how the caller of a path reads errors; lower-case names of headers."""
    kserve = path == "/v2" or (path.startswith("/v2/") and path != "/v2/rerank")  # which is Cohere's
    ollama = path.startswith("/api/") and not path.startswith("/api/v1/")  # its clients show an `error` that is a text
    if kserve or ollama:
        return Dialect.KSERVE
    theirs = path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/") or _ANTHROPIC_HEADER in request_headers
    return Dialect.ANTHROPIC if theirs else Dialect.OPENAI


class Reply(msgspec.Struct, frozen=True):
    """A whole HTTP reply."""

    body: bytes
    status: int = 200
    headers: list[tuple[str, str]] = []
    media_type: str = JSON


def render_error(error: OverspillError, dialect: Dialect, request_id: str | None = None) -> Reply:
    """Return the reply for an error; a refusal always says when to come back."""
    lines: list[tuple[str, str]] = []
    if isinstance(error, Refused):
        lines = headers.retry_headers(error.retry_after_s, should_retry=error.should_retry)
    elif isinstance(error, Unauthenticated):
        lines = [("www-authenticate", "Bearer")]
    elif isinstance(error, (BodyTooLarge, BodyTimeout)):
        lines = [("connection", "close")]  # the rest of the body is not read
    if dialect is Dialect.ANTHROPIC:
        body, lines = anthropic.encode_error(error, request_id), [*lines, *id_lines(request_id)]
        return Reply(body=body, status=anthropic.status_of(error), headers=lines)
    body = orjson.dumps({"error": error.message}) if dialect is Dialect.KSERVE else encode_error(error)
    return Reply(body=body, status=error.status, headers=lines)


def id_lines(request_id: str | None) -> list[tuple[str, str]]:
    """Return the request's id under the name that Anthropic's clients read, beside `x-request-id`."""
    return [] if request_id is None else [("request-id", request_id)]


async def send_error(error: OverspillError, path: str, request_headers: Mapping[str, str], send: Send) -> None:
    """Send what a request is refused with before it reaches its endpoint."""
    request_id = headers.reply_id(request_headers)
    reply = render_error(error, dialect_of(path, request_headers), request_id)
    await send_reply(reply, {names.REQUEST_ID: request_id}, send)


async def send_reply(reply: Reply, request_headers: Mapping[str, str], send: Send) -> None:
    """Send what is answered before a request reaches its endpoint."""
    lines = [*reply.headers, (names.REQUEST_ID, headers.reply_id(request_headers))]
    if reply.body:
        lines += [("content-type", reply.media_type)]
    if reply.status != NO_CONTENT:
        lines += [("content-length", str(len(reply.body)))]
    raw = [(name.encode(), value.encode("latin-1")) for name, value in lines]
    await send({"type": "http.response.start", "status": reply.status, "headers": raw})
    await send({"type": "http.response.body", "body": reply.body})
