"""Replies in gzip, where the caller reads it and it spares anything. Streams are sent as they come, never packed."""

from __future__ import annotations

import asyncio
import re
import zlib

MIN_BYTES = 4096
"""Shorter replies go out as they are: packing costs more than it spares."""

_IN_THREAD_BYTES = 64 * 1024  # packing more than this would hold up every other request for a millisecond
_LEVEL = 1
_ZERO = re.compile(r"q=0(\.0*)?")


def reads_gzip(accepted: str) -> bool:
    """Say whether a client with this `accept-encoding` reads gzip."""
    found: dict[str, bool] = {}
    for entry in accepted.lower().split(","):
        coding, _, weight = entry.partition(";")
        found[coding.strip()] = not _ZERO.fullmatch(weight.strip())
    return found.get("gzip", found.get("x-gzip", found.get("*", False)))


async def packed(body: bytes) -> bytes:
    """Return `body` as gzip."""
    return await asyncio.to_thread(_gzip, body) if len(body) >= _IN_THREAD_BYTES else _gzip(body)


def _gzip(body: bytes) -> bytes:
    pack = zlib.compressobj(_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    return pack.compress(body) + pack.flush()
