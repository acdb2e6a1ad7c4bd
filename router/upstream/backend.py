"""One `[[backends]]` entry: the servers that it stands for, found and watched, as one source of replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import final
from urllib.parse import urlsplit

import structlog

from router.base.clock import Clock
from router.base.errors import OverspillError
from router.base.timers import end
from router.upstream.discovery import DiscoveryError, find_servers
from router.upstream.servers.polled import PolledServer
from router.upstream.settings import BackendSettings
from router.values.replica import Replica

log = structlog.get_logger("router.gateway")

_LEAVE_S = 600.0  # a server that is not listed any more may end its answers for so long
_LOOK_S = 0.2

MakeServer = Callable[[str, str], PolledServer]
"""From a base URL and the name of its replicas to a server."""


@final
class Backend:
    """A `ReplicaSource` of servers that serve the same, at addresses that may change.

    A server that is not listed any more gets no new request, and is left when its last answer is complete.

    Args:
        make: makes a server of this entry's kind.
        on_change: called when `replicas` has changed; servers call it themselves when theirs have.
    """

    def __init__(
        self, settings: BackendSettings, make: MakeServer, clock: Clock, on_change: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._make = make
        self._clock = clock
        self._on_change = on_change
        self._servers: dict[str, PolledServer] = {}
        self._leaving: dict[asyncio.Task[None], PolledServer] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._fault = "not looked for yet"
        self._told_fault = ""

    @property
    def who(self) -> str:
        return f"backend {self._settings.name}"

    @property
    def local(self) -> bool:
        return self._settings.local

    @property
    def replicas(self) -> list[Replica]:
        return [replica for server in self._servers.values() for replica in server.replicas]

    @property
    def where(self) -> str:
        return ", ".join(server.endpoint for server in self._servers.values())

    @property
    def unreached(self) -> str:
        """Say why nothing is known of what its servers serve; empty once one of them has told."""
        if not self._servers:
            return self._fault
        reasons: dict[str, None] = {}
        for server in self._servers.values():
            why = server.unreached
            if not why:
                return ""
            reasons[why] = None
        return "; ".join(reasons)

    async def __aenter__(self) -> Backend:
        await self._look()
        if not self._settings.urls:
            self._watcher = asyncio.create_task(self._watch(), name=self.who)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leaving = dict(self._leaving)
        await end(*filter(None, [self._watcher]), *leaving)
        await asyncio.gather(
            *(server.__aexit__(kind, error, trace) for server in (*self._servers.values(), *leaving.values()))
        )

    def wanted(self) -> None:
        for server in self._servers.values():
            server.wanted()

    def lose(self, why: str) -> None:
        """End every stream from its servers, those that are being left included."""
        for server in (*self._servers.values(), *self._leaving.values()):
            server.lose(why)

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(self._settings.refresh_s)
            try:
                await self._look()
            except Exception:  # the task boundary: one bad look must not end looking
                log.exception("backend not looked for", backend=self._settings.name)

    async def _look(self) -> None:
        """Bring the servers in line with where they are said to be; where nothing can be said, they stay."""
        try:
            urls = await find_servers(self._settings)
        except DiscoveryError as error:
            self._fault = str(error)
            if self._fault != self._told_fault:
                self._told_fault = self._fault
                log.warning("backend not found", backend=self._settings.name, why=self._fault)
            return
        self._fault = self._told_fault = "" if urls else "it lists no server"
        for url in urls:
            if url not in self._servers:
                await self._join(url)
        gone = [url for url in self._servers if url not in urls]
        for url in gone:
            self._leave(self._servers.pop(url))
        if gone:
            self._on_change()

    async def _join(self, url: str) -> None:
        try:
            server = self._make(url, self._name(url))
            self._servers[url] = server
            await server.__aenter__()
        except OverspillError as error:
            self._servers.pop(url, None)
            log.warning("backend server unusable", backend=self._settings.name, url=url, why=error.message)
            return
        log.info("backend server joins", backend=self._settings.name, url=url)

    def _name(self, url: str) -> str:
        """Name the replicas of a server: by the entry, and by its address where the entry may stand for several."""
        one = len(self._settings.urls) == 1
        return self._settings.name if one else f"{self._settings.name}@{urlsplit(url).netloc}"

    def _leave(self, server: PolledServer) -> None:
        log.info("backend server leaves", backend=self._settings.name, url=server.endpoint)
        task = asyncio.create_task(self._left(server), name=f"leave {server.endpoint}")
        self._leaving[task] = server
        task.add_done_callback(lambda done: self._leaving.pop(done, None))

    async def _left(self, server: PolledServer) -> None:
        ends_at_s = self._clock.now_s() + _LEAVE_S
        while any(replica.busy for replica in server.replicas) and self._clock.now_s() < ends_at_s:
            await self._clock.sleep(_LOOK_S)
        await server.__aexit__(None, None, None)
