"""One `[[backends]]` entry: servers join and leave, and no request is lost by it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.base.clock import MonotonicClock
from router.base.errors import ConfigError, ReplicaBroken
from router.dispatch.dispatcher import Dispatcher
from router.upstream.backend import Backend
from router.upstream.servers.foreign import Surroundings
from router.upstream.settings import BackendSettings
from router.upstream.source import SourceHooks
from router.upstream.sources import Sources, backend_sources
from router.values.answer import Answer
from router.values.chunk import FinishReason
from router.values.replica import Unreached
from router.values.settings import RouterSettings
from tests.router.upstream.servers.test_openai import ask
from tests.support.foreign_server import ForeignServer
from tests.support.waiting import until

CLOCK = MonotonicClock()


class Tier:
    """A dispatcher over what its sources find."""

    def __init__(self, *entries: BackendSettings) -> None:
        self.dispatcher = Dispatcher([], RouterSettings(), clock=CLOCK)
        hooks = SourceHooks(self._publish, self.dispatcher.probe_succeeded, self.dispatcher.probe_failed)
        sources = backend_sources(entries, Surroundings(CLOCK, hooks, lambda _: None), environ={})
        self.backends = [source for source in sources if isinstance(source, Backend)]
        self.sources = Sources(sources)

    def _publish(self) -> None:
        self.dispatcher.set_replicas(list(self.sources.replicas))

    @property
    def ids(self) -> list[str]:
        return sorted(r.info.replica_id for r in self.sources.replicas if r.snapshot().available)

    async def text(self, model: str = "m") -> str:
        return await self.rest(await self.dispatcher.start(ask(model=model)))

    async def rest(self, running: Answer) -> str:
        async with contextlib.aclosing(running.chunks) as chunks:
            told = [chunk async for chunk in chunks]
        assert told[-1].finish_reason is FinishReason.STOP
        return "".join(chunk.text for chunk in told)


@contextlib.asynccontextmanager
async def tier(*entries: BackendSettings) -> AsyncIterator[Tier]:
    made = Tier(*entries)
    async with made.dispatcher, made.sources:
        yield made


def entry(name: str = "b", **changes: Any) -> BackendSettings:
    return BackendSettings(**{"name": name, "refresh_s": 0.02, "poll_interval_s": 0.02, "warm_up": False, **changes})


@contextlib.asynccontextmanager
async def servers(number: int) -> AsyncIterator[list[ForeignServer]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ForeignServer()) for _ in range(number)]


def address(server: ForeignServer) -> str:
    return server.url.removeprefix("http://")


async def test_ids_never_collide_whatever_is_called_what() -> None:
    async with servers(3) as (a, b, c), tier(entry("x", urls=(a.url, b.url)), entry("y", urls=(c.url,))) as here:
        await until(lambda: len(here.ids) == 3)
        assert here.ids == sorted([f"x@{address(a)}/m", f"x@{address(b)}/m", "y/m"])
        assert {r.info.backend for r in here.sources.replicas} == {"x", "y"}
        assert await here.text() == "one two three"


async def test_a_file_may_change_and_no_answer_that_has_begun_is_lost(tmp_path: Path) -> None:
    listed = tmp_path / "servers"
    async with servers(2) as (first, second):
        listed.write_text(first.url)
        first.gate = asyncio.Event()
        async with tier(entry(file=str(listed))) as here:
            await until(lambda: here.ids)
            begun = asyncio.ensure_future(here.text())
            await until(lambda: first.open)
            listed.write_text(f"{second.url}\n")
            await until(lambda: here.ids == [f"b@{address(second)}/m"])
            asked = len(first.bodies)
            assert await here.text() == "one two three"
            assert len(first.bodies) == asked, "one that leaves gets nothing new"
            assert first.open, "but what it has begun goes on"
            first.gate.set()
            assert await begun == "one two three"
            await until(lambda: not here.backends[0]._leaving)
            listed.write_text(f"{first.url}\n{second.url}\n")
            await until(lambda: len(here.ids) == 2)


async def test_a_file_that_is_half_written_or_gone_ends_no_server(tmp_path: Path) -> None:
    listed = tmp_path / "servers"
    async with servers(1) as (server,):
        listed.write_text(server.url)
        async with tier(entry(file=str(listed))) as here:
            await until(lambda: here.ids)
            for content in ("http:/", None):
                listed.unlink() if content is None else listed.write_text(content)
                await until(lambda: here.backends[0]._fault)
                assert await here.text() == "one two three"
                listed.write_text(server.url)
                await until(lambda: not here.backends[0]._fault)


async def test_an_empty_file_is_waited_for_and_said(tmp_path: Path) -> None:
    listed = tmp_path / "servers"
    listed.write_text("# none yet\n")
    async with servers(1) as (server,), tier(entry(file=str(listed))) as here:
        assert here.backends[0].unreached == "it lists no server"
        assert here.sources.unreached == [Unreached("backend b", "it lists no server")]
        listed.write_text(server.url)
        await until(lambda: here.ids)
        assert here.sources.unreached == []


async def test_a_headless_service_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with servers(1) as (server,):
        found = ["127.0.0.1"]
        port = int(address(server).partition(":")[2])

        async def getaddrinfo(_self: object, host: str, _port: int, **_: Any) -> list[Any]:
            addresses = [host] if host[0].isdigit() else found
            return [(2, 1, 6, "", (where, port)) for where in addresses]

        monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", getaddrinfo)
        async with tier(entry(dns=f"http://vllm.svc:{port}")) as here:
            await until(lambda: here.ids == [f"b@127.0.0.1:{port}/m"])
            found.append("127.0.0.2")
            await until(lambda: len(here.backends[0]._servers) == 2)
            found.remove("127.0.0.2")
            await until(lambda: len(here.backends[0]._servers) == 1)
            assert await here.text() == "one two three"


async def test_a_killed_server_is_continued_by_another_one() -> None:
    async with servers(2) as (one, other), tier(entry(urls=(one.url, other.url))) as here:
        await until(lambda: len(here.ids) == 2)
        one.gate, other.gate = asyncio.Event(), asyncio.Event()
        begun = asyncio.ensure_future(here.text())
        await until(lambda: one.open + other.open)
        victim, survivor = (one, other) if one.open else (other, one)
        survivor.gate = None
        survivor.words = [" three", " four"]
        for connection in list(victim._runner.server.connections):
            connection.transport.abort()
        assert await begun == "one two three"
        assert survivor.bodies[-1]["messages"][-1] == {"role": "assistant", "content": "one two"}


async def test_losing_all_ends_every_stream() -> None:
    async with servers(1) as (server,), tier(entry(urls=(server.url,))) as here:
        await until(lambda: here.ids)
        server.gate = asyncio.Event()
        running = await here.dispatcher.start(ask(model="m"))  # with its first text, however busy the machine is
        here.sources.lose("the tier ends")
        with pytest.raises(ReplicaBroken, match="nobody can finish it"):
            await here.rest(running)


async def test_a_key_is_read_from_the_environment_and_a_missing_one_is_an_error() -> None:
    keyed = entry(urls=("http://a:1",), api_key="env:SOME_KEY")
    with pytest.raises(ConfigError, match=r"backends\.b\.api_key.*SOME_KEY"):
        backend_sources([keyed], Surroundings(CLOCK, SourceHooks(), lambda _: None), environ={})
    assert backend_sources(
        [keyed], Surroundings(CLOCK, SourceHooks(), lambda _: None), environ={"SOME_KEY": "0123456789abcdef"}
    )
