"""How the session's tasks run: beside what ends them, and without end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from router.base import timers

log = structlog.get_logger("edge_agent.fleet")

_RESTART_S = 1.0


async def first(work: Coroutine[Any, Any, None], other: asyncio.Task[Any]) -> None:
    """Run `work` until it is done or `other` is; raises what `work` raises."""
    task = asyncio.create_task(work, name="fleet-greet")
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await timers.end(task)
    if not task.cancelled():
        task.result()


async def keep_going(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """A task's boundary: what ends it unexpectedly is logged, and it begins anew; the agent serves on meanwhile."""
    while True:
        try:
            await work()
        except Exception:  # noqa: PERF203 - once in a task's life
            log.exception("a fleet task failed and begins anew", task=name, wait_s=_RESTART_S)
            await asyncio.sleep(_RESTART_S)
        else:
            return
