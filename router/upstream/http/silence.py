"""What ends a wait for an upstream: the news that it has gone silent, or a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from router.base.timers import Interrupted, Interruptible


class LostNews:
    """The news that an upstream has gone silent: every request to it that still waits hears of it at once."""

    def __init__(self) -> None:
        self._listeners: set[Callable[[str], None]] = set()

    def tell(self, why: str) -> None:
        for listener in list(self._listeners):
            listener(why)

    def listen(self, listener: Callable[[str], None]) -> None:
        self._listeners.add(listener)

    def forget(self, listener: Callable[[str], None]) -> None:
        self._listeners.discard(listener)


class SilentError(Exception):
    """Nothing came in time. Never leaves this package."""


class Bound(Interruptible):
    """A block that the loss of the upstream, or a time limit, ends with a `SilentError`."""

    __slots__ = ("_limit_s", "_lost", "_timer", "_why")

    def __init__(self, lost: LostNews, limit_s: float | None) -> None:
        super().__init__()
        self._lost = lost
        self._limit_s = limit_s
        self._why = ""
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Bound:
        super().__enter__()
        self._lost.listen(self._stop)
        if self._limit_s is not None:
            self._timer = self._loop.call_later(self._limit_s, self._stop, f"silent for {self._limit_s:.3g} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lost.forget(self._stop)
        if self._timer is not None:
            self._timer.cancel()
        try:
            super().__exit__(kind, error, trace)
        except Interrupted:
            raise SilentError(self._why) from None

    def _stop(self, why: str) -> None:
        self._why = why
        self.interrupt()
