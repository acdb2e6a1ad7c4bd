"""Ending tasks for certain.

`asyncio.wait_for` of Python 3.10 and 3.11 swallows a cancellation that arrives in the same turn as the result it waits
for. A task that uses it, anywhere below, may therefore outlive one `cancel()`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")

_CANCEL_AGAIN_S = 1.0


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they are over; their exceptions stay with them."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)


async def within(limit_s: float | None, work: Coroutine[Any, Any, R], news: asyncio.Future[Any] | None = None) -> R:
    """Return what `work` returns; on every other way out it is cancelled and over.

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
        if task.done():
            return task.result()
        raise asyncio.TimeoutError
    finally:
        if not task.done():
            await end(task)
