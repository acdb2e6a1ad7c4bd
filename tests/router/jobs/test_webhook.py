"""The webhook: events on which its receiver hangs or fails keep no other waiting."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from router.base.clock import MonotonicClock
from router.jobs import events
from router.jobs.database import Database
from router.jobs.errors import StorageFailed
from router.jobs.webhook import Webhook
from tests.support.waiting import until, until_answered

Take = Callable[[str], Awaitable[int]]
"""From what an event tells to the status that it is answered with."""


@contextlib.asynccontextmanager
async def telling(folder: Path, take: Take) -> AsyncIterator[tuple[Webhook, Database]]:
    """A webhook whose receiver is `take`."""

    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=await take(json.loads(await request.read())["data"]["name"]))

    application = web.Application()
    application.router.add_post("/hook", handle)
    runner = web.AppRunner(application, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    database = Database(f"sqlite:///{folder / 'jobs.sqlite'}", lambda: "here", lambda: None)
    database.open()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
        async with Webhook(url, "secret", database, MonotonicClock(), lambda: 0.0) as webhook:
            yield webhook, database
    finally:
        database.close()
        await runner.cleanup()


def add(database: Database, *names: str) -> None:
    for name in names:
        database.run_here(lambda c, name=name: events.add(c, "deferred.completed", {"name": name}, 0.0))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.jobs.webhook._LOOK_S", 0.02)


async def test_events_that_a_receiver_hangs_on_keep_no_other_waiting(tmp_path: Path) -> None:
    asked: list[str] = []
    over = asyncio.Event()

    async def take(name: str) -> int:
        asked.append(name)
        if name == "hangs":
            await over.wait()
        return 204

    async with telling(tmp_path, take) as (webhook, database):
        add(database, *["hangs"] * 10, *["fine"] * 30)
        await until(lambda: webhook.told == 30)
        assert asked.count("hangs") == 10, "each is sent once until it is over"
        over.set()
        await until(lambda: webhook.told == 40)


async def test_what_failed_before_leaves_room_for_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.jobs.webhook._FIRST_RETRY_S", 0.0)
    failing = True
    over = asyncio.Event()

    async def take(name: str) -> int:
        if name == "bad" and failing:
            return 500
        if name == "bad":
            await over.wait()
        return 204

    async with telling(tmp_path, take) as (webhook, database):
        add(database, *["bad"] * 50)
        await until(lambda: webhook.fault == "HTTP 500")

        async def all_failed() -> bool:
            return not await database.run(lambda c: events.due(c, 0.0, 300.0, 1, is_new=True))

        await until_answered(all_failed)
        failing = False  # from now on they hang, each in a place of its own
        await asyncio.sleep(0.1)
        add(database, *["fine"] * 5)
        await until(lambda: webhook.told == 5)
        over.set()
        await until(lambda: webhook.told == 55)


async def test_a_receiver_that_refuses_gets_no_more_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    over = asyncio.Event()

    async def take(name: str) -> int:
        asked.append(name)
        await over.wait()
        return 503

    async with telling(tmp_path, take) as (webhook, database):
        add(database, *["bad"] * 40)
        await until(lambda: len(asked) == 16)
        monkeypatch.setattr("router.jobs.webhook._LOOK_S", 60.0)
        await asyncio.sleep(0.1)  # the last short look is over
        over.set()
        await until(lambda: not webhook._tasks)
        await asyncio.sleep(0.1)
        assert len(asked) == 16, "the others wait for the next look"


async def test_a_disk_that_fails_is_told_and_what_was_sent_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def take(name: str) -> int:
        asked.append(name)
        return 204

    def fails(*_: object) -> None:
        raise StorageFailed("the disk is full", retry_after_s=1.0)

    async with telling(tmp_path, take) as (webhook, database):
        with monkeypatch.context() as patched:
            patched.setattr("router.jobs.events.taken", fails)
            add(database, "fine")
            await until(lambda: len(asked) >= 2 and webhook.fault == "the disk is full")
            assert not webhook.told
        await until(lambda: not webhook.fault)
        assert not await database.run(lambda c: events.due(c, 0.0, 300.0, 1, is_new=True))
