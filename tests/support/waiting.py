"""Waiting for what has no event: a condition is looked at until it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0  # a busy machine is no failure; what never comes costs a failing test this long
LOOK_EVERY_S = 0.005


async def until(
    condition: Callable[[], T | None], timeout_s: float = PATIENCE_S, *, every_s: float = LOOK_EVERY_S
) -> T:
    """Return the first truthy value of `condition`; fail when none comes in time."""

    async def look() -> T | None:
        return condition()

    return await until_answered(look, timeout_s, every_s=every_s)


async def until_answered(
    ask: Callable[[], Awaitable[T | None]], timeout_s: float = PATIENCE_S, *, every_s: float = LOOK_EVERY_S
) -> T:
    """As `until`, where looking is to wait for an answer."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = await ask()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s in vain"
        await asyncio.sleep(every_s)


def until_true(condition: Callable[[], T | None], timeout_s: float = PATIENCE_S, *, every_s: float = LOOK_EVERY_S) -> T:
    """As `until`, where no event loop runs."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s in vain"
        time.sleep(every_s)
