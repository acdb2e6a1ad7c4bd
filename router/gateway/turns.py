"""How many requests begin in one turn of the event loop, so that a crowd at the door holds nobody else up for long.

To begin a request takes a millisecond or two. Of thousands that arrive together as many would begin in one turn as have
been read, and whoever asks for health, or reads an answer, would wait for all of them. Who they are has been looked at
by then: strangers are sent away at once, and no connection of a caller who waits passes for a stranger's.
"""

from __future__ import annotations

import asyncio
from collections import deque

BEGUN_A_TURN = 8
"""More of them make a turn longer. Fewer would make more turns of the same work, and new requests wait for answers."""


class Turns:
    """The requests for models that wait to begin, of a whole tier: first come, first begun."""

    __slots__ = ("_begun", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._begun = 0

    async def mine(self) -> float:
        """Wait for the caller's turn to begin, which is now but where many begin; returns the seconds waited."""
        loop = asyncio.get_running_loop()
        if self._begun == 0:
            loop.call_soon(self._next)
        if self._begun < BEGUN_A_TURN:
            self._begun += 1
            return 0.0
        came_s = loop.time()
        waits: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waits)
        await waits
        return loop.time() - came_s

    def _next(self) -> None:
        """A new turn, in which those who have waited are the first."""
        self._begun = 0
        while self._waiting and self._begun < BEGUN_A_TURN:
            waits = self._waiting.popleft()
            if not waits.done():  # its request was ended, it waits no more
                self._begun += 1
                waits.set_result(None)
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)
