"""Which pages of other origins may read answers, and how their browsers are told (Fetch, "CORS protocol")."""

from __future__ import annotations

import re
from collections.abc import Mapping

from router.base.errors import OverspillError
from router.base.loopback import is_local_page
from router.gateway.errors import Reply, dialect_of, render_error
from router.gateway.http.settings import CorsSettings
from router.wire import names as wire_names

_METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE"
_ASKED_HEADERS = re.compile(r"[A-Za-z0-9_-]{1,100}( ?, ?[A-Za-z0-9_-]{1,100}){0,99}")
_TOLD = (
    *wire_names.REPLY_NAMES,
    wire_names.REQUEST_ID,
    wire_names.PRIORITY,
    "retry-after",
    "retry-after-ms",
    "request-id",
    "x-should-retry",
    "server-timing",
    "www-authenticate",
    "inference-header-content-length",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
_VARY = ("vary", "origin, access-control-request-method, access-control-request-headers")


class OriginRefused(OverspillError):
    """The page's origin may not read what this tier answers."""

    status = 403
    code = "origin_not_allowed"
    kind = "invalid_request_error"


class Origins:
    """Who may read, by the origin that a browser names.

    Args:
        local_pages: pages of this host may, whichever port they come from.
    """

    def __init__(self, settings: CorsSettings, *, local_pages: bool) -> None:
        named = [origin.lower() for origin in settings.allow_origins]
        self._all = "*" in named
        self._exact = frozenset(origin for origin in named if "*" not in origin)
        self._below = tuple(origin.split("*", 1) for origin in named if "://*." in origin)
        self._local_pages = local_pages
        self._credentials = settings.allow_credentials
        self._max_age_s = settings.max_age_s

    def allow(self, origin: str) -> bool:
        """Say whether a page of `origin` may read answers."""
        name = origin.lower()
        if self._all or name in self._exact or (self._local_pages and is_local_page(origin)):
            return True
        return any(
            name.startswith(scheme) and name.endswith(rest) and "/" not in name[len(scheme) :]
            for scheme, rest in self._below
        )

    def told(self, origin: str) -> list[tuple[str, str]]:
        """Return the headers of a reply that a page of an allowed origin may read."""
        shown = "*" if self._all else origin
        exposed = ", ".join(_TOLD) if self._credentials else "*"
        lines = [("access-control-allow-origin", shown), ("access-control-expose-headers", exposed), ("vary", "origin")]
        return [*lines, ("access-control-allow-credentials", "true")] if self._credentials else lines

    def preflight(self, path: str, headers: Mapping[str, str]) -> Reply:
        """Answer what a browser asks before it sends the request of a page."""
        origin = headers["origin"]
        if not self.allow(origin):
            name = wire_names.header_safe(origin[:200])
            reply = render_error(
                OriginRefused(
                    f"`origin: {name}`: pages from there may not read this tier's answers; an operator can list them "
                    "in `cors.allow_origins`",
                    param="origin",
                ),
                dialect_of(path, headers),
            )
            return Reply(reply.body, reply.status, [*reply.headers, _VARY], reply.media_type)
        lines = [line for line in self.told(origin) if line[0] not in {"vary", "access-control-expose-headers"}]
        lines += [_VARY, ("access-control-allow-methods", _METHODS), ("access-control-max-age", str(self._max_age_s))]
        asked = headers.get("access-control-request-headers", "")
        if _ASKED_HEADERS.fullmatch(asked):
            lines.append(("access-control-allow-headers", asked))
        if headers.get("access-control-request-private-network") == "true":
            lines.append(("access-control-allow-private-network", "true"))
        return Reply(b"", 204, lines)
