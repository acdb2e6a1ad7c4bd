"""Whether a tier could answer anything now."""

from __future__ import annotations

from typing import Any

import msgspec

from router.dispatch.dispatcher import Dispatcher
from router.values.replica import ReplicaSnapshot, Unreached
from router.values.settings import RouterSettings
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import FakeReplica, info


class Away(FakeReplica):
    """Calls itself unavailable."""

    why, back_in_s = "restarting", 0.0

    def snapshot(self) -> ReplicaSnapshot:
        return msgspec.structs.replace(super().snapshot(), available=False, why=self.why, back_in_s=self.back_in_s)


class Back(FakeReplica):
    """Leads back to the tier `below`."""

    def reach(self) -> dict[str, int]:
        return {"below": 1}


def tier(*replicas: FakeReplica, policy: str = "slo-utility") -> Dispatcher:
    return Dispatcher(replicas, RouterSettings(policy=policy), clock=VirtualClock())


def away(variant: str, back_in_s: float = 0.0, **more: Any) -> Away:
    found = Away(info(variant, **more), VirtualClock())
    found.back_in_s = back_in_s
    return found


async def test_one_that_is_available_is_enough() -> None:
    here = FakeReplica(info("int8"), VirtualClock())
    assert tier(here, away("fp32", remote=True)).readiness().ready
    assert tier(away("fp32"), FakeReplica(info("fp32", remote=True), VirtualClock())).readiness().ready


async def test_each_reason_once_and_the_first_that_comes_back() -> None:
    told = tier(away("fp32", 9.0), away("int8", 3.0), away("pruned-int8")).readiness()
    assert (told.ready, told.why, told.back_in_s) == (False, "restarting", 3.0)


async def test_who_was_never_reached_is_named() -> None:
    dispatcher = tier()
    dispatcher.expect(lambda: [Unreached("backend lab", "ConnectError: refused")])
    assert "backend lab: not reached yet" in dispatcher.readiness().why
    assert "ConnectError: refused" in dispatcher.readiness().why


async def test_who_was_never_reached_is_named_where_all_others_lead_back() -> None:
    dispatcher = tier(Back(info("fp32", remote=True), VirtualClock()))
    dispatcher.expect(lambda: [Unreached("backend lab", "ConnectError: refused")])
    why = dispatcher.readiness("below").why
    assert why.startswith("all that is behind leads back to the tier that asks; backend lab: not reached yet")


async def test_what_the_policy_keeps_out_does_not_count() -> None:
    behind = FakeReplica(info("fp32", remote=True), VirtualClock())
    told = tier(behind, policy="local-only").readiness()
    assert not told.ready
    assert "`local-only` keeps to local-only" in told.why
    assert tier(behind, FakeReplica(info("int8"), VirtualClock()), policy="local-only").readiness().ready


async def test_a_tier_of_nothing_says_so() -> None:
    assert tier().readiness().why == "no model is served here, and nothing is behind"
