"""Clients that each ask for a vector, wait for it, and ask again: 64 of them cost a twentieth of a core.

They speak HTTP/1.1 over a connection each, on uvloop, and look at nothing of a reply but its status and its length:
what is measured is the agent, not who asks it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_AGAIN_S = 0.05  # after a refusal


@dataclass
class Clients:
    """Some clients of one agent.

    Attributes:
        texts: makes the inputs of one more request.
        seen: status and latency of every reply.
        client_cpu_s: what they cost, all together.
    """

    port: int
    count: int
    variant: str
    deadline_s: float
    texts: Callable[[], list[str]]
    seen: list[tuple[int, float]] = field(default_factory=list)
    client_cpu_s: float = 0.0
    seconds: float = 0.0
    ends_s: float = 0.0

    async def press(self, seconds: float) -> None:
        """Keep all clients busy for a while; the last replies are waited for."""
        loop = asyncio.get_running_loop()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        self.ends_s = began_s + seconds
        made = [await loop.create_connection(lambda: _Client(self), "127.0.0.1", self.port) for _ in range(self.count)]
        await asyncio.gather(*(client.done for _, client in made))
        self.seconds += time.perf_counter() - began_s
        self.client_cpu_s += time.process_time() - cpu_s

    def request(self) -> bytes:
        """Return the bytes of one more request."""
        body = json.dumps({"model": self.variant, "input": self.texts(), "encoding_format": "base64"}).encode()
        return (
            b"POST /v1/embeddings HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"x-overspill-deadline-ms: %d\r\ncontent-length: %d\r\n\r\n%b" % (1e3 * self.deadline_s, len(body), body)
        )


class _Client(asyncio.Protocol):
    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._got = bytearray()
        self._sent_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._got.clear()
        request = self._clients.request()
        self._sent_s = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, found, body = self._got.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if not found or len(body) < int(length):
            return
        status, now_s = int(head[9:12]), time.perf_counter()
        self._clients.seen.append((status, now_s - self._sent_s))
        if now_s >= self._clients.ends_s:
            self._transport.close()
        elif status == 200:
            self._ask()
        else:
            asyncio.get_running_loop().call_later(_AGAIN_S, self._ask)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)
