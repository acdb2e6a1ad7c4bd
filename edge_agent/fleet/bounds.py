"""What a document of the fleet may set: values that the device's own file may choose, and nobody from afar.

A file is written beside the device, and whoever wrote it sees what it does. A document reaches a thousand devices at
once: one that makes each of them fail every request (a timeout of a millisecond, no models, a memory's worth of
decision records) is refused, with the key and the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_agent.config import EdgeConfig
from router.base.errors import ConfigError
from router.fleetwire.overrides import leaves

_TEN_MINUTES_MS = 600_000.0

BOUNDS: dict[str, tuple[float, float]] = {
    "router.ttft_slo_ms": (50.0, _TEN_MINUTES_MS),
    "router.max_queue": (4, 4_096),
    "router.max_sheddable_queue": (1, 4_096),
    "router.max_wait_ms": (500.0, _TEN_MINUTES_MS),
    "router.first_token_timeout_ms": (5_000.0, _TEN_MINUTES_MS),
    "router.stall_timeout_ms": (1_000.0, _TEN_MINUTES_MS),
    "router.max_attempts": (1, 16),
    "router.overload_enter": (0.05, 1.0),
    "router.overload_answer_tokens": (8, 1_000_000),
    "router.min_answer_tokens": (1, 1_024),
    "router.expected_answer_tokens": (1, 8_192),
    "router.decision_log": (1, 16_384),
    "router.breaker.failures": (1, 1_000),
    "router.breaker.open_ms": (50.0, _TEN_MINUTES_MS),
    "router.breaker.max_open_ms": (50.0, _TEN_MINUTES_MS),
    "router.breaker.failure_ratio": (0.05, 1.0),
    "router.prices.cloud_kilotoken": (0.0, 1.0),
    "router.prices.uplink_mbyte": (0.0, 10.0),
    "router.prices.local_answer": (0.0, 0.5),
    "router.credits.queue_wait_target_ms": (10.0, 60_000.0),
    "router.credits.lifetime_ms": (200.0, 60_000.0),
    "router.credits.asks_per_s": (10.0, 1_000_000.0),
    "router.credits.max_instances": (64, 1_000_000),
    "models.context_tokens": (64, 2**31),
    "models.prefill_chunk_tokens": (8, 4_096),
    "models.unload_idle_s": (10.0, 30 * 86_400.0),
}
"""Lowest and highest value by key."""
_PROFILE_CHOOSES = frozenset({"models.context_tokens", "models.prefill_chunk_tokens", "models.unload_idle_s"})
"""Keys whose value of 0 means that the hardware profile chooses, or never."""


def check_bounds(base: EdgeConfig, wanted: EdgeConfig, overrides: Mapping[str, Any]) -> None:
    """Check the overrides of a document; a value that the device's own file has as well is never refused.

    Args:
        base: the configuration of the file. wanted: the same with the overrides laid over it.

    Raises:
        ConfigError: a value would take the device out of service.
    """
    if base.models.variants and not wanted.models.variants:
        raise ConfigError(
            "models.variants = []: a document of the fleet may not take every model off a device; "
            "name at least one variant, or change the device's own file",
            param="models.variants",
        )
    for key, value in leaves(overrides):
        if key not in BOUNDS or value is None or (value == 0 and key in _PROFILE_CHOOSES):
            continue
        low, high = BOUNDS[key]
        if not low <= value <= high and value != _at(base, key):
            raise ConfigError(
                f"{key} = {value}: a document of the fleet may set {low:g} to {high:g}; "
                "what is beyond can be set in the device's own file only",
                param=key,
            )


def _at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config
