"""The event loop of a tier: uvloop's, whose look-ups of names wait for none but their own.

uvloop's have two threads of libuv's for all names together, and one that was given up goes on there for as long as the
system's resolver tries, 20 s and more: beside a name that no DNS server answered for, every other one waited in vain,
`localhost` too.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import Coroutine
from typing import Any, final

import uvloop

Address = tuple[Any, ...]
"""One address as `socket.getaddrinfo` tells it: family, type, protocol, canonical name, socket address."""

_Asked = tuple[Any, ...]

_KEPT_S = 5.0
_LIMIT_S = 1.5  # less than a connection may take, so that errors say what is wrong
_PATIENCE_S = 0.5  # how long a look-up may take where there are addresses of before
_STALE_S = 86_400.0
_MAX_NAMES = 1024
_GONE = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
"""How a DNS server says that a name stands for nothing. Whatever else goes wrong says nothing about the name."""


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a tier until `work` has ended."""
    uvloop.run(work, loop_factory=TierLoop)


@final
class TierLoop(uvloop.Loop):
    """Looks names up in threads of their own, one for each name."""

    def __init__(self) -> None:
        super().__init__()
        self._names = Names()

    async def getaddrinfo(
        self,
        host: Any,
        port: Any,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 - as asyncio names it
        proto: int = 0,
        flags: int = 0,
    ) -> list[Address]:
        """Return what `socket.getaddrinfo` does.

        Raises:
            OSError: the name does not resolve.
        """
        return await self._names.look_up((host, port, family, type, proto, flags))


class Names:
    """What names stand for, used on one event loop.

    Who gives up, or waited for a second and a half, leaves the look-up to whoever asks next. Addresses are kept for
    five seconds, and for a day while no DNS server tells better: servers on this side of a dead link are well.
    """

    def __init__(self) -> None:
        self._found: dict[_Asked, tuple[float, list[Address]]] = {}  # when, and what
        self._looking: dict[_Asked, asyncio.Future[list[Address] | Exception]] = {}

    async def look_up(self, asked: _Asked) -> list[Address]:
        """Return what a name stands for.

        Args:
            asked: what `socket.getaddrinfo` takes: host, port, family, type, protocol, flags.

        Raises:
            OSError: it does not resolve.
        """
        found_at_s, addresses = self._found.get(asked, (0.0, []))
        age_s = time.monotonic() - found_at_s
        if addresses and age_s < _KEPT_S:
            return addresses
        is_stale = bool(addresses) and age_s < _STALE_S
        looking = self._looking.get(asked) or self._look(asked)
        await asyncio.wait([looking], timeout=_PATIENCE_S if is_stale else _LIMIT_S)
        if not looking.done():
            if is_stale:
                return addresses
            raise socket.gaierror(socket.EAI_AGAIN, f"no DNS server has answered for its name within {_LIMIT_S:g} s")
        found = looking.result()
        if not isinstance(found, Exception):
            return found
        if isinstance(found, socket.gaierror) and found.errno in _GONE:
            self._found.pop(asked, None)
        elif is_stale:
            return addresses
        raise found

    def _look(self, asked: _Asked) -> asyncio.Future[list[Address] | Exception]:
        loop = asyncio.get_running_loop()
        try:
            threading.Thread(target=self._ask, args=(asked, loop), name=f"name {asked[0]}", daemon=True).start()
        except RuntimeError as error:  # this process may have no more
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
        self._looking[asked] = looking = loop.create_future()
        return looking

    def _ask(self, asked: _Asked, loop: asyncio.AbstractEventLoop) -> None:
        found: list[Address] | Exception
        try:
            found = list(socket.getaddrinfo(*asked))
        except UnicodeError:  # of which nobody expects that it is no OSError
            found = socket.gaierror(socket.EAI_NONAME, "it can be no name: between dots stand 1 to 63 characters")
        except Exception as error:  # noqa: BLE001 - whatever it is: who waits is told, and the next one asks anew
            found = error
        try:
            loop.call_soon_threadsafe(self._answered, asked, found)
        except RuntimeError:  # the loop has ended meanwhile
            return

    def _answered(self, asked: _Asked, found: list[Address] | Exception) -> None:
        if not isinstance(found, Exception):
            self._found.pop(asked, None)
            self._found[asked] = time.monotonic(), found
            if len(self._found) > _MAX_NAMES:
                del self._found[next(iter(self._found))]
        self._looking.pop(asked).set_result(found)
