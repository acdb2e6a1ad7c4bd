"""What the fleet may ask of a running agent: to change its settings, to describe itself, to say how it is."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from importlib import metadata
from typing import Protocol

import msgspec
import structlog

from edge_agent.config import EdgeConfig
from edge_agent.device.health import DeviceHealth
from edge_agent.device.memory import rss_bytes
from edge_agent.fleet.bounds import check_bounds
from edge_agent.fleet.description import Description
from edge_agent.fleet.effective import tellable
from edge_agent.fleet.privacy import keeps_local
from edge_agent.serving.lineup import ServedHere
from router.base.config import decode
from router.base.errors import ConfigError
from router.dispatch.records.telemetry import Telemetry
from router.fleetwire.documents import DesiredConfig, ModelReport, ReplicaTelemetry, Snapshot
from router.fleetwire.overrides import lay_over
from router.policy.registry import load_policy

log = structlog.get_logger("edge_agent.fleet")


class SteeredAgent(Protocol):
    """What steering needs of the agent."""

    def configuration(self) -> EdgeConfig:
        """Return what is in force."""
        ...

    async def reconfigure(self, wanted: EdgeConfig) -> None:
        """Put a valid configuration into force; raises a `ConfigError`, and changes nothing, if it cannot be served."""
        ...

    def models(self) -> Sequence[ServedHere]:
        """Return the models that answer here."""
        ...

    def condition(self) -> tuple[DeviceHealth | None, Telemetry]:
        """Return the last reading of the device, None before the first, and the counters."""
        ...


class Steering:
    """The agent's answers to its fleet session.

    Overrides are laid over the configuration the agent was started with, so taking one away brings the file's value
    back. The result is validated as a whole before anything changes.
    """

    def __init__(self, agent: SteeredAgent) -> None:
        self._agent = agent
        self._base = agent.configuration()

    async def apply(self, desired: DesiredConfig) -> None:
        """Put a document into force; requests in flight are not touched.

        Raises:
            ConfigError: it is not valid, or cannot be served; everything stays as it was.
        """
        tree = lay_over(msgspec.to_builtins(self._base), desired.overrides)
        wanted = decode(tree, EdgeConfig, source=f"desired version {desired.version}")
        self._check_privacy(wanted.router.policy)
        check_bounds(self._base, wanted, desired.overrides)
        await self._agent.reconfigure(wanted)
        log.info("desired applied", version=desired.version)

    def _check_privacy(self, policy: str) -> None:
        """Refuse to loosen the site's own privacy."""
        load_policy(policy)  # names the policies there are
        own = self._base.router.policy
        if keeps_local(own) and not keeps_local(policy):
            raise ConfigError(
                f"router.policy: {policy!r} would let requests leave this device, whose own file says {own}; "
                "take router.policy out of the document, or change the file on the device",
                param="router.policy",
            )

    def describe(self) -> Description:
        return Description(
            effective=tellable(self._agent.configuration()),
            agent_version=metadata.version("overspill"),
            models=tuple(
                ModelReport(
                    variant=replica.info.variant,
                    digest=replica.digest,
                    rung=replica.info.rung,
                    state="loaded" if replica.loaded else "failed" if replica.problem else "on-demand",
                    reason=replica.remarks,
                )
                for replica in self._agent.models()
            ),
        )

    def snapshot(self) -> Snapshot:
        health, telemetry = self._agent.condition()
        looks = [replica.snapshot() for replica in self._agent.models()]
        slots = sum(look.slots for look in looks)
        errors = [f"{look.info.variant}: {look.why}" for look in looks if look.why]
        return Snapshot(
            load=round(sum(look.running + look.queued for look in looks) / slots, 3) if slots else None,
            replicas=tuple(
                ReplicaTelemetry(
                    replica_id=look.info.replica_id, running=look.running, queued=look.queued, available=look.available
                )
                for look in looks
            ),
            temperature_c=health.hottest_c if health else None,
            memory_rss_bytes=rss_bytes(),
            memory_available_bytes=health.memory_available_bytes if health else None,
            decisions=_decisions(telemetry),
            errors=tuple(errors),
        )


def _decisions(telemetry: Telemetry) -> dict[str, int]:
    """Requests so far, by reason code."""
    totals: collections.Counter[str] = collections.Counter()
    for metric in telemetry.requests.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                totals[sample.labels["reason"]] += int(sample.value)
    return dict(totals)
