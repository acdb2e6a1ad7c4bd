"""The `[scaling]` table of the cloud tier: what an autoscaler is told, and within which bounds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Replicas = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class ScalingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[scaling]`. The formulas are in docs/scaling.md.

    Attributes:
        unit: what one replica is. `tier`: this whole tier, of which there are several behind one address; each tells
            its own load, and the autoscaler adds them up. `replica`: what this tier sends requests to; it tells how
            many of those each of its models needs.
        min_replicas: never fewer. 0 lets a model go to none after `idle_s`; its next request waits for the first.
        max_replicas: never more.
        promise_share: of the requests, how many shall begin in time while traffic is steady.
        spare_replicas: more than needed, for a rise within a cold start, or for one that fails.
        cold_start_s: seconds from asking for a replica until it serves, before one was measured.
        hold_s: how long replicas stay that are no longer needed.
        idle_s: seconds without any request after which the last replica goes, where `min_replicas` is 0.
        batches: lines of batches are demand too; without it they run in what is there for others.
    """

    unit: Literal["tier", "replica"] = "tier"
    min_replicas: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 1
    max_replicas: Replicas = 10
    promise_share: Annotated[float, msgspec.Meta(ge=0.5, le=0.9999)] = 0.95
    spare_replicas: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = 0
    cold_start_s: Seconds = 60.0
    hold_s: Seconds = 600.0
    idle_s: Seconds = 900.0
    batches: bool = False

    def __post_init__(self) -> None:
        """Check what the types cannot say."""
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas = {self.min_replicas} is above max_replicas = {self.max_replicas}")
        if self.min_replicas == 0 and self.unit == "tier":
            raise ValueError(
                "min_replicas = 0 needs unit = 'replica': a tier that has gone to none cannot hold the request "
                "that would bring it back; let a tier in front of the replicas do so"
            )
