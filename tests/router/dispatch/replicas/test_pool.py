"""The views of replicas: read again where something changed, and everywhere once a moment has passed."""

from __future__ import annotations

from collections import Counter

import pytest

from router.dispatch.binding.queue import RequestQueue
from router.dispatch.replicas.pool import Pool
from router.signals.affinity import Affinity
from router.signals.health import HealthBook
from router.signals.latency import LatencyModel
from router.signals.length import LengthModel
from router.signals.signals import Signals
from router.values.replica import ReplicaSnapshot
from router.values.settings import BreakerSettings, RouterSettings
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import FAMILY, FakeReplica, info


class Counted(FakeReplica):
    reads: Counter[str]

    def snapshot(self) -> ReplicaSnapshot:
        self.reads[self.info.variant.removeprefix(f"{FAMILY}-") + ("@cloud" if self.info.remote else "")] += 1
        return super().snapshot()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def reads() -> Counter[str]:
    return Counter()


@pytest.fixture
async def pool(clock: VirtualClock, reads: Counter[str]) -> Pool:
    """Two rungs that share a device, one with a device of its own, and an upstream with two devices."""
    infos = [info("fp32", device="gpu"), info("int8", device="gpu"), info("pruned-int8")]
    infos += [info("fp32", remote=True), info("int8", remote=True)]
    replicas = [Counted(each, clock) for each in infos]
    for replica in replicas:
        replica.reads = reads
    health = HealthBook(BreakerSettings(), clock, lambda *_: None)
    signals = Signals(LatencyModel(clock), LengthModel(128.0), health, affinity=Affinity(clock))
    pool = Pool(RouterSettings(), signals, clock, RequestQueue())
    pool.set_replicas({replica.info.replica_id: replica for replica in replicas})
    pool.look()
    reads.clear()
    return pool


async def test_what_did_not_change_is_not_read_again(pool: Pool, reads: Counter[str]) -> None:
    moment = pool.moment
    pool.begin_moment()
    pool.look()
    assert not reads
    assert pool.moment == moment


async def test_a_change_on_a_device_reads_the_rungs_that_share_it(pool: Pool, reads: Counter[str]) -> None:
    moment = pool.moment
    pool.changed("gpu")
    pool.look()
    assert reads == {"fp32": 1, "int8": 1}
    assert pool.moment > moment


async def test_a_replica_that_is_as_it_was_keeps_its_view(pool: Pool) -> None:
    views = dict(pool.views)
    moved = pool.replicas[info("int8", device="gpu").replica_id]
    assert isinstance(moved, FakeReplica)
    moved.others = 1
    pool.changed()
    pool.look()
    assert [name for name in views if pool.views[name] is not views[name]] == [moved.info.replica_id]


async def test_what_is_sent_to_an_upstream_counts_for_all_of_it(pool: Pool, reads: Counter[str]) -> None:
    pool.changed(info("int8", remote=True).device_key)  # its replicas share credits and a link
    pool.look()
    assert reads == {"fp32@cloud": 1, "int8@cloud": 1}


async def test_all_is_read_again_after_a_moment_however_busy_one_device_is(
    pool: Pool, reads: Counter[str], clock: VirtualClock
) -> None:
    for _ in range(4):
        clock.pass_s(0.0003)
        pool.begin_moment()
        pool.changed("gpu")
        pool.look()
    assert reads["pruned-int8"] == 1
    assert reads["fp32"] == 4


async def test_rungs_see_what_runs_beside_them(pool: Pool) -> None:
    first, second = (info(name, device="gpu").replica_id for name in ("fp32", "int8"))
    busy = pool.replicas[first]
    assert isinstance(busy, Counted)
    busy.others = busy.slots
    pool.changed("gpu")
    views = pool.look().views
    assert (views[second].own, views[second].occupied) == (0, busy.slots)
    assert not pool.has_room(second)
    busy.others = 0
    pool.changed("gpu")
    assert pool.look().has_room(second)


async def test_a_name_that_nobody_serves_is_not_remembered(pool: Pool) -> None:
    assert pool.served("nobody") is None
    served = pool.served(f"{FAMILY}-int8")
    assert served is not None
    assert len(served.whole.names) == 2
    assert served.sides.pinned
    assert len(served.others) == 3
