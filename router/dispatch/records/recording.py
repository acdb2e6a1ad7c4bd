"""What a tier keeps of every request: metrics and, where they are configured, a decision file and traces."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from router.decisions.settings import DecisionFileSettings
from router.decisions.writer import DecisionFile
from router.dispatch.records.telemetry import Telemetry
from router.tracing.otlp import OtlpTraces, open_traces
from router.tracing.settings import TelemetrySettings


@dataclass(frozen=True, slots=True)
class Recording:
    """What its parts are given to: the dispatcher, which is to be left before `running` is."""

    telemetry: Telemetry
    decisions: DecisionFile | None
    traces: OtlpTraces | None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write until the block ends, and then what is left.

        Raises:
            ConfigError: the decision file cannot be written.
        """
        nothing = contextlib.nullcontext()
        async with self.decisions or nothing, self.traces or nothing:
            yield


def open_recording(decisions: DecisionFileSettings, traces: TelemetrySettings, service: str) -> Recording:
    """Return the recording of a tier, whose metrics tell what became of the rest.

    Raises:
        ConfigError: traces are wanted, and what exports them is not installed.
    """
    telemetry = Telemetry()
    file = DecisionFile(decisions) if decisions.path else None
    if file is not None:
        telemetry.watch_decision_file(file)
    exported = open_traces(traces, service)
    if exported is not None:
        telemetry.watch_traces(exported)
    return Recording(telemetry, file, exported)
