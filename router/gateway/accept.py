"""Accepting connections: many in one turn of the event loop, so that nobody waits long behind others who came before.

The event loop's own server takes one a turn. Beside long turns, whoever asks for health would wait behind hundreds who
connected before; here all of them are soon where their requests can be told apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import structlog

from router.base.shortage import is_among_last
from router.base.timers import end
from router.gateway.connection import KEPT_FILES

log = structlog.get_logger("router.gateway")

_ACCEPTED_AT_ONCE = 64
_AGAIN_S = 1.0  # after the system has refused another socket
_BACKLOG = 65_535
"""As many as the system lets wait (`net.core.somaxconn`): others try again after 1, 3 and 7 s."""

Begin = Callable[[socket.socket, object], None]


async def accept(bound: socket.socket, begin: Begin) -> None:
    """Accept on a bound socket that does not block, until cancelled, which closes it.

    Args:
        begin: called with each socket, which does not block and delays nothing, and the address of its peer.
    """
    loop = asyncio.get_running_loop()
    bound.listen(_BACKLOG)
    try:
        while True:
            failed: asyncio.Future[str] = loop.create_future()
            loop.add_reader(bound, _accept_some, bound, begin, failed)
            try:
                why = await failed
            finally:
                loop.remove_reader(bound)
            log.warning("connection not accepted", why=why)
            await asyncio.sleep(_AGAIN_S)
    finally:
        bound.close()


def _accept_some(bound: socket.socket, begin: Begin, failed: asyncio.Future[str]) -> None:
    for _ in range(_ACCEPTED_AT_ONCE):
        try:
            accepted, address = bound.accept()
        except BlockingIOError:
            return
        except ConnectionError:  # it has hung up already
            continue
        except OSError as error:  # no file left
            if not failed.done():
                failed.set_result(str(error))
            return
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin(accepted, address)
        if is_among_last(accepted, KEPT_FILES):  # whoever makes room for it is closed at the end of this turn
            return


class PlainAcceptor:
    """Accepts connections without TLS, and hands each to a protocol.

    Args:
        protocol: makes one for a connection.
    """

    def __init__(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._protocol = protocol
        self._connecting: set[asyncio.Task[None]] = set()

    async def run(self, bound: socket.socket) -> None:
        """Accept on a bound socket that does not block, until cancelled."""
        try:
            await accept(bound, self._begin)
        finally:
            await end(*self._connecting)

    def _begin(self, accepted: socket.socket, _: object) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(accepted), name="connection")
        self._connecting.add(task)
        task.add_done_callback(lambda _: self._ended(task, accepted))

    def _ended(self, task: asyncio.Task[None], accepted: socket.socket) -> None:
        """Let go of a connection that nobody serves: its task may have been ended before it began."""
        self._connecting.discard(task)
        if task.cancelled():
            accepted.close()

    async def _connect(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, accepted)
