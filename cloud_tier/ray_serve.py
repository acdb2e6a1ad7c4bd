"""The cloud tier as a Ray Serve application: every replica is a whole tier, and Ray has as many as their queues need.

    serve run cloud_tier.ray_serve:app config=/etc/overspill/cloud.toml

The configuration has to be at that path, and its models in the store, on every node. `[server]` does not count: Ray
listens and drains. `[scaling]` gives the bounds and what the law is told; each replica says what its own load needs,
and `replicas_by_law` adds up.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingContext

from cloud_tier.config import CloudConfig, load
from cloud_tier.plan import make_plan
from cloud_tier.server import CloudTier
from router.base import logs
from router.base.errors import Unavailable
from router.gateway.app import Gateway

NEEDED = "needed_replicas"
_TOLERANCE = 0.1  # of a replica, by which a need may pass a whole number
_LOOK_EVERY_S = 1.0
_LOOK_BACK_S = 5.0


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `serve run` or the `args` of a Serve config file may say.

    Attributes:
        config: a TOML file, at this path on every node.
        cpus, gpus: of one replica, which Ray keeps for it.
    """

    config: str
    cpus: float = 1.0
    gpus: float = 0.0


@serve.ingress()
class CloudReplica:
    """One tier in one Ray actor."""

    async def __init__(self, config: str) -> None:  # type: ignore[misc]  # Ray awaits it, on the requests' own loop
        settings = load(Path(config))
        logs.configure(settings.server.log_level, settings.server.log_format)
        self._tier = CloudTier(make_plan(settings))
        self._life = contextlib.AsyncExitStack()
        self._app: Gateway = await self._life.enter_async_context(self._tier.mounted())

    def __serve_build_asgi_app__(self) -> Gateway:
        return self._app

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Ray what this replica's load needs, in replicas and parts of one."""
        return {NEEDED: sum(load for _, load in self._tier.scale.loads())}

    async def check_health(self) -> None:
        """Fail where no engine serves; Ray then starts another replica.

        Raises:
            Unavailable: says why.
        """
        ready, why = self._tier.ready()
        if not ready:
            raise Unavailable(f"the tier cannot serve: {why}", retry_after_s=1.0)

    async def __del__(self) -> None:
        await self._life.aclose()


def replicas_by_law(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Say how many replicas Ray should have: the sum of what theirs need, and one for requests that found none."""
    needs: Mapping[object, float] = (context.aggregated_metrics or {}).get(NEEDED, {})
    needed = math.ceil(sum(needs.values()) - _TOLERANCE)
    if not context.current_num_replicas:
        needed = max(needed, int(context.total_num_requests > 0))
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(needed, low), high), context.policy_state


def deployment_options(config: CloudConfig, arguments: Arguments) -> dict[str, Any]:
    """Return what Ray is told of the deployment."""
    scaling = config.scaling
    return {
        "max_ongoing_requests": config.limits.max_requests,
        "graceful_shutdown_timeout_s": config.server.drain_s,
        "ray_actor_options": {"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        "autoscaling_config": {
            "min_replicas": max(1, scaling.min_replicas),
            "max_replicas": scaling.max_replicas,
            "policy": {"policy_function": f"{__name__}:{replicas_by_law.__name__}"},
            "metrics_interval_s": _LOOK_EVERY_S,
            "look_back_period_s": _LOOK_BACK_S,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": scaling.hold_s,
        },
    }


def app(args: dict[str, Any]) -> Application:
    """Build the application, as `serve run cloud_tier.ray_serve:app KEY=VALUE …` asks for.

    Raises:
        ConfigError: the configuration cannot be read, or does not fit.
        msgspec.ValidationError: an argument is unknown or missing.
    """
    arguments = msgspec.convert(args, Arguments, strict=False)
    options = deployment_options(load(Path(arguments.config)), arguments)
    deployment = serve.deployment(CloudReplica, name="overspill-cloud", **options)
    return deployment.bind(arguments.config)
