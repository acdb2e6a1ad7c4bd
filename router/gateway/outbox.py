"""What answers have to say in one turn of the event loop, written at its end, one piece behind the other.

A write wakes whoever reads, which takes longer than to make a token of a stream, and longest where the reader's
processor sleeps. Tokens that come in one turn, as those of a batch do, wake it once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Outbox:
    """Shared by the connections of a listener."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def put(self, write: Callable[[], None]) -> None:
        """Call `write`, which raises nothing, before the loop looks for what has arrived since."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._write)
        self._waiting.append(write)

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        for write in waiting:
            write()
