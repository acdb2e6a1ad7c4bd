"""Work of single requests that takes long, in threads beside the event loop: callers by turns, long texts apart.

asyncio's own threads are few, and serve whoever comes first: behind a caller who had six texts of a million characters
encoded, everybody else's prompts waited for 20 s, and with them files of keys, names of servers and uploads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, final

from router.base.host import usable_cores

T = TypeVar("T")

LONG = 200_000
"""Characters, or bytes, whose work is long: some tenths of a second of a core, and more for unusual text."""


@final
class Beside:
    """Used on one event loop.

    Args:
        cores: how many threads compute short work of one caller; half of that compute long work. None: as many as
            this process may keep busy.
    """

    def __init__(self, cores: int | None = None) -> None:
        cores = usable_cores() if cores is None else cores
        self._short = _Lane(cores, "beside")
        self._long = _Lane(max(cores // 2, 1), "beside-long")

    async def run(self, caller: str, size: int, work: Callable[[], T], *, from_size: int = 0) -> T:
        """Do work in a thread, in its caller's turn, and return what it returns; whoever gives up leaves the line.

        Args:
            caller: whose it is.
            size: in characters or bytes.
            from_size: what is smaller is done at once on the event loop: a thread would cost more.
        """
        if size < from_size:
            return work()
        lane = self._long if size >= LONG else self._short
        return await lane.run(caller, work)


class _Lane:
    """Threads of which one caller gets all but one.

    Args:
        most: how many of them one caller gets.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._free = most + 1
        self._threads = ThreadPoolExecutor(self._free, thread_name_prefix=name)
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # whose turn it is stands first

    async def run(self, caller: str, work: Callable[[], T]) -> T:
        if self._may(caller) and caller not in self._waiting:
            self._take(caller)
        else:
            await self._turn(caller)
        loop = asyncio.get_running_loop()
        try:
            working = self._threads.submit(work)
        except RuntimeError:  # this process may have no more threads
            self._give_back(caller)
            raise
        working.add_done_callback(lambda done: self._ended(loop, caller, done))
        return await asyncio.wrap_future(working)

    def _may(self, caller: str) -> bool:
        return self._free > 0 and self._running[caller] < self._most

    def _take(self, caller: str) -> None:
        self._free -= 1
        self._running[caller] += 1

    async def _turn(self, caller: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came in the very turn in which its caller left
                self._give_back(caller)
            raise

    def _ended(self, loop: asyncio.AbstractEventLoop, caller: str, _: Future[T]) -> None:
        """Called in the thread, at the end of the work itself: it goes on where nobody waits for it any more."""
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(self._give_back, caller)

    def _give_back(self, caller: str) -> None:
        self._free += 1
        self._running -= Counter({caller: 1})  # keeps nobody who has none
        for next_caller in list(self._waiting):
            if self._free <= 0:
                return
            if self._may(next_caller):
                self._wake(next_caller)

    def _wake(self, caller: str) -> None:
        """Give a caller's oldest work its turn; the caller stands behind the others then."""
        line = self._waiting.pop(caller)
        while line:
            turn = line.popleft()
            if not turn.done():
                self._take(caller)
                turn.set_result(None)
                break
        if line:
            self._waiting[caller] = line
