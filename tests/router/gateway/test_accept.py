"""Accepting connections: one that was let in as the listener ends is closed, whether or not its task had begun."""

from __future__ import annotations

import asyncio
import socket

from router.gateway.accept import PlainAcceptor
from tests.support.waiting import until


async def test_a_connection_whose_task_never_began_is_closed() -> None:
    served: list[asyncio.Protocol] = []

    def protocol() -> asyncio.Protocol:
        served.append(asyncio.Protocol())
        return served[-1]

    acceptor = PlainAcceptor(protocol)
    ours, theirs = socket.socketpair()
    with ours:
        acceptor._begin(theirs, None)
        (task,) = acceptor._connecting
        task.cancel()
        await until(task.done)
        await until(lambda: theirs.fileno() < 0)
        assert ours.recv(1) == b""
    assert (served, acceptor._connecting) == ([], set())
