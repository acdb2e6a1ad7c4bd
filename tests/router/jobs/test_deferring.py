"""Deferred requests are answered by turns: what one caller leaves here keeps no other's waiting."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection

from router.base.clock import MonotonicClock
from router.jobs import deferred, events
from router.jobs.call import Call, Told
from router.jobs.database import Database
from router.jobs.deferring import Deferring
from router.jobs.pages import Page
from router.jobs.records import Deferred, DeferredStatus
from tests.support.waiting import until, until_answered

NUMBERS = itertools.count()


@contextlib.asynccontextmanager
async def database(folder: Path) -> AsyncIterator[Database]:
    opened = Database(f"sqlite:///{folder / 'jobs.sqlite'}", lambda: "here", lambda: None)
    opened.open()
    try:
        yield opened
    finally:
        opened.close()


def keep(connection: Connection, owner: str, headers: str = "[]") -> str:
    name = f"deferred_{next(NUMBERS):08}"
    kept = Deferred(name, owner, None, DeferredStatus.QUEUED, "/v1/x", name, headers, b"{}", "{}", 0, 2**31)
    deferred.add(connection, kept, 10_000)
    return name


async def test_what_cannot_be_served_keeps_nobody_else_s_waiting(tmp_path: Path) -> None:
    asked: list[str] = []

    async def ask(call: Call) -> Told:
        asked.append(call.owner)
        return Told(503, b"{}", retry_after_s=3600.0) if call.owner == "mallory" else Told(200, b"{}")

    async with database(tmp_path) as opened:
        for _ in range(300):
            opened.run_here(lambda c: keep(c, "mallory"))
        name = opened.run_here(lambda c: keep(c, "guest"))

        async def answered() -> bool:
            kept = await opened.run(lambda c: deferred.get(c, "guest", name))
            return kept.status is DeferredStatus.COMPLETED

        async with Deferring(opened, MonotonicClock(), lambda: 0.0, ask, webhook=""):
            await until_answered(answered)
    assert asked.index("guest") < 8, "before most of those who came before it"


class Still(MonotonicClock):
    """No pause ever ends."""

    def now_s(self) -> float:
        return 0.0


@pytest.mark.parametrize(("status", "retry_after_s"), [(401, 60.0), (429, 3600.0), (500, None), (503, None)])
async def test_what_says_nothing_of_others_pauses_no_other(
    tmp_path: Path, status: int, retry_after_s: float | None
) -> None:
    """Its key is gone, its budget is spent, or it is the one request that everything fails on."""
    asked: list[str] = []

    async def ask(call: Call) -> Told:
        asked.append(call.owner)
        return Told(status, b"{}", retry_after_s) if call.owner == "mallory" else Told(200, b"{}")

    async with database(tmp_path) as opened:
        for _ in range(20):
            opened.run_here(lambda c: keep(c, "mallory"))
            opened.run_here(lambda c: keep(c, "guest"))
        async with Deferring(opened, Still(), lambda: 0.0, ask, webhook=""):
            await until(lambda: asked.count("guest") == 20)
        assert asked.count("mallory") <= 4, "those that began at once"


async def test_what_hangs_of_one_caller_leaves_a_place_to_the_others(tmp_path: Path) -> None:
    over = asyncio.Event()
    asked: list[str] = []

    async def ask(call: Call) -> Told:
        asked.append(call.owner)
        if call.owner == "mallory":
            await over.wait()
        return Told(200, b"{}")

    async with database(tmp_path) as opened:
        for _ in range(10):
            opened.run_here(lambda c: keep(c, "mallory"))
        async with Deferring(opened, MonotonicClock(), lambda: 0.0, ask, webhook="") as deferring:
            await until(lambda: asked)
            for _ in range(5):
                opened.run_here(lambda c: keep(c, "guest"))
            deferring.look()
            await until(lambda: deferring.answered == 5)
            assert asked.count("mallory") == 3
            over.set()
            await until(lambda: deferring.answered == 15)


async def test_a_tier_that_tells_no_callers_apart_answers_four_at_a_time(tmp_path: Path) -> None:
    over = asyncio.Event()
    asked: list[str] = []

    async def ask(call: Call) -> Told:
        asked.append(call.owner)
        await over.wait()
        return Told(200, b"{}")

    async with database(tmp_path) as opened:
        for _ in range(10):
            opened.run_here(lambda c: keep(c, ""))
        async with Deferring(opened, MonotonicClock(), lambda: 0.0, ask, webhook="") as deferring:
            await until(lambda: len(asked) == 4)
            over.set()
            await until(lambda: deferring.answered == 10)


async def test_each_one_that_was_answered_counts(tmp_path: Path) -> None:
    async def ask(call: Call) -> Told:
        return Told(200, b"{}")

    async with database(tmp_path) as opened:
        for _ in range(40):
            opened.run_here(lambda c: keep(c, "guest"))
        async with Deferring(opened, MonotonicClock(), lambda: 0.0, ask, webhook="") as deferring:
            await until_answered(lambda: opened.run(lambda c: deferred.count(c) == 0))
            await until(lambda: not deferring._tasks)
            assert deferring.answered == 40


async def test_where_there_is_no_capacity_one_request_alone_tries_again(tmp_path: Path) -> None:
    asked: list[str] = []

    async def ask(call: Call) -> Told:
        asked.append(call.owner)
        return Told(503, b"{}", retry_after_s=1.0)

    async with database(tmp_path) as opened:
        for owner in "abcdefgh":
            opened.run_here(lambda c, owner=owner: keep(c, owner))
        async with Deferring(opened, Still(), lambda: 0.0, ask, webhook="") as deferring:
            await until(lambda: asked)
            for _ in range(5):
                deferring.look()
                await asyncio.sleep(0.02)
    assert len(asked) <= 4


async def test_what_waits_for_an_hour_is_not_looked_for_all_the_time(tmp_path: Path) -> None:
    clock = Moved()

    async def ask(call: Call) -> Told:
        return Told(429, b"{}", retry_after_s=3600.0)

    async with database(tmp_path) as opened:
        opened.run_here(lambda c: keep(c, "mallory"))
        async with Deferring(opened, clock, lambda: 0.0, ask, webhook="") as deferring:
            await until(lambda: deferring._due_s)
            assert deferring._wait_s() == 0.5
            clock.at_s = 1.0  # the pause is over, and nothing is due
            assert deferring._wait_s() == 2.0


class Moved(MonotonicClock):
    at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


@given(owners=st.lists(st.sampled_from("abc"), max_size=12), each=st.integers(1, 4))
def test_callers_take_turns(tmp_path_factory, owners: list[str], each: int) -> None:
    opened = Database(f"sqlite:///{tmp_path_factory.mktemp('jobs') / 'jobs.sqlite'}", lambda: "here", lambda: None)
    opened.open()
    names = [opened.run_here(lambda c, owner=owner: keep(c, owner)) for owner in owners]
    found = opened.run_here(lambda c: deferred.queued(c, each))
    opened.close()
    turns: dict[str, int] = {}
    expected = []
    for name, owner in zip(names, owners, strict=True):
        turns[owner] = turns.get(owner, 0) + 1
        expected.append((turns[owner], name, owner))
    assert [(one.id, one.owner) for one in found] == [
        (name, owner) for turn, name, owner in sorted(expected) if turn <= each
    ]


async def test_a_page_holds_no_more_than_it_may(tmp_path: Path) -> None:
    """Requests and answers may be megabytes each, and a hundred of them are listed at once."""
    async with database(tmp_path) as opened:
        names = [opened.run_here(lambda c: keep(c, "guest")) for _ in range(7)]
        answer = b'"' + b"a" * 3_000_000 + b'"'
        for name in names[:5]:
            opened.run_here(lambda c, n=name: deferred.end(c, n, DeferredStatus.COMPLETED, 1, (200, answer)))
        found: list[str] = []
        pages = 0
        more = True
        while more:
            page = Page(100, found[-1] if found else None, newest_first=False)
            listed, more = opened.run_here(lambda c, page=page: deferred.list_page(c, "guest", page))
            found += [one.id for one in listed]
            pages += 1
            assert not any(one.body for one in listed)
            assert sum(len(one.answer or b"") for one in listed) < 8_000_000
    assert found == names
    assert pages == 3


@pytest.mark.parametrize(
    ("locality", "webhook", "leaves"),
    [
        ("Local-Only", "https://hooks.example/x", False),
        ("local-only", "http://127.0.0.1:9/x", True),
        ("any", "https://hooks.example/x", True),
        ("", "https://hooks.example/x", True),
    ],
)
async def test_the_answer_of_a_local_only_request_is_told_on_this_machine_alone(
    tmp_path: Path, locality: str, webhook: str, leaves: bool
) -> None:
    """The webhook of a device may be anywhere; the caller was promised that the answer is not."""

    async def ask(call: Call) -> Told:
        return Told(200, b'{"secret": 1}')

    async with database(tmp_path) as opened:
        headers = json.dumps([["x-overspill-locality", locality]] if locality else [])
        name = opened.run_here(lambda c: keep(c, "guest", headers))
        async with Deferring(opened, MonotonicClock(), lambda: 0.0, ask, webhook=webhook):
            found: list = []

            async def told() -> bool:
                found[:] = await opened.run(lambda c: events.due(c, 1.0, 300.0, 10))
                return bool(found)

            await until_answered(told)
        event = json.loads(found[0].body)
        assert (event["type"], event["data"]["id"], event["data"]["status"]) == (
            "deferred.completed",
            name,
            "completed",
        )
        assert (event["data"]["response"] is not None) == leaves
        kept = await opened.run(lambda c: deferred.get(c, "guest", name))
    assert kept.answer == b'{"secret": 1}', "it is fetched here"
