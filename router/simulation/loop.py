"""An asyncio event loop whose time is virtual: it jumps to the next timer once nothing is left to run.

Whatever is built on tasks, futures and timers runs on it as it is, in the same order every time: nothing depends on the
machine's clock. There are no sockets, threads or processes on it.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from heapq import heappop, heappush
from typing import Any, TypeVar

import structlog

from router.base.errors import OverspillError

log = structlog.get_logger("router")

T = TypeVar("T")


class NothingLeft(OverspillError):
    """Everything waits, and nothing will ever happen again."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs one coroutine, and all that it starts, to its end.

    Attributes:
        now_s: the virtual time, in seconds since the loop was made.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ready: list[VirtualTimer] = []
        self._times: list[float] = []  # a heap
        self._timers: dict[float, list[VirtualTimer]] = {}  # by time, in the order in which they were set

    def time(self) -> float:
        return self.now_s

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run a coroutine to its end and return what it returns.

        Raises:
            NothingLeft: it waits, and no timer is set.
        """
        task: asyncio.Task[T] = self.create_task(future)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        asyncio._set_running_loop(self)  # noqa: SLF001 (public for implementers of event loops)
        try:
            self._run(task)
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001
            sys.set_asyncgen_hooks(*hooks)
        return task.result()

    def _run(self, task: asyncio.Task[Any]) -> None:
        times, timers = self._times, self._timers
        while self._ready or not task.done():
            turn = self._ready
            if turn:
                self._ready = []
            elif not times:
                raise NothingLeft("the simulation hangs: every task waits, and no timer is set")
            else:
                first_s = heappop(times)
                turn, now_s = timers.pop(first_s), max(self.now_s, first_s)
                self.now_s = now_s
                while times and times[0] <= now_s:
                    turn.extend(timers.pop(heappop(times)))
            for handle in turn:
                callback = handle.callback
                if callback is not None:
                    args, handle.callback, handle.args = handle.args, None, ()
                    if handle.context is None:
                        callback(*args)
                    else:
                        handle.context.run(callback, *args)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> VirtualTimer:
        handle = VirtualTimer(callback, args, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> VirtualTimer:
        handle = VirtualTimer(callback, args, context)
        together = self._timers.get(when)
        if together is None:
            self._timers[when] = [handle]
            heappush(self._times, when)
        else:
            together.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> VirtualTimer:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, **extra: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, **extra)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A task or callback of the code under simulation failed unseen: tell of it, as a live tier would."""
        log.error(str(context.get("message")), exc_info=context.get("exception"))

    def _close_generator(self, generator: AsyncGenerator[Any, None]) -> None:
        closing: Coroutine[Any, Any, None] = generator.aclose()
        self.call_soon(self.create_task, closing)


def run_virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Return what `main` returns, run on a new loop from its time 0 on.

    Raises:
        NothingLeft: it waits for what can never happen.
    """
    loop = VirtualLoop()  # type: ignore[abstract]  # no sockets, signals, threads or processes
    return loop.run_until_complete(main(loop))


class LoopClock:
    """`router.base.clock.Clock` over the time of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now_s = loop.time
        self.call_at = loop.call_at

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class VirtualTimer:
    """A callback that waits for its turn or its time, unless it is cancelled.

    Attributes:
        context: to run it in; None for the loop's own: only tasks have one of theirs.
    """

    __slots__ = ("args", "callback", "context")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None
