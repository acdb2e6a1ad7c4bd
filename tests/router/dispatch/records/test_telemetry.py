"""What operators see: metrics that add up."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client import generate_latest

from router.base.errors import OverspillError
from router.dispatch.records.telemetry import Telemetry
from tests.support.router_fakes import UPSTREAM, request, world


def sample(telemetry: Telemetry, name: str, **labels: str) -> float:
    return telemetry.registry.get_sample_value(name, labels) or 0.0


async def test_requests_are_counted_by_outcome_and_reason():
    async with world() as w:
        await w.clock.run(w.ask(max_tokens=4))
        await w.clock.run(w.ask(prompt_tokens=3000, max_tokens=4))
        with pytest.raises(OverspillError):
            await w.clock.run(w.ask(prompt_tokens=9000))
        telemetry, name = w.dispatcher.telemetry, "overspill_requests_total"
        done = {"outcome": "completed"}
        assert sample(telemetry, name, tier="edge", variant="tiny-int8", reason="device-first", **done) == 1
        assert sample(telemetry, name, tier="cloud", variant="tiny-fp32", reason="context", **done) == 1
        assert sample(telemetry, name, tier="none", variant="none", reason="invalid", outcome="invalid") == 1
        assert sample(telemetry, "overspill_generated_tokens_total", tier="edge", variant="tiny-int8") == 4
        assert sample(telemetry, "overspill_ttft_seconds_count", tier="edge", variant="tiny-int8") == 1
        assert sample(telemetry, "overspill_tpot_seconds_count", tier="edge", variant="tiny-int8") == 1
        assert sample(telemetry, "overspill_e2e_seconds_count", tier="edge", variant="tiny-int8") == 1
        assert sample(telemetry, "overspill_ttft_predictions_total", within_p90="yes") == 2


async def test_gauges_show_queue_breakers_and_overload():
    async with world(remote=False, max_queue=4, overload_enter=0.5, ttft_slo_ms=60_000.0) as w:
        import asyncio

        w.dispatcher.set_replicas([w.local])
        work = [asyncio.ensure_future(w.ask(max_tokens=24)) for _ in range(7)]
        await w.clock.settle()
        telemetry = w.dispatcher.telemetry
        assert sample(telemetry, "overspill_num_requests_waiting", model_name="tiny", replica="") == 3
        here = {"model_name": "tiny-int8", "replica": "local/tiny-int8"}
        assert sample(telemetry, "overspill_num_requests_running", **here) == 4
        assert sample(telemetry, "overspill_overloaded") == 1
        for _ in range(3):
            w.dispatcher.probe_failed(UPSTREAM, "no answer")
        assert sample(telemetry, "overspill_breaker_state", endpoint=UPSTREAM) == 2
        assert sample(telemetry, "overspill_breaker_changes_total", endpoint=UPSTREAM, state="open") == 1
        await w.clock.run(asyncio.gather(*work))
        assert sample(telemetry, "overspill_num_requests_waiting", model_name="tiny", replica="") == 0


async def test_failovers_and_step_downs_are_counted():
    async with world() as w:
        w.local.faults = [("break", 2)]
        await w.clock.run(w.ask(max_tokens=8))
        w.local.faults = ["unreachable"]
        await w.clock.run(w.ask(max_tokens=8))
        telemetry, name = w.dispatcher.telemetry, "overspill_failovers_total"
        assert sample(telemetry, name, stage="mid_stream", endpoint="local") == 1
        assert sample(telemetry, name, stage="before_first_token", endpoint="local") == 1
        w.dispatcher.set_replicas([w.local, w.small])
        w.local.others = 4
        await w.clock.run(w.ask(max_tokens=8, ttft_s=0.2))
        assert sample(telemetry, "overspill_step_downs_total", variant="tiny-pruned-int8") == 1


async def test_every_metric_has_the_prefix_and_a_help_text():
    async with world() as w:
        await w.clock.run(w.read(request(w.clock, max_tokens=2)))
        text = generate_latest(w.dispatcher.telemetry.registry).decode()
        kinds = Counter(line.split()[0] + line.split()[1] for line in text.splitlines() if line.startswith("# "))
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
        assert all(name.startswith("overspill_") for name in names)
        assert all(len(line.split(maxsplit=3)) == 4 for line in text.splitlines() if line.startswith("# HELP"))
        assert kinds["#HELP"] == kinds["#TYPE"]


def test_registries_are_separate():
    assert Telemetry().registry is not Telemetry().registry
