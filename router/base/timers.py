"""Ending tasks and blocks for certain.

`asyncio.wait_for` of Python 3.10 and 3.11 swallows a cancellation that arrives in the same turn as the result it waits
for. A task that uses it, anywhere below, may therefore outlive one `cancel()`; `end` and `within` do not rely on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

_CANCEL_AGAIN_S = 1.0
_LAST_TURNS = 10
"""Turns of the loop after a time limit: what had come while this process stood still has come in time."""


class Interrupted(Exception):
    """The block was ended by its `Interruptible`. Caught where that stands."""


class Interruptible:
    """A block of the current task that others can end: `with Interruptible() as block`, and `block.interrupt()`.

    Inside it looks like a cancellation; at its end it raises `Interrupted` instead. Work that swallows a cancellation
    gets another one each second. A cancellation that somebody else asked for goes on from here (from Python 3.11 on
    also when both came in one turn; before, the block's own task learns of it as an interruption).
    """

    __slots__ = ("_again", "_cancellations", "_cancelling", "_loop", "_task", "interrupted")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        self._again: asyncio.TimerHandle | None = None
        self._cancellations = 0
        self._cancelling = 0
        self.interrupted = False

    def __enter__(self) -> Interruptible:
        task = asyncio.current_task(self._loop)
        self._task = task
        if task is not None and _COUNTS_CANCELLATIONS:
            self._cancelling = task.cancelling()  # type: ignore[attr-defined,unused-ignore]  # from Python 3.11 on
        return self

    def interrupt(self, *_: object) -> None:
        """End the block; nothing once it has ended."""
        if self._task is None:
            return
        self.interrupted = True
        self._cancellations += 1
        self._task.cancel()
        self._again = self._loop.call_later(_CANCEL_AGAIN_S, self.interrupt)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self.interrupted or task is None:
            return
        if self._again is not None:
            self._again.cancel()
        others = False
        if _COUNTS_CANCELLATIONS:
            for _ in range(self._cancellations):
                left: int = task.uncancel()  # type: ignore[attr-defined,unused-ignore]
            others = left > self._cancelling
        if kind is not None and issubclass(kind, asyncio.CancelledError) and not others:
            raise Interrupted from None


_COUNTS_CANCELLATIONS = hasattr(asyncio.Task, "uncancel")


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, or futures, and wait until they are over; their exceptions stay with them."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)


async def within(limit_s: float | None, work: Awaitable[T], news: asyncio.Future[Any] | None = None) -> T:
    """Return what `work` returns, a future's result too; on every other way out it is cancelled and over.

    Args:
        limit_s: None for no limit but `news`.
        news: a future that ends the wait when it is done.

    Raises:
        asyncio.TimeoutError: `limit_s` passed, or `news` came first.
    """
    task = asyncio.ensure_future(work)
    waited: set[asyncio.Future[Any]] = {task} if news is None else {task, news}
    try:
        await asyncio.wait(waited, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(_LAST_TURNS):
            if task.done() or (news is not None and news.done()):
                break
            await asyncio.sleep(0)
        if task.done():
            return task.result()
        raise asyncio.TimeoutError
    finally:
        if not task.done():
            await end(task)
