"""Callers that each send the next request as soon as the last answer is whole, and hold every answer to its length."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gateway.stub import MODEL

STREAM_TOKENS = 32
_FIRST = b'"content":'


@dataclass
class Load:
    """A number of callers at one port of this host, for a time.

    Attributes:
        key: bearer key, for servers that want one.
        first_s: of each answer, request sent → first byte of text, in seconds.
    """

    port: int
    callers: int
    stream: bool
    key: str = ""
    ends_s: float = 0.0
    answered: int = 0
    first_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = STREAM_TOKENS if self.stream else 1
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "stream": self.stream,
            "max_tokens": self.tokens,
        }
        content = json.dumps(body).encode()
        authorization = f"authorization: Bearer {self.key}\r\n" if self.key else ""
        self.request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n{authorization}"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        ).encode() + content

    async def run(self, seconds: float) -> None:
        """Load the server; raises SystemExit if any answer was not what it should be."""
        loop = asyncio.get_running_loop()
        self.ends_s = time.perf_counter() + seconds
        made = [await loop.create_connection(lambda: Caller(self), "127.0.0.1", self.port) for _ in range(self.callers)]
        await asyncio.gather(*(caller.done for _, caller in made))
        if self.failures:
            raise SystemExit(f"{len(self.failures)} requests failed, the first: {self.failures[0]}")


class Caller(asyncio.Protocol):
    """One connection. Any answer but a whole one of the right length is a failure."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._got = bytearray()
        self._sent_s = 0.0
        self._began = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._got.clear()
        self._began = False
        self._sent_s = time.perf_counter()
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not self._began and _FIRST in self._got.replace(b'"content":""', b""):
            self._began = True
            self._load.first_s.append(time.perf_counter() - self._sent_s)
        if not self._is_whole(data):
            return
        words = self._got.count(b" word")
        if not self._got.startswith(b"HTTP/1.1 200") or words != self._load.tokens - 1 or b" end" not in self._got:
            self._fail(self._got[:300].decode("latin-1"))
            return
        self._load.answered += 1
        if time.perf_counter() < self._load.ends_s:
            self._ask()
        else:
            self._got.clear()
            self._transport.close()

    def _is_whole(self, data: bytes) -> bool:
        if data.endswith(b"0\r\n\r\n"):
            return self._got.endswith(b"\r\n0\r\n\r\n")
        if self._load.stream and self._got.startswith(b"HTTP/1.1 200"):
            return False
        head, found, body = bytes(self._got).partition(b"\r\n\r\n")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
        return bool(found) and length is not None and len(body) >= int(length.partition(b":")[2])

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None or self._got:
            self._load.failures.append(f"the connection broke: {error or bytes(self._got[:300])!r}")
        if not self.done.done():
            self.done.set_result(None)

    def _fail(self, why: str) -> None:
        self._load.failures.append(why)
        self._got.clear()
        self._transport.close()
