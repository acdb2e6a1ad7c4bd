"""What goes wrong in one request, one reading or one reader stays there: all others are decided and bounded."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from prometheus_client import generate_latest

from router.base.errors import OverspillError, Shed, Unavailable
from router.dispatch.assessment.candidates import assess
from router.dispatch.binding import binder
from router.dispatch.journey import outcomes
from router.policy.registry import POLICIES
from router.values.prediction import Demand, InFlightLoad
from router.values.settings import BreakerSettings
from tests.support.router_fakes import UPSTREAM, answer, request, world


def broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError("a bug")


async def everyone(w, asks: list) -> list:
    return await w.clock.run(asyncio.gather(*asks, return_exceptions=True))


def metric(w, name: str) -> float:
    lines = generate_latest(w.dispatcher.telemetry.registry).decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[-1])


async def test_one_bad_reading_while_somebody_gives_up_ends_no_time_limit():
    patient = {"max_wait_ms": 2000.0, "overload_enter": 1.0, "ttft_slo_ms": 80_000.0}
    async with world(remote=False, **patient) as w:
        real = w.local.snapshot

        def bad_at_the_limit():
            if w.clock.now_s() >= began_s + 2.0:
                raise RuntimeError("one bad reading")
            return real()

        began_s, w.local.snapshot = w.clock.now_s(), bad_at_the_limit
        asks = [w.ask(max_tokens=1500, ignore_eos=True, model="tiny-int8") for _ in range(12)]
        ended = await everyone(w, asks)
        assert sum(isinstance(one, Unavailable) for one in ended) == 8
        w.nothing_is_held()


async def test_a_replica_whose_load_cannot_be_read_is_left_out_and_said_once():
    async with world() as w:
        w.local.snapshot = broken
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                route, _ = await w.clock.run(w.ask(max_tokens=8))
                assert route.variant == "tiny-fp32"
        assert [log["replica"] for log in logs if log["event"] == "load unreadable"] == ["local/tiny-int8"]
        with pytest.raises(Unavailable, match="cannot be read"):
            await w.clock.run(w.ask(model="tiny-int8"))


def warnings(logs: list) -> list[str]:
    return [log["state"] for log in logs if log["event"] == "breaker" and log["log_level"] == "warning"]


@pytest.mark.parametrize("tokens", [0, 5])
async def test_the_same_replica_goes_on_once_this_machine_is_in_another_network(tokens: int) -> None:
    async with world(remote=False) as w:
        w.local.faults = [("left", tokens)] * 2
        _, text = await w.clock.run(w.ask(model="tiny-int8"))
        assert text == answer(24)
        assert [len(sent.continuation.split()) for sent in w.local.sent] == [0, tokens, 2 * tokens]
        assert w.dispatcher.breaker_states()["local/tiny-int8"] == "closed"
        w.nothing_is_held()


async def test_a_network_that_is_left_again_and_again_ends_a_request() -> None:
    async with world(remote=False) as w:
        w.local.faults = [("left", 0)] * 50
        with pytest.raises(OverspillError, match="left the network"):
            await w.clock.run(w.ask(model="tiny-int8"))
        assert len(w.local.sent) <= 5
        w.nothing_is_held()


async def test_an_endpoint_that_stays_away_is_told_of_once():
    async with world(breaker=BreakerSettings(failures=2, open_ms=1000.0, max_open_ms=1000.0)) as w:
        for _ in range(2):
            w.local.faults = ["unreachable"] * 17  # two requests and a self-test, then each trial and its self-test
            with structlog.testing.capture_logs() as logs:
                while w.local.faults:  # opens once, and again after each trial
                    await w.clock.run(w.ask(max_tokens=8))
                    await w.clock.advance(1.1)
            assert warnings(logs) == ["open"]
            await w.clock.run(w.ask(max_tokens=8))
            assert w.dispatcher.breaker_states()["local/tiny-int8"] == "closed"
        assert metric(w, 'overspill_breaker_changes_total{endpoint="local/tiny-int8",state="open"}') > 8


async def test_what_probes_find_is_told_by_whoever_probes():
    async with world() as w:
        with structlog.testing.capture_logs() as logs:
            for _ in range(40):
                w.dispatcher.probe_failed(UPSTREAM, "no route")
                await w.clock.advance(1.0)
        assert w.dispatcher.breaker_states()[UPSTREAM] in {"open", "half_open"}
        assert warnings(logs) == []


@pytest.mark.interpreted
async def test_a_request_that_cannot_be_decided_gets_an_error_and_starves_nobody(monkeypatch: pytest.MonkeyPatch):
    async with world(remote=False, ttft_slo_ms=80_000.0) as w:
        sessions = ["good"] * 5 + ["bad"] + ["good"] * 4
        asks = [asyncio.ensure_future(w.ask(model="tiny-int8", session=name)) for name in sessions]
        await w.clock.settle()
        assert w.dispatcher.waiting == 6

        def faulty(asked, look):
            return broken() if asked.request.objective.session == "bad" else assess(asked, look)

        monkeypatch.setattr(binder, "assess", faulty)
        ended = await everyone(w, asks)
        failed = ended.pop(5)
        assert isinstance(failed, OverspillError)
        assert (failed.status, "the log" in failed.message) == (500, True)
        assert [text for _, text in ended] == [answer(24)] * 9
        w.nothing_is_held()


async def test_overload_ends_by_itself_after_a_burst():
    async with world(remote=False, max_queue=8) as w:
        ended = await everyone(w, [w.ask(max_tokens=20) for _ in range(60)])
        assert sum(isinstance(one, Shed) for one in ended) > 40
        await w.clock.advance(10.0)
        assert metric(w, "overspill_overloaded") == 0
        route, _ = await w.clock.run(w.ask(max_tokens=200))
        assert not route.degraded


async def test_a_reader_that_takes_its_time_makes_no_replica_look_slow():
    async with world(remote=False) as w:

        def learnt_s() -> float:
            return w.dispatcher._signals.latency.predict(
                w.local.snapshot(), None, Demand(50, 100), InFlightLoad()
            ).tpot_s

        async def read_slowly() -> None:
            ask = request(w.clock, max_tokens=60, ignore_eos=True, model="tiny-int8")
            async for _ in (await w.dispatcher.start(ask)).chunks:
                await w.clock.sleep(0.5)

        w.local.slower = 1.5
        for _ in range(20):
            await w.clock.run(w.ask(max_tokens=60, ignore_eos=True, model="tiny-int8"))
        brisk_s = learnt_s()
        assert brisk_s == pytest.approx(0.03, rel=0.05)
        for _ in range(3):
            await w.clock.run(read_slowly())
        assert learnt_s() == pytest.approx(brisk_s, rel=0.05), "what was read late was made at that pace too"
        w.nothing_is_held()


async def test_what_was_learnt_of_a_replica_goes_with_it():
    async with world(remote=False) as w:
        w.local.slower = 3.0
        for _ in range(10):
            await w.clock.run(w.ask(model="tiny-int8"))
        w.dispatcher.set_replicas([w.small])
        w.dispatcher.set_replicas([w.local, w.small])
        predicted = w.dispatcher._signals.latency.predict(w.local.snapshot(), None, Demand(50, 100), InFlightLoad())
        assert predicted.tpot_s == pytest.approx(0.02)


async def test_the_log_tells_the_prompt_that_the_caller_sent(monkeypatch: pytest.MonkeyPatch):
    lines = structlog.testing.CapturingLogger()
    monkeypatch.setattr(outcomes, "log", lines)
    async with world() as w:
        w.local.faults = [("break", 10)]
        await w.clock.run(w.ask(prompt_tokens=50, max_tokens=24))
    told = [call.kwargs for call in lines.calls if call.args == ("request",)]
    assert [(line["prompt_tokens"], line["answer_tokens"]) for line in told] == [(50, 24)]


@pytest.mark.interpreted
@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_an_ended_attempt_decides_no_more_requests_than_it_makes_room_for(monkeypatch, policy):
    """Throughput fell with the number of callers: every answer that ended decided everyone who waited again."""
    decided = []

    def counted(pending, pool):
        decided.append(pending.request.request_id)
        return assess(pending, pool)

    monkeypatch.setattr(binder, "assess", counted)
    monkeypatch.setattr(binder, "_RECHECK_S", 1e6)  # what only time asks for is not counted here
    calm = {"max_queue": 1000, "max_wait_ms": 600_000.0, "ttft_slo_ms": 600_000.0, "overload_enter": 1.0}
    async with world(remote=False, policy=policy, **calm) as w:
        results = await everyone(w, [w.ask(max_tokens=4) for _ in range(100)])
        assert {type(result) for result in results} == {tuple}
        assert len(decided) <= 5 * len(results)
