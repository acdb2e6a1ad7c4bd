"""What autoscalers read is true at every moment, and what an operator is told of the router."""

from __future__ import annotations

import asyncio

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from router.base.errors import OverspillError
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.records.telemetry import Telemetry
from router.values.replica import ReplicaSnapshot, Unreached
from router.values.settings import HedgeSettings, RouterSettings
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import UPSTREAM, FakeReplica, World, info, request, world

WAITING, RUNNING = "overspill_num_requests_waiting", "overspill_num_requests_running"
QUEUE = ""


def by_replica(telemetry: Telemetry, name: str) -> dict[str, float]:
    """Sum a gauge's samples by replica; the tier's own queue has none."""
    found: dict[str, float] = {}
    for family in telemetry.registry.collect():
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels["replica"]] = found.get(sample.labels["replica"], 0.0) + sample.value
    return found


def total(telemetry: Telemetry, name: str) -> float:
    return sum(by_replica(telemetry, name).values())


class Queueing(FakeReplica):
    """Takes three times as many as it runs, as an engine with a queue of its own does."""

    def snapshot(self) -> ReplicaSnapshot:
        return msgspec.structs.replace(super().snapshot(), slots=3 * self.slots)


async def test_24_wait_and_24_are_told() -> None:
    async with world(remote=False, ttft_slo_ms=600_000.0, max_wait_ms=600_000.0) as w:
        w.dispatcher.set_replicas([w.local])
        work = [asyncio.ensure_future(w.ask(max_tokens=24)) for _ in range(28)]
        await w.clock.settle()
        telemetry = w.dispatcher.telemetry
        assert by_replica(telemetry, WAITING) == {QUEUE: 24, "local/tiny-int8": 0}
        assert by_replica(telemetry, RUNNING) == {"local/tiny-int8": 4}
        assert telemetry.registry.get_sample_value(WAITING, {"model_name": "tiny", "replica": QUEUE}) == 24
        status = w.dispatcher.status()
        assert (status.waiting, status.queued, status.running) == (24, 24, 4)
        await w.clock.run(asyncio.gather(*work))
        assert (total(telemetry, WAITING), total(telemetry, RUNNING)) == (0, 0)


async def test_those_that_wait_inside_a_replica_wait_too() -> None:
    clock = VirtualClock()
    engine = Queueing(info("int8"), clock)
    patient = RouterSettings(ttft_slo_ms=600_000.0, max_wait_ms=600_000.0)
    async with Dispatcher([engine], patient, clock=clock) as dispatcher:
        w = World(clock, engine, engine, engine, engine, dispatcher)
        work = [asyncio.ensure_future(w.ask(max_tokens=24)) for _ in range(28)]
        await clock.settle()
        assert by_replica(dispatcher.telemetry, WAITING) == {QUEUE: 16, "local/tiny-int8": 8}
        assert by_replica(dispatcher.telemetry, RUNNING) == {"local/tiny-int8": 4}
        await clock.run(asyncio.gather(*work))


async def test_the_gauges_have_a_value_before_anything_is_known() -> None:
    async with Dispatcher([], RouterSettings(), clock=VirtualClock()) as dispatcher:
        assert by_replica(dispatcher.telemetry, WAITING) == {QUEUE: 0}


async def test_an_answer_that_has_begun_does_not_wait_whatever_its_replica_says() -> None:
    async with world() as w:
        running = await w.clock.run(w.dispatcher.start(request(w.clock, max_tokens=24)))
        w.local.open += 7  # others', who wait there
        status = w.dispatcher.status()
        assert (status.running, status.waiting) == (1, 0)
        w.local.open -= 7
        await running.chunks.aclose()


async def test_what_others_run_on_a_replica_is_not_counted_as_ours() -> None:
    async with world() as w:
        w.cloud.others = 5
        work = asyncio.ensure_future(w.ask(prompt_tokens=3000, max_tokens=4))  # only the cloud's window holds it
        await w.clock.settle()
        assert total(w.dispatcher.telemetry, RUNNING) == 1
        there = next(r for r in w.dispatcher.status().replicas if r.replica == f"{UPSTREAM}/tiny-fp32")
        assert (there.running, there.load_running, there.remote) == (1, 6, True)
        await w.clock.run(work)


async def test_an_operator_is_told_of_breakers_and_why() -> None:
    async with world() as w:
        for _ in range(3):
            w.dispatcher.probe_failed(UPSTREAM, "no answer")
        w.small.available = False
        status = w.dispatcher.status()
    by_name = {replica.replica: replica for replica in status.replicas}
    cloud, small = by_name[f"{UPSTREAM}/tiny-fp32"], by_name["local/tiny-pruned-int8"]
    assert (cloud.breaker, cloud.breaker_why) == ("open", "no answer")
    assert (small.available, small.why, small.breaker) == (False, "switched off", "closed")
    assert [by_name[name].rung for name in ("local/tiny-int8", "local/tiny-pruned-int8")] == [1, 3]


async def test_an_operator_is_told_of_what_was_never_reached() -> None:
    async with world() as w:
        assert w.dispatcher.status().unreached == ()
        w.dispatcher.expect(lambda: [Unreached("backend away", "connection refused")])
        (told,) = w.dispatcher.status().unreached
    assert told.startswith("backend away: not reached yet")
    assert told.endswith("connection refused")


@settings(max_examples=40)
@given(
    arrivals=st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 20)), min_size=1, max_size=30),
    faults=st.lists(st.sampled_from(["unreachable", ("break", 2), ("refuse", 0.2), None]), max_size=6),
)
def test_waiting_and_running_are_all_that_were_accepted_and_not_ended(arrivals: list, faults: list) -> None:
    """Conservation: whenever all is still, each open request is counted once. Hedges, which run twice, are off."""

    async def check() -> None:
        async with world(hedge=HedgeSettings(enabled=False), max_queue=1000) as w:
            w.local.faults, w.cloud.faults = list(faults), list(reversed(faults))
            opened = ended = 0

            async def ask(at_s: float, tokens: int) -> None:
                nonlocal opened, ended
                await w.clock.sleep(at_s)
                opened += 1
                try:
                    await w.ask(max_tokens=tokens)
                except OverspillError:  # refused is ended too
                    pass
                finally:
                    ended += 1

            work = asyncio.gather(*(ask(*arrival) for arrival in arrivals))
            while not work.done():
                await w.clock.step()
                await w.clock.settle()
                status = w.dispatcher.status()
                assert status.waiting + status.running == opened - ended
            assert opened == ended == len(arrivals)

    asyncio.run(check())
