"""Store and forward: nothing is lost but what is counted, whatever crashes."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edge_agent.outbox.outbox import Outbox, Row
from tests.support.disks import small_disk
from tests.support.paths import REPOSITORY


def telemetry(number: int, size: int = 10) -> Row:
    return Row(f"t{number}", "telemetry", "t", b"x" * size)


def opened(path: Path | None, **bounds: float) -> Outbox:
    outbox = Outbox(path, **bounds)  # type: ignore[arg-type]
    outbox.open()
    return outbox


class CrashesAndReconnects(RuleBasedStateMachine):
    """A device that enqueues, sends, sees some PUBACKs and not others, and loses power at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "outbox.db"
        self.outbox = opened(self.path)
        self.accepted: dict[str, Row] = {}
        self.delivered: list[str] = []
        self.in_flight: list[Row] = []
        self.replaced: set[str] = set()
        self.count = 0

    @rule()
    def sample(self) -> None:
        self.count += 1
        row = telemetry(self.count)
        assert self.outbox.put(row)
        self.accepted[row.key] = row

    @rule(slot=st.sampled_from(["reported", "other"]))
    def state(self, slot: str) -> None:
        self.count += 1
        row = Row(f"s{self.count}", "state", slot, b"{}", retain=True, slot=slot)
        assert self.outbox.put(row)
        self.replaced |= {key for key, old in self.accepted.items() if old.slot == slot}
        self.accepted[row.key] = row

    @rule()
    def again(self) -> None:
        """The same row once more, as after a crash between storing and noting that it was stored."""
        waiting = self.outbox.pending(1)
        if waiting:
            assert not self.outbox.put(waiting[0])

    @rule(limit=st.integers(1, 5))
    def send(self, limit: int) -> None:
        rows = self.outbox.pending(limit, [row.key for row in self.in_flight])
        assert not {row.key for row in rows} & {row.key for row in self.in_flight}
        self.in_flight += rows
        self.delivered += [row.key for row in rows]

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        if self.in_flight:
            some = data.draw(st.lists(st.sampled_from(self.in_flight), unique_by=lambda row: row.key))
            self.outbox.ack(some)
            self.in_flight = [row for row in self.in_flight if row not in some]

    @rule()
    def lose_connection(self) -> None:
        self.in_flight.clear()

    @rule()
    def crash(self) -> None:
        """Power loss: the file as it is now, opened by a new process, with no farewell from the old one."""
        self.in_flight.clear()
        abandoned, self.outbox = self.outbox, opened(self.path)
        abandoned.close()

    @invariant()
    def nothing_is_lost(self) -> None:
        waiting = {row.key for row in self.outbox.pending(10_000)}
        unseen = set(self.accepted) - set(self.delivered) - self.replaced
        assert unseen <= waiting
        assert waiting <= set(self.accepted)

    @invariant()
    def one_row_a_slot(self) -> None:
        slots = [row.slot for row in self.outbox.pending(10_000) if row.slot is not None]
        assert len(slots) == len(set(slots))

    def teardown(self) -> None:
        self.outbox.close()
        self.folder.cleanup()


CrashesAndReconnects.TestCase.settings = settings(max_examples=20, stateful_step_count=20)
TestCrashesAndReconnects = CrashesAndReconnects.TestCase


def test_state_goes_first_and_telemetry_in_order(tmp_path: Path) -> None:
    outbox = opened(tmp_path / "o.db")
    outbox.put(telemetry(1))
    outbox.put(telemetry(2))
    outbox.put(Row("r", "state", "t", b"", slot="reported"))
    assert [row.key for row in outbox.pending(9)] == ["r", "t1", "t2"]
    outbox.close()


def test_oldest_telemetry_leaves_first_and_is_counted_while_state_stays(tmp_path: Path) -> None:
    outbox = opened(tmp_path / "o.db", max_rows=5)
    outbox.put(Row("r", "state", "t", b"", slot="reported"))
    for number in range(10):
        outbox.put(telemetry(number))
    assert [row.key for row in outbox.pending(99)] == ["r", "t6", "t7", "t8", "t9"]
    assert outbox.stats().dropped == 6
    outbox.close()


def test_bytes_are_bounded_too(tmp_path: Path) -> None:
    outbox = opened(tmp_path / "o.db", max_bytes=1000)
    for number in range(10):
        outbox.put(telemetry(number, size=300))
    assert outbox.stats().pending_bytes <= 1000
    assert [row.key for row in outbox.pending(99)] == ["t7", "t8", "t9"]
    outbox.close()


@pytest.mark.process
def test_rows_survive_kill_nine(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from edge_agent.outbox.outbox import Outbox, Row
        outbox = Outbox(Path(sys.argv[1]))
        outbox.open()
        for number in range(100_000):
            outbox.put(Row(f"t{number}", "telemetry", "t", b"x" * 100))
            print(number, flush=True)
        """
    )
    path = tmp_path / "o.db"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) >= 40:
                child.send_signal(signal.SIGKILL)
                break
        confirmed = max(int(line) for line in [line, *child.stdout.read().split()] if line.strip().isdigit())
    outbox = opened(path)
    kept = {row.key for row in outbox.pending(100_000)}
    assert {f"t{number}" for number in range(confirmed + 1)} <= kept
    outbox.close()


def _fill_a_disk(path: Path, results: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    outbox = Outbox(path, retry_disk_s=0.0)
    outbox.open()
    resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, resource.RLIM_INFINITY))
    for number in range(100):
        outbox.put(telemetry(number, size=5_000))
        outbox.retry_disk_s, outbox._retry_at_s = 1e9, 1e18
    full = outbox.stats()
    kept = [row.key for row in outbox.pending(1_000)]
    outbox.ack(outbox.pending(10))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    outbox._retry_at_s = 0.0
    outbox.put(telemetry(100))
    results.put((full.in_memory, len(kept), outbox.stats().in_memory, [row.key for row in outbox.pending(1_000)]))
    outbox.close()


@pytest.mark.process
def test_a_full_disk_leads_to_memory_and_back(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=_fill_a_disk, args=(tmp_path / "o.db", results))
    child.start()
    in_memory, kept, still_in_memory, finally_kept = results.get(timeout=60)
    child.join()
    assert in_memory
    assert kept == 100
    assert not still_in_memory
    assert finally_kept == [f"t{number}" for number in range(10, 101)]


def test_a_folder_that_cannot_hold_a_file_leads_to_memory() -> None:
    outbox = opened(Path("/proc/nowhere/outbox.db"))
    assert outbox.put(telemetry(1))
    assert outbox.stats().in_memory
    outbox.close()


@pytest.mark.process
def test_a_disk_that_was_read_only_at_the_start_is_used_once_it_is_not(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        disk.remount("ro")
        outbox = opened(disk.folder / "deep" / "outbox.db", retry_disk_s=0.0)
        assert outbox.put(telemetry(1))
        assert outbox.stats().in_memory
        disk.remount("rw")
        assert outbox.put(telemetry(2))
        assert not outbox.stats().in_memory
        outbox.close()


def test_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "o.db"
    path.write_bytes(b"this is no database, not even a small one" * 100)
    outbox = opened(path)
    assert outbox.put(telemetry(1))
    assert not outbox.stats().in_memory
    assert (tmp_path / "o.db.damaged").exists()
    outbox.close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM outbox").fetchone() == (1,)
    db.close()


def test_a_file_that_comes_back_damaged_is_begun_anew(tmp_path: Path) -> None:
    """It was set aside at a restart alone; until then all stayed in memory, however long that was."""
    path = tmp_path / "o.db"
    outbox = opened(path, retry_disk_s=0.0)
    assert outbox.put(telemetry(1))
    outbox._db.close()  # the disk fails
    assert outbox.put(telemetry(2))
    assert outbox.stats().in_memory
    path.write_bytes(b"\x07" * 8192)
    assert outbox.put(telemetry(3))
    assert outbox.put(telemetry(4))
    assert not outbox.stats().in_memory
    assert (tmp_path / "o.db.damaged").exists()
    outbox.close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM outbox").fetchone() == (3,)
    db.close()


def _instructions(outbox: Outbox, rows: int) -> dict[str, int]:
    """Return how many steps of SQLite's machine each call takes beside so many rows."""
    db = outbox._db
    assert db is not None
    with db:
        db.executemany(
            "INSERT INTO outbox (key, kind, topic, payload, retain) VALUES (?, 'telemetry', 't', ?, 0)",
            [(f"old{number}", b"x" * 50) for number in range(rows)],
        )
    outbox.close()
    outbox.open()
    steps = [0]

    def count() -> None:
        steps[0] += 1

    assert outbox._db is not None
    outbox._db.set_progress_handler(count, 1)
    taken = {}
    for name, call in {
        "put": lambda: outbox.put(telemetry(1)),
        "pending": lambda: outbox.pending(16, [f"old{number}" for number in range(8)]),
        "ack": lambda: outbox.ack([telemetry(1)]),
        "stats": outbox.stats,
    }.items():
        before = steps[0]
        call()
        taken[name] = steps[0] - before
    return taken


def test_no_call_costs_more_beside_many_rows_than_beside_few(tmp_path: Path) -> None:
    few = _instructions(opened(tmp_path / "few.db"), 100)
    many = _instructions(opened(tmp_path / "many.db"), 5_000)
    for name, steps in many.items():
        assert steps <= few[name] + 200, name


def test_the_counters_agree_with_the_table_whatever_happens(tmp_path: Path) -> None:
    outbox = opened(tmp_path / "o.db", max_rows=16, max_bytes=2_000)
    for number in range(60):
        outbox.put(telemetry(number, size=number * 7 % 300))
        outbox.put(Row(f"s{number}", "state", "t", b"y" * number, slot=f"slot{number % 3}"))
        if number % 4 == 0:
            some = outbox.pending(3)
            outbox.ack([*some, *some, telemetry(10_000)])
        if number % 10 == 9:
            outbox.close()
            outbox.open()
        waiting = outbox.pending(10_000)
        stats = outbox.stats()
        assert (stats.pending, stats.pending_bytes) == (len(waiting), sum(len(row.payload) for row in waiting))
    outbox.close()
