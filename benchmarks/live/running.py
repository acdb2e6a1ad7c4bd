"""Runs a benchmark so that nothing outlives it: SIGTERM ends it as Ctrl-C does, and it has a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Run `work` to its end; its `async with` blocks are left whatever ends it.

    Raises:
        SystemExit: it was told to end, or took longer than `limit_s`.
    """

    async def bounded() -> T:
        task = asyncio.ensure_future(work)
        with contextlib.suppress(NotImplementedError):  # Windows has no such handlers
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await asyncio.wait_for(task, limit_s)

    try:
        return asyncio.run(bounded())
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("ended before it was done; nothing was left behind", file=sys.stderr)
        raise SystemExit(130) from None
    except asyncio.TimeoutError:
        print(f"not done after {limit_s:.0f} s", file=sys.stderr)
        raise SystemExit(124) from None
