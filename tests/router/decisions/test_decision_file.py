"""The decision file: whole lines, bounded files, no names, and requests that never notice a bad disk."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import threading
from functools import partial
from pathlib import Path

import pytest
import structlog

from router.base.errors import ConfigError
from router.decisions import writer
from router.decisions.line import AskedFor, CandidateRow, Decision, Features, encode
from router.decisions.pseudonyms import Pseudonyms, key_path
from router.decisions.reader import DecisionReader
from router.decisions.rotation import RotatingFile, rotated
from router.decisions.settings import DecisionFileSettings
from router.decisions.writer import DecisionFile
from router.dispatch.records.recording import open_recording
from router.tracing.settings import TelemetrySettings
from router.values.prompt import TextPrompt
from router.values.sampling import SamplingParams
from tests.support.disks import small_disk
from tests.support.router_fakes import FakeReplica, info, request, world
from tests.support.waiting import until


def decision(request_id: str = "r1", **changes) -> Decision:
    fields = {
        "request_id": request_id,
        "model": "tiny",
        "prompt_tokens": 5,
        "policy": "x",
        "objective": AskedFor(ttft_ms=100.0),
        "outcome": "completed",
        "finish_ms": 250.0,
    }
    return Decision(**{**fields, **changes})


def settings(folder: Path, **changes) -> DecisionFileSettings:
    return DecisionFileSettings(**{"path": str(folder / "decisions.jsonl"), **changes})


def written(folder: Path) -> list[Decision]:
    return list(DecisionReader(folder / "decisions.jsonl"))


async def test_every_ended_request_leaves_a_line(tmp_path: Path) -> None:
    async with world(remote=False, max_queue=1) as w, DecisionFile(settings(tmp_path), lambda: 5000.0) as file:
        w.dispatcher._outcomes._decisions = file
        w.dispatcher.set_replicas([w.local])
        asks = [
            request(
                w.clock,
                prompt=TextPrompt("a secret of mine"),
                sampling=SamplingParams(max_tokens=24, stop=("\n",)),
                session="alice",
                caller="digest-of-a-key",
            )
            for _ in range(6)
        ]
        work = [asyncio.ensure_future(w.read(ask)) for ask in asks]
        await w.clock.run(asyncio.gather(*work, return_exceptions=True))
    lines = written(tmp_path)
    assert len(lines) == 6
    assert [line.outcome for line in lines].count("completed") == 5
    refused = next(line for line in lines if line.refused)
    assert (refused.error_code, refused.should_retry) == (refused.outcome, True)
    assert refused.retry_after_ms > 0
    assert "queue is full" in refused.error
    done = next(line for line in lines if line.outcome == "completed")
    assert done.finish_reason == "length"
    assert (done.tokens, done.features.stop, done.features.prompt_bytes) == (24, True, 200)
    assert done.accepted_unix_s == pytest.approx(5000.0 - done.finish_ms / 1e3)
    row = done.candidates[0]
    assert (row.chosen, row.slots, row.decode_tokens_per_s) == (True, 4, 50.0)
    assert row.device == info("int8").device_key
    assert row.ttft_ms < row.ttft_high_ms < row.finish_high_ms
    whole = b"".join(encode(line) for line in lines).decode()
    for private in ("secret", "alice", "digest-of-a-key"):
        assert private not in whole
    assert len({line.features.session for line in lines}) == 1, "a session is still seen to be one"


def test_the_file_is_off_by_default() -> None:
    assert DecisionFileSettings().path == ""
    assert open_recording(DecisionFileSettings(), TelemetrySettings(), "edge").decisions is None


def test_names_that_tell_nobody_stay_readable(tmp_path: Path) -> None:
    names = Pseudonyms.open(tmp_path / "log")
    drawn = "2f1c7a5e0d3b4c6f8a9b0c1d2e3f4a5b"
    assert names.request_id(drawn) == drawn
    assert names.request_id("5f0a1b2c-3d4e-5f60-7182-93a4b5c6d7e8~2") == "5f0a1b2c-3d4e-5f60-7182-93a4b5c6d7e8~2"
    hidden = names.request_id("alice@example.com/7")
    assert hidden.startswith("h-")
    assert "alice" not in hidden
    assert Pseudonyms.open(tmp_path / "log").request_id("alice@example.com/7") == hidden, "the key stays"
    assert Pseudonyms.open(tmp_path / "other").request_id("alice@example.com/7") != hidden
    assert key_path(tmp_path / "log").stat().st_mode & 0o077 == 0


def test_words_of_others_are_not_written(tmp_path: Path) -> None:
    """An upstream may quote the prompt in its error; what breakers and refusals repeat of it goes too."""
    names = Pseudonyms.open(tmp_path / "log")
    quoted = "bad request: 'my secret'"
    told = decision(
        error=quoted,
        error_code="replica_failed",
        events=(
            {"at_ms": 0.0, "event": "sent", "replica": "a"},
            {"at_ms": 1.0, "event": "attempt_failed", "code": "replica_failed", "error": quoted},
        ),
        candidates=(
            CandidateRow(replica="a", tier="cloud", variant="v", rejected="breaker-open", why=quoted),
            CandidateRow(replica="b", tier="cloud", variant="v", rejected="unhealthy", why=quoted),
            CandidateRow(replica="c", tier="cloud", variant="v", rejected="quality", why="quality 0.5, asked for 0.9"),
        ),
    )
    line = encode(names.hide(told)).decode()
    assert "secret" not in line
    assert "asked for 0.9" in line
    assert '"code":"replica_failed"' in line
    refused = decision(error="no replica can take the request now (a: my secret)", error_code="unavailable")
    assert names.hide(refused).error is None
    own = decision(error="the queue is full: 3 requests wait", error_code="shed")
    assert names.hide(own).error == own.error


def test_rotation_keeps_a_bounded_number_of_bounded_files(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = RotatingFile(path, max_bytes=1000, files=3)
    for number in range(100):
        file.append(encode(decision(f"{number:032d}")))
    file.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "log.1", "log.2"]
    assert all(p.stat().st_size <= 1000 for p in tmp_path.iterdir())
    ids = [int(line.request_id) for line in DecisionReader(path)]
    assert ids == list(range(100 - len(ids), 100)), "the oldest first, none twice, none missing"


def test_fewer_files_than_before_leave_none_behind(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for number in range(1, 6):
        rotated(path, number).write_bytes(encode(decision()))
    file = RotatingFile(path, max_bytes=300, files=2)
    for _ in range(3):
        file.append(encode(decision()))
    file.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "log.1"]


def test_a_line_longer_than_a_file_is_written_whole(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "log", max_bytes=10, files=2)
    for number in range(3):
        file.append(encode(decision(f"{number:032d}")))
    file.close()
    assert [int(line.request_id) for line in DecisionReader(tmp_path / "log")] == [1, 2]


def test_a_torn_line_is_skipped_and_the_next_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(encode(decision("a" * 32)) + encode(decision("b" * 32))[:70])
    reader = DecisionReader(path)
    assert [line.request_id for line in reader] == ["a" * 32]
    assert reader.skipped == 1
    file = RotatingFile(path, 10_000, 2)  # the process starts again
    file.append(encode(decision("c" * 32)))
    file.close()
    assert [line.request_id for line in reader] == ["a" * 32, "c" * 32]
    assert reader.skipped == 1
    path.write_bytes(b"\xff\xfe\n[1]\n{}\n\n" + encode(decision("d" * 32)))
    assert [line.request_id for line in reader] == ["d" * 32]
    assert reader.skipped == 3


def test_a_file_is_read_while_it_rotates(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = RotatingFile(path, max_bytes=2000, files=10)
    for number in range(20):
        file.append(encode(decision(f"{number:032d}")))
    lines = iter(DecisionReader(path))
    first = next(lines)
    for number in range(20, 30):
        file.append(encode(decision(f"{number:032d}")))
    ids = [int(first.request_id), *(int(line.request_id) for line in lines)]
    assert ids[:20] == list(range(20))
    assert ids == sorted(set(ids))
    file.close()


def test_a_file_that_somebody_took_away_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = RotatingFile(path, 10_000, 2)
    file.append(encode(decision("a" * 32)))
    path.rename(tmp_path / "taken")
    file.append(encode(decision("b" * 32)))
    file.close()
    assert [line.request_id for line in DecisionReader(path)] == ["b" * 32]


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = RotatingFile(path, 100_000, 2)
    line = encode(decision("a" * 32))
    file.append(line)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(line) + 50, hard))  # a write ends in the middle of the next line
    try:
        with pytest.raises(OSError, match="too large"):
            file.append(line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == line
    file.append(line)
    file.close()
    assert path.read_bytes() == line * 2


def test_a_key_for_which_there_was_no_room_is_drawn_when_there_is_some(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # a file can be made, and nothing written to it
    try:
        with pytest.raises(OSError, match="too large"):
            Pseudonyms.open(tmp_path / "log")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    Pseudonyms.open(tmp_path / "log")
    key = key_path(tmp_path / "log").read_bytes()
    assert len(key) == 32
    Pseudonyms.open(tmp_path / "log")
    assert key_path(tmp_path / "log").read_bytes() == key


async def test_a_disk_that_fails_is_told_once_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = True
    append = RotatingFile.append

    def perhaps(self: RotatingFile, lines: bytes) -> None:
        if failing:
            raise OSError(28, "No space left on device")
        append(self, lines)

    monkeypatch.setattr(RotatingFile, "append", perhaps)
    with structlog.testing.capture_logs() as logs:
        async with DecisionFile(settings(tmp_path)) as file:
            for _ in range(20):
                file.append(decision)
            await until(lambda: file.lost.unwritten == 20)
            failing = False
            file.append(partial(decision, "a" * 32))
            await until(lambda: file.written == 1)
    assert [line.request_id for line in written(tmp_path)] == ["a" * 32]
    assert [entry["event"] for entry in logs] == ["decisions cannot be written"]
    assert file.lost.unwritten == 20


async def test_a_slow_disk_drops_lines_and_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "QUEUE_RECORDS", 10)
    gate = threading.Event()
    append = RotatingFile.append
    monkeypatch.setattr(RotatingFile, "append", lambda self, lines: (gate.wait(20), append(self, lines))[1])
    with structlog.testing.capture_logs() as logs:
        async with DecisionFile(settings(tmp_path)) as file:
            file.append(decision)
            await until(lambda: not file._ended)  # the thread has it, and is stuck in the write
            for _ in range(30):
                file.append(decision)
            assert file.lost.dropped == 20
            gate.set()
    assert len(written(tmp_path)) == 11
    assert [entry["event"] for entry in logs].count("decisions are dropped: their file is written too slowly") == 1


async def test_a_record_that_cannot_be_told_ends_nothing(tmp_path: Path) -> None:
    def bug() -> Decision:
        raise ZeroDivisionError

    with structlog.testing.capture_logs() as logs:
        async with DecisionFile(settings(tmp_path)) as file:
            for tell in (bug, bug, decision):
                file.append(tell)
    assert file.lost.untold == 2
    assert len(written(tmp_path)) == 1
    assert [entry["log_level"] for entry in logs] == ["error"]


async def test_what_goes_wrong_in_the_writing_thread_costs_the_lines_at_hand_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug, no memory: the file is opened anew, and what comes after is written."""
    real, failed = RotatingFile.append, []

    def fails_once(file: RotatingFile, lines: bytes) -> None:
        if not failed:
            failed.append(lines)
            raise MemoryError
        real(file, lines)

    monkeypatch.setattr(RotatingFile, "append", fails_once)
    with structlog.testing.capture_logs() as told:
        async with DecisionFile(settings(tmp_path), lambda: 5000.0) as file:
            file.append(partial(decision, "lost"))
            await until(lambda: file.lost.unwritten == 1)
            file.append(partial(decision, "kept"))
            await until(lambda: file.written == 1)
    assert len(written(tmp_path)) == 1
    assert [line["event"] for line in told] == ["decisions cannot be written"]
    assert file.lost == (0, 1, 0)


async def test_two_processes_cannot_write_one_file(tmp_path: Path) -> None:
    async with DecisionFile(settings(tmp_path)):
        with pytest.raises(ConfigError, match="another process"):
            await DecisionFile(settings(tmp_path)).__aenter__()
    async with DecisionFile(settings(tmp_path)):
        pass


@pytest.mark.parametrize("path", ["nowhere/at/all.jsonl", "."])
async def test_a_path_that_cannot_be_written_is_a_clear_error(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=r"decisions\.path"):
        await DecisionFile(DecisionFileSettings(path=str(tmp_path / path))).__aenter__()


def test_a_damaged_key_is_named(tmp_path: Path) -> None:
    key_path(tmp_path / "log").write_bytes(b"short")
    with pytest.raises(ConfigError, match="has 5 bytes, not 32"):
        Pseudonyms.open(tmp_path / "log")


def test_a_decision_is_found_by_its_callers_own_id(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    names = Pseudonyms.open(path)
    with path.open("wb") as file:
        for told in (decision("job/7", tokens=1), decision("other"), decision("job/7", tokens=2)):
            file.write(encode(names.hide(told)))
    reader = DecisionReader(path)
    found = reader.find("job/7")
    assert found is not None
    assert found.tokens == 2, "the last one of that id"
    assert reader.find(found.request_id) == found, "as it stands in the file"
    assert reader.find("job/8") is None
    key_path(path).unlink()
    assert reader.find("job/7") is None
    assert reader.find(found.request_id) == found
    assert not key_path(path).exists(), "reading draws no key"


def test_no_log_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no decision file"):
        DecisionReader(tmp_path / "none")


def test_what_a_newer_version_adds_is_read_over(tmp_path: Path) -> None:
    value = {**json.loads(encode(decision())), "v": 2, "news": {"a": 1}}
    (tmp_path / "log").write_text(json.dumps(value) + "\n")
    assert [line.v for line in DecisionReader(tmp_path / "log")] == [2]


async def test_the_event_loop_only_hands_the_record_over(tmp_path: Path) -> None:
    told_by: list[str] = []

    def tell() -> Decision:
        told_by.append(threading.current_thread().name)
        return decision(features=Features(session="s"))

    async with DecisionFile(settings(tmp_path)) as file:
        file.append(tell)
    assert told_by == ["decision-file"]


async def test_a_removed_replica_is_not_held_by_the_records(tmp_path: Path) -> None:
    """A local replica holds a model; the log of decisions may outlive it."""
    async with world(remote=False) as w:
        ask = request(w.clock, max_tokens=2)
        await w.clock.run(w.read(ask))
        record = w.dispatcher._log.get(ask.request_id)
        assert record is not None
        assert len(record.loads) == 2
        assert not any(isinstance(part, FakeReplica) for load in record.loads for part in load)
        assert record.loads[0][0].info == info("int8")


def test_the_file_is_not_for_everybody(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        RotatingFile(tmp_path / "log", 1000, 2).close()
    finally:
        os.umask(previous)
    assert (tmp_path / "log").stat().st_mode & 0o007 == 0


@pytest.mark.process
async def test_on_a_disk_that_is_read_only_decisions_wait_until_it_is_not(tmp_path: Path) -> None:
    """As ext4 makes it when a card fails: a device that starts then answers all the same."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        disk.remount("ro")
        async with DecisionFile(DecisionFileSettings(path=str(disk.folder / "log"))) as file:
            file.append(lambda: decision("a" * 32))
            await until(lambda: file.lost.unwritten == 1)
            disk.remount("rw")
            file.append(lambda: decision("b" * 32))
            await until(lambda: file.written == 1)
        assert [line.request_id for line in DecisionReader(disk.folder / "log")] == ["b" * 32]
