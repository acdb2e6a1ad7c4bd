"""Local models share the cores: they compute in turns, each step with all threads, instead of at once with half."""

from __future__ import annotations

import collections
import threading
from types import TracebackType


class Turn:
    """A lock that is granted in the order of arrival, so that a busy model cannot starve another."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._queue: collections.deque[threading.Event] = collections.deque()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._held and not self._queue:
                self._held = True
                return
            granted = threading.Event()
            self._queue.append(granted)
        granted.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._mutex:
            if self._queue:
                self._queue.popleft().set()  # the lock stays held: it passes from hand to hand
            else:
                self._held = False
