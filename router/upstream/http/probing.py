"""One request of a probe: its reply is read whole within a bound, as it was sent, and never unpacked.

A few kilobytes that are unpacked may be gigabytes: they end the tier, not the probe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

MAX_REPLY_BYTES = 8 * 1024 * 1024  # a list of models, or a page of metrics, has some hundred kilobytes
UNCOMPRESSED = {"accept-encoding": "identity"}
"""Headers of a client that probes with `ask`."""


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """What a probe got, read whole."""

    status_code: int
    headers: httpx.Headers
    content: bytes


async def ask(client: httpx.AsyncClient, method: str, url: str, **more: Any) -> ProbeReply:
    """Send a request and read the reply.

    Raises:
        httpx.HTTPError: nothing came, or too much, or what would have to be unpacked.
    """
    body = bytearray()
    async with client.stream(method, url, **more) as reply:
        packed = reply.headers.get("content-encoding", "identity").strip().lower()
        if packed not in {"", "identity"}:
            raise httpx.HTTPError(f"{method} {url}: the reply is compressed ({packed[:40]!r}), though asked not to be")
        async for piece in reply.aiter_raw():
            body += piece
            if len(body) > MAX_REPLY_BYTES:
                raise httpx.HTTPError(f"{method} {url}: more than {MAX_REPLY_BYTES >> 20} MiB in reply")
    return ProbeReply(reply.status_code, reply.headers, bytes(body))
