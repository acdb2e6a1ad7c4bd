"""A disk or a database that fails under a running tier: told as 503, survived, and no concern of other requests."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from sqlalchemy.exc import IntegrityError

from router.base.errors import ConfigError
from router.jobs import deferred
from router.jobs.database import Database
from router.jobs.errors import QuotaReached
from router.jobs.records import Deferred, DeferredStatus
from router.jobs.settings import JobsSettings
from tests.support.job_tier import Echo, as_file, ended, job_tier, line, lines_of, submit
from tests.support.waiting import until

LINES = [line(f"id-{number}", f"word {number}") for number in range(6)]
ASK = LINES[0]["body"]


async def test_a_database_that_another_holds_is_told_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.jobs.database._BUSY_S", 0.05)
    monkeypatch.setattr("router.jobs.committer._RETRY_S", 0.05)
    replica = Echo()
    async with job_tier(tmp_path, replica) as (tier, client):
        replica.gate.clear()
        batch = await submit(client, LINES)
        await until(lambda: replica.running == 6)
        holder = sqlite3.connect(tmp_path / "jobs.sqlite", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        replica.gate.set()
        with pytest.raises(openai.InternalServerError) as told:
            await submit(client, LINES)
        assert (told.value.status_code, told.value.code) == (503, "storage_failed")
        assert "locked" in told.value.message
        await until(lambda: "locked" in tier.jobs.runner._committer.stuck)
        assert (await client.chat.completions.create(**ASK)).choices[0].message.content == "word 0"
        holder.execute("ROLLBACK")
        holder.close()
        assert (await ended(client, batch.id)).request_counts.completed == 6


async def test_a_damaged_database_is_told(tmp_path: Path) -> None:
    async with job_tier(tmp_path) as (tier, client):
        await ended(client, (await submit(client, LINES)).id)
        await tier.jobs._database.run(lambda c: c.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
        tier.jobs._database._engine.dispose()
        path = tmp_path / "jobs.sqlite"
        path.write_bytes(b"\x07" * path.stat().st_size)
        with pytest.raises(openai.InternalServerError) as told:
            await client.batches.list()
        assert (told.value.status_code, told.value.code) == (503, "storage_failed")
        assert "not a database" in told.value.message


async def test_a_tier_starts_beside_a_damaged_database_and_uses_it_once_it_is_moved_away(tmp_path: Path) -> None:
    async with job_tier(tmp_path) as (_, client):
        kept = await client.files.create(file=("a.jsonl", b"acknowledged"), purpose="batch")
    path = tmp_path / "jobs.sqlite"
    path.write_bytes(b"\x07" * 8192)
    async with job_tier(tmp_path) as (tier, client):
        assert "not a database" in tier.jobs.status().database_fault
        assert "move it away" in tier.jobs.status().database_fault
        assert (await client.chat.completions.create(**ASK)).choices[0].message.content == "word 0"
        with pytest.raises(openai.InternalServerError, match="move it away") as told:
            await client.batches.list()
        assert (told.value.status_code, told.value.code) == (503, "storage_failed")
        assert (tmp_path / "files" / kept.id).read_bytes() == b"acknowledged"
        path.rename(tmp_path / "aside")
        assert (await client.batches.list()).data == []
        assert tier.jobs.status().database_fault == ""
        (aside,) = tmp_path.glob("files.of-a-lost-database-*")  # noqa: ASYNC240 - a folder in memory
        assert (aside / kept.id).read_bytes() == b"acknowledged"


@pytest.mark.parametrize("lost", [Path.unlink, partial(os.truncate, length=0)])
async def test_files_whose_database_was_lost_are_set_aside(tmp_path: Path, lost: Callable[[Path], None]) -> None:
    async with job_tier(tmp_path) as (_, client):
        kept = await client.files.create(file=("a.jsonl", b"acknowledged"), purpose="batch")
    lost(tmp_path / "jobs.sqlite")
    async with job_tier(tmp_path) as (tier, client):
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(kept.id)
        await tier.jobs._database.run(tier.jobs._files.sweep)
    assert _set_aside(tmp_path, kept.id) == b"acknowledged"


def _set_aside(folder: Path, name: str) -> bytes:
    (aside,) = folder.glob("files.of-a-lost-database-*")
    return (aside / name).read_bytes()


async def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    async with job_tier(folder) as (_, client):
        done = await ended(client, (await submit(client, LINES)).id)
        shutil.rmtree(folder)
        codes = []
        for ask in (
            lambda: lines_of(client, done.output_file_id),
            lambda: client.files.create(file=("a", b"x"), purpose="batch"),
        ):
            with pytest.raises(openai.InternalServerError) as told:
                await ask()
            codes.append((told.value.status_code, told.value.code))
        assert codes == [(503, "storage_failed")] * 2
        assert (await client.chat.completions.create(**ASK)).choices[0].message.content == "word 0"


async def test_a_database_that_is_gone_takes_nothing_until_it_is_back(tmp_path: Path) -> None:
    path, aside = tmp_path / "jobs.sqlite", tmp_path / "aside"
    async with job_tier(tmp_path) as (tier, client):
        kept = await client.files.create(file=("a.jsonl", b"acknowledged"), purpose="batch")
        path.rename(aside)
        for other in (lambda: None, path.touch):  # nothing there, or another file
            other()
            with pytest.raises(openai.InternalServerError, match="deleted or replaced") as told:
                await client.files.create(file=("b.jsonl", b"lost with the process"), purpose="batch")
            assert (told.value.status_code, told.value.code) == (503, "storage_failed")
            assert "deleted or replaced" in tier.jobs._database.fault
        assert (await client.chat.completions.create(**ASK)).choices[0].message.content == "word 0"
        aside.replace(path)
        assert [file.id for file in (await client.files.list()).data] == [kept.id]
        assert not tier.jobs._database.fault


async def test_lines_whose_file_is_gone_are_told_as_such(tmp_path: Path) -> None:
    replica = Echo(slots=1)
    async with job_tier(tmp_path, replica) as (_, client):
        replica.gate.clear()
        batch = await submit(client, LINES)
        await until(lambda: replica.running == 1)
        (tmp_path / "files" / batch.input_file_id).unlink()
        replica.gate.set()
        done = await ended(client, batch.id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 5)
        errors = await lines_of(client, done.error_file_id)
        assert {each["error"]["code"] for each in errors} == {"storage_failed"}


async def test_slow_uploads_of_one_caller_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.gateway.jobs.upload._MOST_OF_ONE", 2)
    stay = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        await stay.wait()

    async with job_tier(tmp_path) as (tier, client), httpx.AsyncClient(base_url=tier.url) as http:
        kind = {"content-type": "multipart/form-data; boundary=b"}
        slow = [asyncio.create_task(http.post("/v1/files", content=slowly(), headers=kind)) for _ in range(2)]
        incoming = tmp_path / "incoming"
        await until(lambda: len(list(incoming.iterdir())) == 2)
        with pytest.raises(openai.RateLimitError):
            await client.files.create(file=("a", b"x"), purpose="batch")
        stay.set()
        assert {reply.status_code for reply in await asyncio.gather(*slow)} == {400}
        assert (await client.files.create(file=("a", b"x"), purpose="batch")).bytes == 1
        assert list(incoming.iterdir()) == []


def _deferred(number: int, owner: str) -> Deferred:
    return Deferred(f"d{number}", owner, None, DeferredStatus.QUEUED, "/", "r", "[]", b"12345", "{}", 1, 2)


def test_what_one_caller_defers_leaves_room_for_others(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'jobs.sqlite'}", lambda: "here", lambda: None)
    database.open()
    try:
        for number in range(9):
            database.run_here(lambda c, n=number: deferred.add(c, _deferred(n, "a"), 10))
        with pytest.raises(QuotaReached, match="of yours"):
            database.run_here(lambda c: deferred.add(c, _deferred(9, "a"), 10))
        database.run_here(lambda c: deferred.add(c, _deferred(10, "b"), 10))
        with pytest.raises(QuotaReached, match=r"the most$"):
            database.run_here(lambda c: deferred.add(c, _deferred(11, "c"), 10))
        held = [database.run_here(lambda c, owner=owner: deferred.held_bytes(c, owner)) for owner in ("a", "b", None)]
        assert held == [45, 5, 50]
    finally:
        database.close()


def test_what_a_database_refuses_is_not_written_to_the_log(tmp_path: Path) -> None:
    """Mistakes of ours are logged with their trace, which must not hold what a caller has sent."""
    database = Database(f"sqlite:///{tmp_path / 'jobs.sqlite'}", lambda: "here", lambda: None)
    database.open()
    try:
        kept = replace(_deferred(1, "a"), headers='[["x-overspill-cache-salt","my secret"]]')
        database.run_here(lambda c: deferred.add(c, kept, 10))
        with pytest.raises(IntegrityError) as raised:
            database.run_here(lambda c: deferred.add(c, kept, 10))
        assert "secret" not in "".join(traceback.format_exception(raised.value))
    finally:
        database.close()


async def test_lines_may_ask_the_responses_api(tmp_path: Path) -> None:
    asked = {"custom_id": "one", "method": "POST", "url": "/v1/responses", "body": {"model": "tiny", "input": "hello"}}
    async with job_tier(tmp_path) as (_, client):
        file = await client.files.create(file=("lines.jsonl", as_file([asked])), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
        done = await ended(client, batch.id)
        (answer,) = await lines_of(client, done.output_file_id)
        body = answer["response"]["body"]
        assert (body["object"], body["output"][0]["content"][0]["text"]) == ("response", "hello")


async def test_what_could_not_be_recorded_leaves_no_file_behind(tmp_path: Path) -> None:
    """A disk may take a file and then not the row that says whose it is: tried again and again, that would fill it."""
    async with job_tier(tmp_path) as (tier, client):
        database = tier.jobs._database
        await database.run(lambda c: c.exec_driver_sql("PRAGMA max_page_count=1").fetchall())  # no further page

        async def fill_its_last_page() -> None:
            for _ in range(100):
                await client.files.create(file=("a" * 250, b"x"), purpose="batch")

        with pytest.raises(openai.InternalServerError) as told:
            await fill_its_last_page()
        assert (told.value.status_code, told.value.code) == (503, "storage_full")
        kept = {file.id async for file in client.files.list()}
        assert {path.name for path in (tmp_path / "files").iterdir()} == kept


async def test_an_upload_of_unknown_length_leaves_the_room_that_is_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    disk = shutil.disk_usage(tmp_path)

    def small_disk(folder: Path) -> object:
        seen.append(sum(path.stat().st_size for path in (folder / "incoming").iterdir()))
        return disk._replace(free=10_000_000 - seen[-1])

    async def endless() -> AsyncIterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(100):
            yield b"x" * 500_000

    monkeypatch.setattr("router.jobs.files.shutil.disk_usage", small_disk)
    kind = {"content-type": "multipart/form-data; boundary=b"}
    settings = JobsSettings(min_free_mbytes=5)
    async with job_tier(tmp_path, settings=settings) as (tier, _), httpx.AsyncClient(base_url=tier.url) as http:
        reply = await http.post("/v1/files", content=endless(), headers=kind)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_full")
        assert max(seen) < 6_000_000
        assert list((tmp_path / "incoming").iterdir()) == []


@pytest.mark.parametrize(
    "change", ["UPDATE facts SET value = 'x' WHERE name = 'schema'", "DELETE FROM facts WHERE name = 'place'"]
)
def test_facts_that_are_none_are_told_with_a_remedy(tmp_path: Path, change: str) -> None:
    url = f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    database = Database(url, lambda: "here", lambda: None)
    database.open()
    database.run_here(lambda c: c.exec_driver_sql(change))
    database.close()
    again = Database(url, lambda: "here", lambda: None)
    with pytest.raises(ConfigError, match="name a"):
        again.open()
    again.close()
