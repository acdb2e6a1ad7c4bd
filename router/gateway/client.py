"""The client of a request: whether it is still there, and whether it reads what it is sent.

Our own connections call when their client has gone; behind another server a task waits for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from starlette.types import Message, Receive, Send

from router.base.timers import Interruptible, end

CONNECTION = "overspill.connection"
"""Of a scope of `router.gateway.listener`: the `Connection` that the request came by, as it is for this request."""


class Connection(Protocol):
    """A connection that tells of its end."""

    @property
    def full(self) -> bool:
        """Whether what was sent waits for the client to read it."""
        ...

    def write(self, piece: bytes) -> None:
        """Write a piece of the body of a reply that has begun, and is not full; the body goes on."""
        ...

    def take_body(self) -> bytes | None:
        """Return the body of the request, if all of it is there and nobody has taken it."""
        ...

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` when the client has gone; at once, if it has."""
        ...

    def unwatch(self, gone: Callable[[], None]) -> None:
        """Do not call it any more."""
        ...


class Client:
    """Ends its block when the client is gone, or reads nothing for too long; called, it is the server's `send`.

    Use as `async with`, which raises `Interrupted` then.

    Attributes:
        sink: takes pieces of the body at once, None where the server has nothing that does.
        why: it was ended, in a few words.
    """

    def __init__(self, connection: Connection | None, receive: Receive, send: Send, stall_s: float) -> None:
        self._connection = self.sink = connection
        self._watch: asyncio.Task[None] | None = None
        self._receive = receive
        self._send = send
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._block = Interruptible()
        self._sent_by_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._whole = False
        self.why = ""

    async def __aenter__(self) -> None:
        self._block.__enter__()
        if self._connection is None:
            self._watch = asyncio.create_task(self._wait_for_disconnect(), name="gateway disconnect")
        else:
            self._connection.watch(self._gone)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.unwatch(self._gone)
        try:
            self._block.__exit__(kind, error, trace)
        finally:
            if self._watch is not None:
                await end(self._watch)

    async def __call__(self, message: Message) -> None:
        """Send; a call that takes longer than the client may take to read ends the block."""
        if self._connection is None or self._connection.full:
            await self._send_in_time(message)
        else:  # it takes no time
            await self._send(message)
        self._whole = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def _send_in_time(self, message: Message) -> None:
        self._sent_by_s = self._loop.time() + self._stall_s
        if self._timer is None:
            self._timer = self._loop.call_later(self._stall_s, self._look)
        await self._send(message)
        self._sent_by_s = math.inf

    def _look(self) -> None:
        """One timer for all calls: it looks when the call that set it would be late, and then again."""
        now_s = self._loop.time()
        if now_s >= self._sent_by_s:
            self._end("stopped reading")
        elif self._sent_by_s < math.inf:
            self._timer = self._loop.call_later(self._sent_by_s - now_s, self._look)
        else:
            self._timer = None

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone()

    def _gone(self) -> None:
        self._end("went away")

    def _end(self, why: str) -> None:
        if self._whole:
            return  # servers say of a client with a whole reply too that it is gone
        self.why = self.why or why
        self._block.interrupt()
