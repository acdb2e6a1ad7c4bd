"""Jobs while the system's clock leaps: who has an hour left has an hour left, on every side of the leap."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection

from router.jobs import deferred, events
from router.jobs.calendar import Calendar
from router.jobs.database import Database
from router.jobs.errors import StorageFailed
from router.jobs.records import Deferred, DeferredStatus
from tests.support.job_tier import Echo, ended, job_tier, line, submit
from tests.support.waiting import until, until_answered

DAY_S = 86_400
LEAPS_S = (400.0 * DAY_S, -400.0 * DAY_S)


@dataclass
class Machine:
    """Its clock can be set; its uptime cannot."""

    set_s: float = 1_800_000_000.0
    up_s: float = 100.0
    began_s: float = field(default_factory=time.monotonic)

    def since_boot_s(self) -> float:
        return self.up_s + time.monotonic() - self.began_s

    def wall_s(self) -> float:
        return self.set_s + self.since_boot_s()

    def calendar(self) -> Calendar:
        return Calendar(self.wall_s, self.since_boot_s)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.jobs.calendar._LOOK_S", 0.01)
    monkeypatch.setattr("router.jobs.deferring._LOOK_S", 0.02)
    monkeypatch.setattr("router.jobs.jobs._CLEAN_UP_S", 0.02)


@pytest.mark.parametrize("leap_s", LEAPS_S)
async def test_what_was_deferred_while_the_clock_was_wrong_is_answered_when_it_is_right(
    tmp_path: Path, leap_s: float
) -> None:
    """A device without a battery for its clock: NTP comes with the link, for which the requests have waited."""
    machine, replica = Machine(), Echo()
    calendar = machine.calendar()
    async with (
        job_tier(tmp_path, replica, calendar=calendar) as (tier, _),
        httpx.AsyncClient(base_url=tier.url) as http,
    ):
        replica.available = False
        tier.dispatcher.capacity_changed()
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        headers = {"x-overspill-defer": "allow", "x-overspill-ttft-slo-ms": "200"}
        kept = await http.post("/v1/chat/completions", json=body, headers=headers, timeout=30)
        assert kept.status_code == 202
        before = kept.json()
        machine.set_s += leap_s
        await until(lambda: abs(calendar.now_s() - machine.wall_s()) < 1)
        after = (await http.get(kept.headers["location"])).json()
        assert after["status"] == "queued"
        for name in ("created_at", "expires_at"):
            assert abs(after[name] - before[name] - leap_s) <= 1
        replica.available = True
        tier.dispatcher.capacity_changed()

        async def answered() -> bool:
            return (await http.get(kept.headers["location"])).status_code == 200

        await until_answered(answered)
        assert (await http.get(kept.headers["location"])).json()["status"] == "completed"


@pytest.mark.parametrize("leap_s", LEAPS_S)
async def test_a_batch_runs_on_over_a_leap(tmp_path: Path, leap_s: float) -> None:
    machine, replica = Machine(), Echo(slots=2)
    calendar = machine.calendar()
    async with job_tier(tmp_path, replica, calendar=calendar) as (_, client):
        replica.gate.clear()
        batch = await submit(client, [line(f"id-{n}", f"word {n}") for n in range(8)])
        await until(lambda: replica.running == 2)
        machine.set_s += leap_s
        await until(lambda: abs(calendar.now_s() - machine.wall_s()) < 1)
        replica.gate.set()
        done = await ended(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 8)
        assert done.created_at <= done.in_progress_at <= done.completed_at <= done.expires_at
        assert done.output_file_id is not None
        assert (await client.files.retrieve(done.output_file_id)).expires_at > calendar.now_s()


class Kept:
    """A database with one deferred request for each time it was made at, all with an hour left then."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(f"sqlite:///{folder / 'jobs.sqlite'}", lambda: "here", lambda: None)
        self.database.open()

    def keep(self, name: str, created_s: float) -> None:
        row = Deferred(
            name,
            "me",
            None,
            DeferredStatus.QUEUED,
            "/v1/x",
            name,
            "[]",
            b"{}",
            "{}",
            int(created_s),
            int(created_s) + 3600,
        )
        self.database.run_here(lambda c: deferred.add(c, row, 10_000))

    def left_s(self, now_s: float) -> dict[str, float]:
        def read(connection: Connection) -> dict[str, float]:
            found = deferred.queued(connection, 100)
            return {one.id: deferred.get(connection, one.owner, one.id).expires_s - now_s for one in found}

        return self.database.run_here(read)


NUMBERS = itertools.count()


@given(leaps=st.lists(st.floats(-3e8, 3e8).filter(lambda leap_s: abs(leap_s) > 60), min_size=1, max_size=4))
async def test_only_what_was_kept_since_the_machine_started_leaps_along(
    tmp_path_factory: pytest.TempPathFactory, leaps: list[float]
) -> None:
    kept = Kept(tmp_path_factory.mktemp(f"leaps-{next(NUMBERS)}"))
    machine = Machine(up_s=500.0)
    calendar = machine.calendar()
    kept.keep("now", machine.wall_s())
    kept.keep("before", machine.wall_s() - 1000)
    was = kept.left_s(calendar.now_s())
    for leap_s in leaps:
        machine.set_s += leap_s
        assert await calendar._leap(kept.database, machine.wall_s() - calendar.now_s())
    left = kept.left_s(calendar.now_s())
    assert abs(left["now"] - was["now"]) < 2 + len(leaps)
    if len(leaps) == 1:
        assert abs(left["before"] - was["before"] + leaps[0]) < 3
    kept.database.close()


async def test_where_the_database_fails_nothing_leaps_by_half(tmp_path: Path) -> None:
    machine = Machine()
    calendar = machine.calendar()

    class Away:
        async def run(self, work: object) -> None:
            raise StorageFailed("the disk is away", retry_after_s=1.0)

    before_s = calendar.now_s()
    assert not await calendar._leap(Away(), 1e6)  # type: ignore[arg-type]
    assert abs(calendar.now_s() - before_s) < 60


def test_an_event_that_was_put_off_while_the_clock_was_ahead_is_due(tmp_path: Path) -> None:
    kept = Kept(tmp_path)

    def put_off(connection: Connection) -> list[str]:
        events.add(connection, "deferred.completed", {}, 2e9)
        [event] = events.due(connection, 2e9, 300.0, 10)
        events.put_off(connection, event.id, 2e9 + 200)
        assert not events.due(connection, 2e9, 300.0, 10)
        return [event.id for event in events.due(connection, 1.8e9, 300.0, 10)]

    assert len(kept.database.run_here(put_off)) == 1
    kept.database.close()
