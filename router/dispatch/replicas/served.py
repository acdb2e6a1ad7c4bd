"""Which replicas serve a model, and which of them a request: found once, until the replicas change."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.base.structs import FrozenStruct
from router.dispatch.records.record import Rejection
from router.dispatch.replicas.peers import Peers
from router.signals.canary import Canary, Side
from router.values.replica import ReplicaInfo
from router.values.request import InferenceRequest


class Sides(FrozenStruct, frozen=True):
    """What is said of all replicas that may ever serve a request, as in `Situation`."""

    best_quality: float
    pinned: bool
    remote_served: bool
    only_remote_fits: bool = False
    local_down: bool = False
    remote_down: bool = False


class Part(FrozenStruct, frozen=True):
    """Replicas that serve a model: all, or one deployment of a canary with what serves both.

    Attributes:
        kinds: where they are many, what decisions draw from.
    """

    names: tuple[str, ...]
    kinds: tuple[Peers, ...] = ()


NOBODY = Part(())


class Served(FrozenStruct, frozen=True):
    """Which replicas serve a model.

    Attributes:
        others: the rejections of all other replicas, where these are not many.
        sides: for a request that all of them may serve now.
        least_context_tokens, least_quality: of any of them.
        canary: the canary that divides them; of_side: who serves a request of a side, and who the other side's alone.
    """

    whole: Part
    others: tuple[Rejection, ...]
    sides: Sides
    least_context_tokens: int
    least_quality: float
    canary: Canary | None = None
    of_side: Mapping[Side, tuple[Part, Part]] = msgspec.field(default_factory=dict)

    def drawn(self, request: InferenceRequest) -> tuple[Part, Part]:
        """Return who may serve a request, and who serves the other deployment of a canary."""
        return (self.whole, NOBODY) if self.canary is None else self.of_side[self.canary.side_of(request)]

    def may_cross(self, request: InferenceRequest) -> bool:
        """Whether the other deployment may serve it where its own cannot: one that stepped back may not."""
        canary = self.canary
        return canary is not None and (not canary.why or canary.side_of(request) is Side.CANARY)


def other_model(info: ReplicaInfo, model: str) -> Rejection:
    """Return the rejection of a replica that serves another model than the one asked for."""
    return Rejection(info, "other-model", f"serves {info.variant}, asked for {model}")
