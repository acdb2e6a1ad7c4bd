"""`x-overspill-defer: allow`: what cannot be served now is kept, and its caller told where the answer will be (202)."""

from __future__ import annotations

import functools
import math

import orjson
import structlog

from router.base.errors import OverspillError, Refused, ReplicaError
from router.gateway.endpoint import Handler, RequestContext, StreamReply
from router.gateway.errors import Reply
from router.gateway.media import plain_body
from router.jobs.deferred import asking
from router.jobs.jobs import Jobs
from router.jobs.objects import deferred_object
from router.jobs.records import Asking, Deferred, DeferredStatus
from router.values.request import Objective
from router.wire import headers as wire_headers
from router.wire import names as wire_names
from router.wire.names import CACHE_SALT, DEFER, LOCALITY, MIN_QUALITY, PRIORITY, SESSION, SHORTEN
from router.wire.promise import parse_objective

log = structlog.get_logger("router.gateway")

_HELD = (LOCALITY, MIN_QUALITY, SESSION, SHORTEN, CACHE_SALT)
_RETRY_AFTER_S = 5.0
# Of a later answer nothing is left to stream: these are about streams only.
_STREAMED = ("stream", "stream_options")
_ANY = Objective(deadline_s=math.inf)  # the deadline of a late value may stand in the body
_HIGHEST_PRIORITY = -1  # behind those who are here now


class Deferral:
    """Keeps requests of callers who allow it, where the tier cannot serve them."""

    def __init__(self, jobs: Jobs, max_body_bytes: int) -> None:
        self._jobs = jobs
        self._max_body_bytes = max_body_bytes

    def around(self, handler: Handler) -> Handler:
        """Return a handler that defers what the given one cannot serve now."""

        @functools.wraps(handler)
        async def deferring(context: RequestContext) -> Reply | StreamReply:
            if DEFER not in context.headers:
                return await handler(context)
            request = self._asking(context)
            kept = await self._kept(request)
            if kept is not None:
                return told(kept)
            try:
                return await handler(context)
            except (Refused, ReplicaError) as error:
                return await self._defer(context, request, error)

        return deferring

    def _asking(self, context: RequestContext) -> Asking:
        """Return the request as it may be kept: without what it was packed in, and without its times.

        Raises:
            InvalidRequest: a header of ours is wrong; nothing is kept that could never be served.
        """
        parse_objective(context.headers, _ANY)
        wire_headers.cache_salt(context.headers)
        body = plain_body(context, self._max_body_bytes)
        context.headers.pop("content-encoding", None)
        given, path = context.headers.get(wire_names.REQUEST_ID), context.path
        headers = [(name, context.headers[name]) for name in _HELD if name in context.headers]
        asked = asking(context.caller.digest, given, path, body) if given else None
        return Asking(asked, path, context.request_id or "", tuple(headers), body)

    async def _kept(self, request: Asking) -> Deferred | None:
        """Return what is kept of it already: a client that lost the reply asks again under the same id."""
        return None if request.asked is None else await self._jobs.find_deferred(request.asked)

    async def _defer(self, context: RequestContext, request: Asking, error: OverspillError) -> Reply:
        """Keep it; where even that is not possible, the refusal stands.

        Raises:
            OverspillError: the refusal.
        """
        priority = min(_priority(context), _HIGHEST_PRIORITY)
        try:
            body = _whole(request.body)
        except (ValueError, TypeError) as unreadable:  # in a field that nobody has read; or it nests too deeply
            raise error from unreadable
        headers = (*request.headers, (PRIORITY, str(priority)))
        kept = Asking(request.asked, request.path, request.request_id, headers, body)
        why = {"code": error.code, "message": error.message}
        try:
            deferred = await self._jobs.defer(context.caller.digest, kept, why)
        except OverspillError as full:
            log.warning("not deferred", request_id=context.request_id, why=full.message)
            raise error from full
        log.info("deferred", request_id=context.request_id, id=deferred.id, code=error.code)
        return told(deferred)


def told(deferred: Deferred) -> Reply:
    """Return what a caller is told of its deferred request: 202 until there is an answer."""
    waits = deferred.status is DeferredStatus.QUEUED
    lines = [("location", f"/v1/deferred/{deferred.id}")]
    if waits:
        lines += wire_headers.retry_headers(_RETRY_AFTER_S, should_retry=True)
    return Reply(orjson.dumps(deferred_object(deferred)), 202 if waits else 200, lines)


def _priority(context: RequestContext) -> int:
    given = context.headers.get(PRIORITY, "0")
    return min(int(given), context.caller.max_priority) if given.removeprefix("-").isdigit() else 0


def _whole(body: bytes) -> bytes:
    """Ask for an answer in one piece."""
    fields = orjson.loads(body)
    return orjson.dumps({name: value for name, value in fields.items() if name not in _STREAMED})
