"""When a server looks for garbage: in what it imported never, in all that it has made only while few wait.

Requests are freed as they end, by reference counts, so a full collection finds little. But it stands still while it
walks through everything that lives: 0.4 s beside 10,000 requests that wait.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

from router.base.host import trim_heap

_EVERY_S = 60.0
_AT_LATEST_S = 900.0
_FEW = 100  # waiting requests, beside which a full collection takes some milliseconds
_NEVER = 1_000_000_000
_YOUNG = 5_000  # new objects: most of what is in flight is freed by then, and never walked through
_MIDDLE = 2  # such collections: at most 15,000 objects, 3 ms; with 60,000 it was 15 ms while 10,000 requests came in


def spare_what_was_imported() -> None:
    """Let garbage collections look at what is made from now on only, and less often than by default.

    Before a server begins: a full collection stands still for tens of milliseconds to walk through its modules and
    their code, none of which ever goes. And the interpreter's own pace, every 700 objects, is several times a request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE)


async def collect_while_few_wait(
    waiting: Callable[[], int], every_s: float = _EVERY_S, at_latest_s: float = _AT_LATEST_S
) -> None:
    """Run the full collections in place of the interpreter, which does not know when; until it is cancelled.

    After each, the C library gives back what it holds free.

    Args:
        waiting: how many requests wait.
        every_s: between two looks at it.
        at_latest_s: after so long without a full collection there is one however many wait.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(every_s)
            if waiting() <= _FEW or time.monotonic() - last_s >= at_latest_s:
                gc.collect()
                # What crowds of connections have left: each handshake of TLS takes a third of a MB of the C library's
                # heap, which keeps it scattered. 12 ms for 120 MB, and nothing where there is nothing to give back.
                trim_heap()
                last_s = time.monotonic()
    finally:
        gc.set_threshold(young, middle, old)
