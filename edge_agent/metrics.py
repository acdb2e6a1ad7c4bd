"""The agent's own gauges and counters beside the router's: models, fallbacks, heat, memory, fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from edge_agent.device.memory import rss_bytes
from edge_agent.serving.over_pipeline import OverPipeline
from edge_agent.serving.replica import LocalReplica
from models.pipelines.metrics import stage_metrics

if TYPE_CHECKING:
    from edge_agent.device.health import DeviceHealth
    from edge_agent.fleet.session import FleetSession
    from edge_agent.serving.lineup import Lineup

_COUNTERS = {
    "steps": ("steps", "Steps computed."),
    "failed_steps": ("failed_steps", "Steps that failed."),
    "worker_restarts": ("worker_restarts", "Times the worker failed as a whole and began anew."),
    "loads": ("model_loads", "Times the model was loaded."),
    "prefill_tokens": ("prefill_tokens", "Prompt tokens computed."),
    "cached_tokens": (
        "cached_prompt_tokens",
        "Prompt tokens found in a KV cache, not computed.",
    ),
    "decode_tokens": ("decode_tokens", "Tokens generated."),
    "compute_s": ("compute_seconds", "Time spent in the runtime."),
}


class EdgeMetrics(Collector):
    """Read from the replicas at each scrape, so that the hot path counts nothing twice.

    Args:
        fleet: the session, None while the agent belongs to no fleet.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        lineup: Lineup,
        health: Callable[[], DeviceHealth | None],
        fleet: Callable[[], FleetSession | None],
    ) -> None:
        self._lineup = lineup
        self._health = health
        self._fleet = fleet
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Name nothing in advance: the models are known only when they are served."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._models()
        yield from self._device()
        session = self._fleet()
        if session is not None:
            yield from _fleet(session)

    def _models(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily("overspill_edge_model_loaded", "1 while its weights are loaded.", labels=["variant"])
        failed = GaugeMetricFamily(
            "overspill_edge_model_failed", "1 while it cannot answer; /v1/decisions says why.", labels=["variant"]
        )
        changed = GaugeMetricFamily(
            "overspill_edge_artifact_changed",
            "1 while the store's files differ from what is served.",
            labels=["variant"],
        )
        slots = GaugeMetricFamily(
            "overspill_edge_model_slots", "Answers computed together at most.", labels=["variant"]
        )
        fallbacks = GaugeMetricFamily(
            "overspill_edge_provider_fallbacks", "Accelerators asked for and not had.", labels=["variant"]
        )
        counters = {
            field: CounterMetricFamily(f"overspill_edge_{name}", text, labels=["variant"])
            for field, (name, text) in _COUNTERS.items()
        }
        for replica in self._lineup.replicas:
            name = [replica.info.variant]
            loaded.add_metric(name, 1.0 if replica.loaded else 0.0)
            slots.add_metric(name, replica.slots)
            failed.add_metric(name, 1.0 if replica.problem else 0.0)
            changed.add_metric(name, 1.0 if replica.notice else 0.0)
            fallbacks.add_metric(name, len(replica.fallbacks))
            if isinstance(replica, LocalReplica):
                for field, family in counters.items():
                    family.add_metric(name, float(getattr(replica.loop.counters, field)))
        yield loaded
        yield slots
        yield failed
        yield changed
        yield fallbacks
        yield from counters.values()
        pipelines = [replica.pipeline for replica in self._lineup.replicas if isinstance(replica, OverPipeline)]
        yield from stage_metrics(pipelines)

    def _device(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("overspill_edge_rss_bytes", "Resident set of the agent.", value=rss_bytes())
        health = self._health()
        if health is None:
            return
        yield GaugeMetricFamily("overspill_edge_hot", "1 while the device sheds for its heat.", value=float(health.hot))
        zones = GaugeMetricFamily("overspill_edge_temperature_celsius", "By thermal zone.", labels=["zone"])
        for zone, celsius in health.temperatures_c.items():
            zones.add_metric([zone], celsius)
        yield zones
        if health.power_w is not None:
            yield GaugeMetricFamily("overspill_edge_power_watts", "Draw of the board.", value=health.power_w)
        if health.gpu_load is not None:
            yield GaugeMetricFamily("overspill_edge_gpu_load", "Share in [0, 1].", value=health.gpu_load)


def _fleet(session: FleetSession) -> Iterator[Metric]:
    standing, outbox = session.standing, session.outbox
    yield GaugeMetricFamily("overspill_edge_fleet_connected", "1 while the broker is there.", value=session.connected)
    yield GaugeMetricFamily(
        "overspill_edge_fleet_version",
        "Version of the desired configuration in force.",
        value=standing.applied_version or 0,
    )
    yield GaugeMetricFamily(
        "overspill_edge_fleet_privacy_held",
        "1 while every request stays here because what the fleet said about privacy was lost.",
        value=bool(standing.privacy_held),
    )
    yield GaugeMetricFamily(
        "overspill_edge_fleet_volatile",
        "1 while the disk does not hold what is in force.",
        value=bool(standing.volatile),
    )
    yield GaugeMetricFamily("overspill_edge_outbox_rows", "Messages that wait for the broker.", value=outbox.pending)
    yield GaugeMetricFamily("overspill_edge_outbox_bytes", "Their payloads.", value=outbox.pending_bytes)
    yield CounterMetricFamily("overspill_edge_outbox_dropped", "Telemetry dropped for room.", value=outbox.dropped)
