"""A thread that several callers share by turns: who has much work there keeps nobody else's waiting."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class TurnsThread:
    """Thread-safe. What was cancelled before its turn is left out.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # whose turn it is stands first

    def submit(self, caller: str, work: Callable[[], T]) -> Future[T]:
        """Return what becomes the result of `work`, in its caller's turn; of one caller in the order it came."""
        made: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(caller, deque()).append((made, work))
        self._thread.submit(self._next)
        return made

    def _next(self) -> None:
        with self._lock:
            caller = next(iter(self._waiting))
            line = self._waiting.pop(caller)
            made, work = line.popleft()
            if line:
                self._waiting[caller] = line
        if not made.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, who waits is told
            made.set_exception(error)
        else:
            made.set_result(result)
