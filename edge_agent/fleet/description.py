"""What the agent says about itself to its fleet: `reported` and telemetry snapshots, whatever a sensor does."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import structlog

from edge_agent.fleet.configurator import Standing
from edge_agent.fleet.effective import tellable
from router.base.errors import in_words
from router.fleetwire.documents import ModelReport, Reported, Snapshot, utc_now

log = structlog.get_logger("edge_agent.fleet")

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Description:
    """What the agent says about itself in `reported`; `effective`: what is in force, secrets are blacked out."""

    effective: object
    agent_version: str = ""
    models: tuple[ModelReport, ...] = ()


Describe = Callable[[], Description | Awaitable[Description]]
TakeSnapshot = Callable[[], Snapshot | Awaitable[Snapshot]]


@dataclass(frozen=True, slots=True)
class SelfDescription:
    """Asks the agent; what it cannot say is left out, logged, and said to be missing."""

    describe: Describe
    take_snapshot: TakeSnapshot
    standing: Callable[[], Standing]

    async def snapshot(self) -> Snapshot:
        try:
            snapshot = await _value(self.take_snapshot())
        except Exception:
            log.exception("no snapshot could be taken")  # a broken sensor must not silence the device
            snapshot = Snapshot(errors=("no snapshot could be taken; see the agent's log",))
        standing = self.standing()
        faults = tuple(fault for fault in (standing.privacy_held, standing.volatile) if fault)
        return msgspec.structs.replace(snapshot, errors=(*snapshot.errors, *faults)) if faults else snapshot

    async def reported(self, birth: int) -> Reported:
        standing = self.standing()
        common: dict[str, Any] = {"birth": birth, "reported_at": utc_now()}
        try:
            said = await _value(self.describe())
            effective = tellable(said.effective)
        except Exception as error:
            log.exception("the agent could not be described")  # the outcome must reach the operator all the same
            return standing.reported(effective={"unknown": in_words(error)}, **common)
        return standing.reported(effective=effective, agent_version=said.agent_version, models=said.models, **common)


async def _value(result: R | Awaitable[R]) -> R:
    return await result if inspect.isawaitable(result) else result
