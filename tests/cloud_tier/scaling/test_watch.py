"""What counts as load: lines do not, whether or not the replicas that run them show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from cloud_tier.scaling.settings import ScalingSettings
from cloud_tier.scaling.watch import ScaleWatch
from router.dispatch.records.record import DecisionRecord
from router.values.replica import ReplicaSnapshot
from router.values.request import LINE_PRIORITY, InferenceRequest, Outcome
from router.values.settings import RouterSettings
from tests.support.clocks import VirtualClock
from tests.support.gateway_fakes import replica_info
from tests.support.router_fakes import request


@dataclass
class Tier:
    """A tier of one replica, which shows its lines or not."""

    snapshot: ReplicaSnapshot
    settings: RouterSettings = field(default_factory=RouterSettings)

    def load(self) -> list[ReplicaSnapshot]:
        return [self.snapshot]

    def tell_of_requests(
        self, came: Callable[[InferenceRequest], None], ended: Callable[[DecisionRecord], None]
    ) -> None:
        self.came, self.ended = came, ended


@pytest.mark.parametrize("holds_up", [False, True])
def test_lines_hide_no_request_of_others(*, holds_up: bool) -> None:
    clock = VirtualClock()
    info = replica_info("tiny-fp32", 0, holds_up=holds_up)
    tier = Tier(ReplicaSnapshot(info, available=True, slots=8, running=3 if holds_up else 8))
    watch = ScaleWatch(tier, ScalingSettings(), clock)
    watch.look()
    lines = [request(clock, model="tiny", priority=LINE_PRIORITY) for _ in range(5)]
    for each in [*lines, *(request(clock, model="tiny") for _ in range(3))]:
        tier.came(each)
    watch.look()
    told = watch.report("tiny")
    assert told is not None
    assert (told["inputs"]["running"], told["inputs"]["waiting"]) == (3, 0)
    for each in lines:
        record = DecisionRecord.of(each, "slo-utility")
        record.outcome = Outcome.COMPLETED
        tier.ended(record)
    tier.snapshot = ReplicaSnapshot(info, available=True, slots=8, running=3)
    watch.look()
    assert watch.report("tiny")["inputs"]["running"] == 3
