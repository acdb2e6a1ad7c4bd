"""Bodies compressed for a slow uplink: a prompt of 8,000 tokens is 32 kB, 0.8 s over 3G, and packs to two fifths."""

from __future__ import annotations

import gzip

from msgspec.structs import replace

from router.upstream.codec.openai import HttpRequest

_LEAST_BYTES = 4096
_MOST_BYTES = 128 * 1024  # larger ones would hold up everybody else for milliseconds
_LEVEL = 1
_WORTH = 0.9  # of its size: images in base64 shrink by a quarter, what was compressed before hardly


def packed(request: HttpRequest) -> HttpRequest:
    """Return a request with its body in gzip where that pays, else as it is."""
    size = len(request.body)
    if not _LEAST_BYTES <= size <= _MOST_BYTES:
        return request
    body = gzip.compress(request.body, _LEVEL, mtime=0)
    if len(body) > _WORTH * size:
        return request
    return replace(request, headers=[*request.headers, ("content-encoding", "gzip")], body=body)
