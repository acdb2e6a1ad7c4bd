"""The router's end of one request to a simulated device: what has come back of it, until somebody takes it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from router.base.errors import ReplicaBroken, ReplicaUnreachable
from router.simulation.loop import VirtualLoop


class Call:
    """The router's end of one request: counts of new tokens, one a chunk, as they arrive.

    Attributes:
        past: takes a count past the reader while that waits; returns whether it did. None: all is the reader's.
    """

    __slots__ = ("_fault", "_new", "_reader", "loop", "most_tokens", "out", "past")

    def __init__(self, most_tokens: int, loop: VirtualLoop) -> None:
        self.most_tokens = most_tokens
        self.loop = loop
        self.out = 0
        self.past: Callable[[int], bool] | None = None
        self._new: deque[int] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._fault: str | None = None

    def take(self, new: int) -> None:
        reader, past = self._reader, self.past
        if past is not None and reader is not None and not reader.done() and past(new):
            return
        self._new.append(new)
        self._wake()

    def fail(self, why: str) -> None:
        """End it after what has arrived."""
        self._fault = why
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> int:
        """Return the count of tokens of the next chunk.

        Raises:
            ReplicaUnreachable, ReplicaBroken: there is none any more.
        """
        if not self._new and self._fault is None:
            self._reader = self.loop.create_future()
            await self._reader
        if self._new:
            return self._new.popleft()
        kind = ReplicaBroken if self.out else ReplicaUnreachable
        raise kind(self._fault or "")
