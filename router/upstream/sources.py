"""Every source of replicas that a tier has beside its own, as one: made from its configuration, watched together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TypeVar, final

from router.base.config import file_of
from router.base.credentials import secret
from router.signals.link import Link
from router.upstream.backend import Backend
from router.upstream.disaggregated import Disaggregated
from router.upstream.servers.foreign import Surroundings
from router.upstream.servers.kserve import KServeServer
from router.upstream.servers.openai import OpenAIServer
from router.upstream.servers.polled import FOREIGN_IDLE_S, PolledServer, ServerOptions
from router.upstream.servers.tier import IDLE_CONNECTION_S, UpstreamTier
from router.upstream.settings import BackendSettings
from router.upstream.source import ReplicaSource
from router.values.replica import Replica, Unreached

Entry = TypeVar("Entry", bound=BackendSettings)


@final
class Sources:
    """Use as `async with`. Ids of replicas cannot collide: each begins with its backend's name."""

    def __init__(self, sources: Iterable[ReplicaSource]) -> None:
        self._sources = list(sources)
        self._stack = AsyncExitStack()

    def __bool__(self) -> bool:
        return bool(self._sources)

    @property
    def replicas(self) -> Sequence[Replica]:
        """The replicas of all sources, in the order of the configuration."""
        return [replica for source in self._sources for replica in source.replicas]

    @property
    def unreached(self) -> list[Unreached]:
        """The sources of which nothing is known yet."""
        told = ((source, source.unreached) for source in self._sources)
        return [Unreached(source.who, why, source.where, remote=not source.local) for source, why in told if why]

    async def __aenter__(self) -> Sources:
        for source in self._sources:
            await self._stack.enter_async_context(source)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def wanted(self) -> None:
        for source in self._sources:
            source.wanted()

    def lose(self, why: str) -> None:
        for source in self._sources:
            source.lose(why)


def backend_sources(
    backends: Sequence[Entry],
    surroundings: Surroundings,
    *,
    environ: Mapping[str, str] = os.environ,
    start: Callable[[Entry], ReplicaSource | None] = lambda _: None,
) -> list[ReplicaSource]:
    """Make the source of every `[[backends]]` entry; two halves of one name, prefill and decode, become one.

    Args:
        start: makes the source of an entry whose server this tier starts itself, None for any other.

    Raises:
        ConfigError: a key is not set, or a TLS file is wrong.
    """
    clock, found = surroundings.clock, list[ReplicaSource]()
    halves: dict[str, tuple[Entry, ReplicaSource]] = {}
    for entry in backends:
        source = start(entry)
        if source is None:
            source = Backend(entry, _maker(entry, surroundings, environ), clock, surroundings.hooks.on_change)
        if not entry.role:
            found.append(source)
        elif entry.name not in halves:
            halves[entry.name] = (entry, source)
        else:
            pools = {entry.role: source, halves[entry.name][0].role: halves[entry.name][1]}
            found.append(Disaggregated(pools["prefill"], pools["decode"], entry.kv_connector, clock))
    return found


def _maker(
    entry: BackendSettings, surroundings: Surroundings, environ: Mapping[str, str]
) -> Callable[[str, str], PolledServer]:
    options = ServerOptions(
        api_key=secret(entry.api_key, f"backends.{entry.name}.api_key", environ) or None,
        poll_interval_s=entry.poll_interval_s,
        ca_file=file_of(entry.ca_file),
        client_cert=file_of(entry.client_cert),
        client_key=file_of(entry.client_key),
        connect_timeout_s=entry.connect_timeout_s,
        keepalive_expiry_s=IDLE_CONNECTION_S if entry.kind == "overspill" else FOREIGN_IDLE_S,
    )
    clock, hooks = surroundings.clock, surroundings.hooks

    def make(url: str, name: str) -> PolledServer:
        if entry.kind == "overspill":
            return UpstreamTier(url, link=Link(url, clock=clock), clock=clock, options=options, hooks=hooks, name=name)
        kind = OpenAIServer if entry.kind == "openai" else KServeServer
        return kind(url, name, entry, surroundings, options)

    return make
