"""The session's beginning and end, broker or not: nothing hangs, and ending cleanly is no fault of a document."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest

from edge_agent.fleet.configurator import Configurator
from edge_agent.fleet.description import Description
from edge_agent.fleet.reconcile import MAX_ATTEMPTS, Handled, Knowledge, Verdict, applied, begin, reconcile
from edge_agent.fleet.session import FleetSession
from edge_agent.fleet.state import StateDir
from edge_agent.mqtt.config import FleetConfig
from router.base.errors import ConfigError
from router.fleetwire.documents import DesiredConfig, Snapshot, digest_of, encode
from tests.support.waiting import until

Applying = Callable[[DesiredConfig], Awaitable[None]]


def want(version: int) -> DesiredConfig:
    return DesiredConfig(version=version, issued_at=datetime.now(timezone.utc), router={"max_queue": 5})


def session(folder: Path, apply: Applying, ready: Callable[[], Awaitable[None]] | None = None) -> FleetSession:
    config = FleetConfig(enabled=True, port=1, device="d", state_dir=str(folder))
    return FleetSession(config, apply=apply, describe=lambda: Description({}), telemetry=Snapshot, ready=ready)


async def forever(_: DesiredConfig) -> None:
    await asyncio.Event().wait()


async def at_once(_: DesiredConfig) -> None:
    pass


async def test_a_shutdown_that_meets_an_apply_just_done_ends(tmp_path: Path) -> None:
    done = asyncio.get_running_loop().create_future()
    begun = asyncio.Event()

    async def apply(_: DesiredConfig) -> None:
        begun.set()
        await done

    fleet = session(tmp_path, apply)
    await fleet.__aenter__()
    fleet._desired.append(encode(want(1)))
    fleet._desired_came.set()
    await begun.wait()
    done.set_result(None)
    leaving = asyncio.create_task(fleet.__aexit__(None, None, None))
    ended, _ = await asyncio.wait({leaving}, timeout=30)
    assert ended
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("fleet-")]


class Lives:
    """The configurator of an agent that is started again and again, on one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def clean(self, payload: bytes) -> str:
        """One life that is told to end while it applies; what it says about the document."""
        state = StateDir(self.folder)
        state.open()
        try:
            configurator = Configurator(forever, state, 600, self._changed)
            await configurator.restore()
            obeying = asyncio.create_task(configurator.obey(payload))
            await until(lambda: obeying.done() or configurator.standing.state == "applying")
            obeying.cancel()
            await asyncio.wait({obeying})
            return configurator.standing.state
        finally:
            state.close()

    def crash(self, desired: DesiredConfig) -> None:
        """One life that is killed while it applies."""
        state = StateDir(self.folder)
        state.open()
        known = state.load()
        state.save(begin(known, reconcile(known, desired)))  # type: ignore[arg-type]  # an Apply
        state.close()

    async def _changed(self) -> None:
        pass


async def test_clean_shutdowns_while_a_document_is_applied_do_not_count_as_crashes(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    desired = want(1)
    for _ in range(MAX_ATTEMPTS + 2):
        assert await lives.clean(encode(desired)) == "applying"
    for _ in range(MAX_ATTEMPTS):
        lives.crash(desired)
        assert StateDir(tmp_path).load().trial is not None
    assert await lives.clean(encode(desired)) == "refused"


async def test_a_clean_shutdown_does_not_forget_a_crash_before(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    desired = want(1)
    lives.crash(desired)
    assert await lives.clean(encode(desired)) == "applying"
    trial = StateDir(tmp_path).load().trial
    assert trial is not None
    assert trial.attempts == 1


async def test_the_owner_is_asked_when_the_stored_overrides_are_in_force(tmp_path: Path) -> None:
    said: list[str] = []

    async def apply(desired: DesiredConfig) -> None:
        said.append(f"version {desired.version}")

    async def ready() -> None:
        said.append("ready")

    fleet = session(tmp_path, apply, ready)
    state = StateDir(fleet.config.state_path())
    state.open()
    state.save(applied(Knowledge(), want(3)))
    state.close()
    async with fleet:
        assert said == ["version 3", "ready"]


async def test_an_owner_that_cannot_start_leaves_the_state_to_the_next(tmp_path: Path) -> None:
    async def ready() -> None:
        raise ConfigError("models: none")

    with pytest.raises(ConfigError, match="models: none"):
        await session(tmp_path, at_once, ready).__aenter__()
    async with session(tmp_path, at_once) as fleet:
        assert fleet.standing.state == "none"


async def test_a_document_in_force_survives_shutdowns_while_it_is_restored(tmp_path: Path) -> None:
    stored = want(3)
    handled = Handled(3, digest_of(stored), Verdict.APPLIED)
    for _ in range(8):
        fleet = session(tmp_path, forever)
        state = StateDir(fleet.config.state_path())
        state.open()
        state.save(Knowledge(applied=stored, handled=handled, trial=state.load().trial))
        state.close()
        entering = asyncio.create_task(fleet.__aenter__())
        await until(lambda state=state: state.load().trial is not None)
        entering.cancel()
        await asyncio.wait({entering})
        assert entering.cancelled()
        assert state.load().trial is None
