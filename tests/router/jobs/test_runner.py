"""Lines in the slack of a live tier: they give way, come back, are tried again, and survive what happens to a tier."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import structlog
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from router.base.clock import MonotonicClock
from router.base.errors import ConfigError, ReplicaCrashed
from router.decisions.line import AskedFor, Decision
from router.decisions.settings import DecisionFileSettings
from router.decisions.writer import DecisionFile
from router.jobs import batches, lifecycle
from router.jobs.calendar import Calendar
from router.jobs.runner import Runner
from router.jobs.settings import JobsSettings
from router.jobs.slack import Allowance
from router.tenants.database import UsageDatabase
from router.values.chunk import FinishReason, TokenChunk
from router.values.replica import ReplicaSnapshot
from tests.support.gateway_fakes import prompt_text, replica_info
from tests.support.job_tier import SETTINGS, Echo, JobTier, as_file, ended, job_tier, line, lines_of, submit
from tests.support.waiting import until, until_answered

LINES = [line(f"id-{number}", f"word {number}") for number in range(24)]


async def _done(*command: str) -> bool:
    """Whether a command has succeeded."""
    return await (await asyncio.create_subprocess_exec(*command)).wait() == 0


async def _ask(client: openai.AsyncOpenAI, words: str) -> str:
    reply = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": words}])
    return reply.choices[0].message.content or ""


async def test_running_lines_give_way_to_an_online_request_and_are_run_again(tmp_path: Path) -> None:
    replica = Echo(slots=4)
    async with job_tier(tmp_path, replica) as (tier, client):
        replica.gate.clear()
        batch = await submit(client, LINES)
        await until(lambda: replica.running == 4)
        online = asyncio.create_task(_ask(client, "online"))
        await until(lambda: replica.cancelled == 4)
        await until(lambda: replica.running == 1)
        assert replica.asked[-1] == "online"
        replica.gate.set()
        assert await online == "online"
        done = await ended(client, batch.id)
        assert done.request_counts.completed == 24
        assert tier.jobs.runner.stopped == 4
        asked = [words for words in replica.asked if words != "online"]
        assert len(asked) == 28
        assert len(set(asked)) == 24
        answers = await lines_of(client, done.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [each["custom_id"] for each in LINES]


class Holding(Echo):
    """Holds lines up while it is told to; they are no part of its snapshots."""

    def __init__(self, slots: int = 8, *, leaves_steps: bool = True) -> None:
        super().__init__(replica_info("tiny-fp32", 0, holds_up=True, leaves_steps=leaves_steps), slots)
        self.limits: list[int | None] = [None]
        self.lines = 0
        self.tokens = asyncio.Event()
        self.tokens.set()

    def limit_lines(self, lines: int | None) -> None:
        self.limits += [lines] if lines != self.limits[-1] else []
        self.tokens.clear() if lines == 0 else self.tokens.set()

    def snapshot(self) -> ReplicaSnapshot:
        running = self.running - self.lines
        return ReplicaSnapshot(self.info, available=self.available, slots=self.slots, running=running)

    async def generate(self, request):
        words, yields = prompt_text(request.prompt), request.objective.yields
        self.asked.append(words)
        self.running += 1
        self.lines += yields
        try:
            await self.gate.wait()
            for piece in (words[:3], words[3:]):
                if yields:
                    await self.tokens.wait()
                yield TokenChunk(piece, 2)
                await asyncio.sleep(0)
            yield TokenChunk("", 0, finish_reason=FinishReason.STOP)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            self.lines -= yields


async def test_lines_are_held_up_for_an_online_request_and_go_on_with_all_they_had(tmp_path: Path) -> None:
    replica = Holding(slots=4)
    async with job_tier(tmp_path, replica) as (tier, client):
        replica.gate.clear()
        batch = await submit(client, LINES)
        await until(lambda: replica.lines == 4)
        online = asyncio.create_task(_ask(client, "online"))
        await until(lambda: replica.running == 5)  # every slot is as good as free
        assert replica.limits == [None, 0]
        replica.gate.set()
        assert await online == "online"
        done = await ended(client, batch.id)
        assert done.request_counts.completed == 24
        assert replica.cancelled == 0
        assert sorted(replica.asked) == sorted(["online", *(f"word {number}" for number in range(24))])
        assert (tier.jobs.runner.stopped, tier.jobs.runner.paused) == (0, 4)
        answers = await lines_of(client, done.output_file_id)
        said = [answer["response"]["body"] for answer in answers]
        assert [body["choices"][0]["message"]["content"] for body in said] == [f"word {n}" for n in range(24)]
        assert {body["usage"]["completion_tokens"] for body in said} == {4}
        async with httpx.AsyncClient() as http:
            metrics = (await http.get(f"{tier.url}/metrics")).text
        assert "overspill_batch_lines_paused_total 4.0" in metrics
        assert "overspill_batch_lines_stopped_total 0.0" in metrics


async def test_a_line_that_is_held_up_is_counted_once_until_it_goes_on() -> None:
    nothing: Any = SimpleNamespace(limit=lambda allowance: None)
    runner = Runner(nothing, nothing, nothing, MonotonicClock(), nothing)

    def give_way(running: int, held_up: int) -> int:
        runner._asking = dict.fromkeys(range(running))  # type: ignore[arg-type]
        runner._give_way(Allowance(0, running, beside=held_up > 0, held_up=held_up))
        return runner.paused

    assert give_way(300, 280) == 280  # beside one that came: 10 of them on each of two devices go on
    assert give_way(300, 282) == 282  # another one comes: two more, and not all of them again
    assert give_way(300, 280) == 282
    assert give_way(300, 0) == 282
    assert give_way(4, 4) == 286
    assert give_way(2, 2) == 286  # two were cancelled
    assert give_way(0, 0) == 286


async def test_a_batch_whose_lines_are_held_up_can_be_cancelled(tmp_path: Path) -> None:
    replica = Holding(slots=4)
    async with job_tier(tmp_path, replica) as (_, client):
        replica.gate.clear()
        batch = await submit(client, LINES)
        await until(lambda: replica.lines == 4)
        online = asyncio.create_task(_ask(client, "online"))
        await until(lambda: replica.running == 5)
        await client.batches.cancel(batch.id)
        await until(lambda: replica.lines == 0)
        assert replica.cancelled == 4
        replica.gate.set()
        assert await online == "online"
        assert (await ended(client, batch.id)).status == "cancelled"


async def test_nobody_else_can_ask_to_be_held_up(tmp_path: Path) -> None:
    replica = Echo()
    async with job_tier(tmp_path, replica) as (_, client):
        lowest = {"priority": -(2**31)}
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], extra_body=lowest
        )
        assert replica.requests[0].objective.in_slack
        assert not replica.requests[0].objective.yields


async def test_lines_take_part_in_nothing_that_online_requests_are_counted_for(tmp_path: Path) -> None:
    replica = Echo(slots=2)
    async with job_tier(tmp_path, replica) as (tier, client):
        replica.gate.clear()
        await submit(client, LINES)
        await until(lambda: replica.running == 2)
        assert {request.objective.in_slack for request in replica.requests} == {True}
        assert tier.dispatcher.status().overloaded is False
        async with httpx.AsyncClient() as http:
            metrics = (await http.get(f"{tier.url}/metrics")).text
        assert 'overspill_num_requests_waiting{model_name="tiny",replica=""} 0.0' in metrics
        assert "overspill_batch_lines_running 2.0" in metrics
        assert 'overspill_batches{status="in_progress"} 1.0' in metrics
        assert "overspill_gateway_requests_in_flight 2.0" in metrics
        replica.gate.set()


async def test_a_line_that_a_replica_crashes_on_is_tried_again_and_told_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.jobs.runner._FIRST_RETRY_S", 0.01)

    class Poisoned(Echo):
        async def generate(self, request):
            async for chunk in super().generate(request):
                if self.asked[-1] == "poison":
                    raise ReplicaCrashed("the replica's code failed")
                yield chunk

    replica = Poisoned(slots=1)
    async with job_tier(tmp_path, replica) as (_, client):
        batch = await submit(client, [line("a", "fine"), line("b", "poison"), line("c", "fine too")])
        done = await ended(client, batch.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
        (error,) = await lines_of(client, done.error_file_id)
        assert error["custom_id"] == "b"
        assert error["response"]["status_code"] in {500, 503}


async def test_a_tier_that_is_stopped_goes_on_after_its_next_start(tmp_path: Path) -> None:
    replica = Echo(slots=2, holds_at="word 9")
    async with job_tier(tmp_path, replica) as (_, client):
        batch = await submit(client, LINES)
        await until(lambda: "word 9" in replica.asked)
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    again = Echo()
    async with job_tier(tmp_path, again) as (_, client):
        done = await ended(client, batch.id)
        assert done.status == "completed"
        assert done.request_counts.completed == 24
        answers = await lines_of(client, done.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [each["custom_id"] for each in LINES]
        assert len(again.asked) < 24  # what was committed is not computed again


@pytest.mark.parametrize("at", ["write", "keep"])
async def test_a_crash_while_finalizing_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    crashes = []

    def crash(*_: object, **__: object) -> None:
        crashes.append(at)
        raise RuntimeError("the machine is lost here")

    place, name = (lifecycle.Lifecycle, "_write") if at == "write" else (batches, "end")
    with monkeypatch.context() as broken:
        broken.setattr(place, name, crash)
        async with job_tier(tmp_path) as (_, client):
            batch = await submit(client, LINES)
            await until(lambda: crashes)
            assert (await client.batches.retrieve(batch.id)).status == "finalizing"
    replica = Echo()
    async with job_tier(tmp_path, replica) as (_, client):
        done = await ended(client, batch.id)
        assert done.status == "completed"
        answers = await lines_of(client, done.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [each["custom_id"] for each in LINES]
        assert replica.asked == []
        kept = {path.name for path in (tmp_path / "files").iterdir()}
        assert kept == {done.input_file_id, done.output_file_id}


async def test_a_database_without_room_stops_the_batch_and_lets_it_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.jobs.committer._RETRY_S", 0.05)
    replica = Echo(slots=2)
    async with job_tier(tmp_path, replica) as (tier, client):
        replica.gate.clear()
        long = [line(f"id-{number}", f"{number}" + "long" * 10_000) for number in range(12)]
        batch = await submit(client, long)
        await until(lambda: replica.running == 2)
        pages = tier.jobs._database.run_here(lambda c: c.execute(text("PRAGMA page_count")).scalar_one())
        tier.jobs._database.run_here(lambda c: c.execute(text(f"PRAGMA max_page_count={pages + 30}")).scalar_one())
        replica.gate.set()
        await until(lambda: tier.jobs.runner._committer.stuck)
        assert "full" in tier.jobs.runner._committer.stuck
        assert await _ask(client, "online") == "online"  # nobody else is held up

        async def fill_what_is_left() -> None:
            for number in range(50):
                await client.batches.create(
                    input_file_id=batch.input_file_id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                    metadata={str(n): f"{number}" * 100 for n in range(16)},
                )

        with pytest.raises(openai.InternalServerError) as told:
            await fill_what_is_left()
        assert (told.value.status_code, told.value.code) == (503, "storage_full")
        tier.jobs._database.run_here(lambda c: c.execute(text("PRAGMA max_page_count=1000000")).scalar_one())
        done = await ended(client, batch.id)
        assert done.request_counts.completed == 12


@contextlib.contextmanager
def _unreadable(path: Path) -> Iterator[None]:
    """Let a file be one that is there and cannot be read, as on a disk that fails, or with too many files open."""
    aside = path.with_name("aside")
    path.rename(aside)
    path.mkdir()
    try:
        yield
    finally:
        path.rmdir()
        aside.rename(path)


@pytest.mark.parametrize("when", ["checked", "run"])
async def test_a_file_that_cannot_be_read_for_a_while_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr("router.jobs.runner._STEP_RETRY_S", 0.05)
    told = "a batch cannot go on" if when == "checked" else "lines cannot be read, and run later"
    replica = Echo(slots=2)
    async with job_tier(tmp_path, replica) as (_, client):
        file = await client.files.create(file=as_file(LINES), purpose="batch")
        path = tmp_path / "files" / file.id
        if when == "run":
            replica.gate.clear()
            batch = await _batch(client, file.id)
            await until(lambda: replica.running == 2)
        with structlog.testing.capture_logs() as logs, _unreadable(path):
            if when == "checked":
                batch = await _batch(client, file.id)
            replica.gate.set()
            await until(lambda: any(entry["event"] == told for entry in logs))
            assert await _ask(client, "online") == "online"
        done = await ended(client, batch.id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 24, 0)


async def _batch(client: openai.AsyncOpenAI, file_id: str) -> Any:
    return await client.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of its own is mounted by root alone")
async def test_a_full_disk_is_told_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.jobs.committer._RETRY_S", 0.05)
    monkeypatch.setattr("router.jobs.runner._STEP_RETRY_S", 0.05)
    disk = tmp_path / "disk"
    disk.mkdir()
    if not await _done("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)):
        pytest.skip("this container may not mount")
    try:
        replica = Echo(slots=2)
        async with job_tier(disk / "jobs", replica) as (_, client):
            replica.gate.clear()
            batch = await submit(client, [line(f"id-{n}", f"{n}" + "long" * 10_000) for n in range(30)])
            await until(lambda: replica.running == 2)
            (disk / "others").write_bytes(b"x" * 600_000)
            with pytest.raises(openai.InternalServerError) as told:
                await client.files.create(file=as_file([line("a", "x" * 4_000_000)]), purpose="batch")
            assert told.value.code == "storage_full"
            replica.gate.set()
            await asyncio.sleep(1.0)
            assert (await client.batches.retrieve(batch.id)).status in {"in_progress", "finalizing"}
            assert await _ask(client, "online") == "online"
            assert await _done("mount", "-o", "remount,size=20m", str(disk))
            done = await ended(client, batch.id)
            assert done.request_counts.completed == 30
            answers = await lines_of(client, done.output_file_id)
            assert [answer["custom_id"] for answer in answers] == [f"id-{n}" for n in range(30)]
    finally:
        await _done("umount", "-l", str(disk))


def _decision(request_id: str) -> Decision:
    return Decision(
        request_id=request_id, model="tiny", prompt_tokens=1, policy="x", objective=AskedFor(), outcome="completed"
    )


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of its own is mounted by root alone")
async def test_a_tier_that_starts_on_a_full_disk_serves_and_keeps_jobs_when_there_is_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if not await _done("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)):
        pytest.skip("this container may not mount")
    try:
        others = disk / "others"
        with contextlib.suppress(OSError):
            others.write_bytes(b"x" * 3_000_000)
        usage = UsageDatabase(str(disk / "usage.db"))
        usage.open()
        with pytest.raises(OperationalError):
            usage.exchange({}, "2026-11")
        decisions = DecisionFile(DecisionFileSettings(path=str(disk / "decisions.jsonl")))
        async with decisions, job_tier(disk / "jobs", Echo()) as (_, client):
            decisions.append(lambda: _decision("a" * 32))
            await until(lambda: decisions.lost.unwritten == 1)
            assert await _ask(client, "online") == "online"
            with pytest.raises(openai.InternalServerError) as told:
                await submit(client, LINES)
            assert (told.value.status_code, told.value.code) == (503, "storage_full")
            others.unlink()
            done = await ended(client, (await submit(client, LINES)).id)
            assert done.request_counts.completed == 24
            decisions.append(lambda: _decision("b" * 32))
            await until(lambda: decisions.written == 1)
        assert usage.exchange({}, "2026-11") == {}
        usage.close()
    finally:
        await _done("umount", "-l", str(disk))


async def test_quotas_of_a_caller_and_of_all(tmp_path: Path) -> None:
    settings = JobsSettings(min_free_mbytes=0, max_mbytes=3, max_caller_mbytes=2, max_file_mbytes=1)
    async with (
        job_tier(tmp_path, settings=settings, api_keys={"a" * 20: 0, "b" * 20: 0}) as (tier, _),
        tier.client("a" * 20) as one,
        tier.client("b" * 20) as two,
    ):
        with pytest.raises(openai.APIStatusError) as large:
            await one.files.create(file=b"x" * 1_000_001, purpose="batch")
        assert (large.value.status_code, large.value.code) == (413, "file_too_large")
        kept = [await one.files.create(file=b"x" * 950_000, purpose="batch") for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as mine:
            await one.files.create(file=b"x" * 950_000, purpose="batch")
        assert mine.value.code == "quota_reached"
        await two.files.create(file=b"x" * 950_000, purpose="batch")
        with pytest.raises(openai.InternalServerError) as all_of_it:
            await two.files.create(file=b"x" * 950_000, purpose="batch")
        assert all_of_it.value.code == "storage_full"
        await one.files.delete(kept[0].id)
        await two.files.create(file=b"x" * 950_000, purpose="batch")


async def test_batches_of_a_caller_are_bounded(tmp_path: Path) -> None:
    settings = JobsSettings(min_free_mbytes=0, max_caller_batches=2)
    replica = Echo()
    async with job_tier(tmp_path, replica, settings=settings) as (_, client):
        replica.gate.clear()
        for _ in range(2):
            await submit(client, LINES)
        with pytest.raises(openai.RateLimitError, match="2 batches of yours"):
            await submit(client, LINES)
        replica.gate.set()


async def test_two_callers_share_by_turns(tmp_path: Path) -> None:
    replica = Echo(slots=1)
    async with (
        job_tier(tmp_path, replica, api_keys={"a" * 20: 0, "b" * 20: 0}) as (tier, _),
        tier.client("a" * 20) as one,
        tier.client("b" * 20) as two,
    ):
        replica.gate.clear()
        batches = [
            (one, await submit(one, [line(f"a{n}", f"a{n}") for n in range(20)])),
            (two, await submit(two, [line(f"b{n}", f"b{n}") for n in range(20)])),
        ]
        await until(lambda: tier.jobs.runner.batches["in_progress"] == 2)
        replica.gate.set()
        for client, batch in batches:
            await ended(client, batch.id)
        second = [words[0] for words in replica.asked][2:22]
        assert 8 <= second.count("a") <= 12


async def test_lines_of_one_caller_that_hang_leave_a_place_to_the_others(tmp_path: Path) -> None:
    replica = Echo(slots=4, holds_at="hangs")
    async with (
        job_tier(tmp_path, replica, api_keys={"a" * 20: 0, "b" * 20: 0}) as (tier, _),
        tier.client("a" * 20) as one,
        tier.client("b" * 20) as two,
    ):
        hanging = await submit(one, [line(f"a{n}", "hangs") for n in range(20)])
        await until(lambda: replica.running == 4)
        done = await ended(two, (await submit(two, [line(f"b{n}", f"b{n}") for n in range(20)])).id)
        assert done.request_counts.completed == 20
        assert tier.jobs.runner.stopped == 1
        assert (await one.batches.retrieve(hanging.id)).status == "in_progress"


async def test_files_and_batches_go_when_their_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.jobs.jobs._CLEAN_UP_S", 0.02)
    now_s = [1_000_000.0]
    async with job_tier(tmp_path, calendar=Calendar(lambda: now_s[0], lambda: now_s[0])) as (_, client):
        short = await client.files.create(
            file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert short.expires_at == 1_003_600
        batch = await submit(client, LINES[:2], output_expires_after={"anchor": "created_at", "seconds": 7200})
        done = await ended(client, batch.id)
        now_s[0] += 3601

        async def gone(file_id: str | None) -> bool:
            assert file_id is not None
            with contextlib.suppress(openai.NotFoundError):
                await client.files.retrieve(file_id)
                return False
            return True

        await until_answered(lambda: gone(short.id))
        assert not await gone(done.output_file_id)
        now_s[0] += 3600
        await until_answered(lambda: gone(done.output_file_id))
        assert not await gone(done.input_file_id)
        now_s[0] += 30 * 86_400
        await until_answered(lambda: gone(done.input_file_id))
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve(batch.id)
        assert not list((tmp_path / "files").iterdir())


async def test_a_folder_belongs_to_one_tier(tmp_path: Path) -> None:
    async with job_tier(tmp_path):
        with pytest.raises(ConfigError, match="another process uses"):
            await JobTier(tmp_path, Echo()).jobs.__aenter__()
    assert SETTINGS.dir == ""
