"""An agent without models, as `edge_agent.fleet.steering` sees it; it fails where a test says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from edge_agent.config import EdgeConfig
from edge_agent.device.health import DeviceHealth
from edge_agent.fleet.configurator import Configurator
from edge_agent.fleet.state import StateDir
from edge_agent.fleet.steering import Steering
from edge_agent.serving.replica import LocalReplica
from router.base.config import decode
from router.base.errors import ConfigError
from router.dispatch.records.telemetry import Telemetry

KNOWN_VARIANTS = {"smollm2-135m-int8", "smollm2-135m-pruned-int8"}


class ModelessAgent:
    """Models that are not `KNOWN_VARIANTS` cannot be served; `kill_on_models` ends the process as a bad build would."""

    def __init__(self, **tables: object) -> None:
        self.config: EdgeConfig = decode(tables, EdgeConfig, source="test")
        self.kill_on_models = False
        self.loads = 0

    def configuration(self) -> EdgeConfig:
        return self.config

    async def reconfigure(self, wanted: EdgeConfig) -> None:
        if wanted.models != self.config.models:
            self.loads += 1
            if self.kill_on_models:
                os.kill(os.getpid(), signal.SIGKILL)
            gone = sorted(set(wanted.models.variants) - KNOWN_VARIANTS)
            if gone:
                raise ConfigError(f"models: no artifact of {', '.join(gone)}", param="models.variants")
        self.config = wanted

    def models(self) -> Sequence[LocalReplica]:
        return []

    def condition(self) -> tuple[DeviceHealth | None, Telemetry]:
        return None, Telemetry()


class Life:
    """One life of a device's configurator on a folder: `async with`, its state folder is locked meanwhile."""

    def __init__(self, folder: Path, agent: ModelessAgent | None = None) -> None:
        self.agent = agent or ModelessAgent()
        self.state = StateDir(folder)
        self.reports = 0
        self.configurator = Configurator(Steering(self.agent).apply, self.state, 60.0, self._changed)

    @property
    def policy(self) -> str:
        return self.agent.config.router.policy

    async def __aenter__(self) -> Life:
        self.state.open()
        await self.configurator.restore()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.state.close()

    async def _changed(self) -> None:
        self.reports += 1
