"""What autoscalers read of a running tier, and a model that goes to no replica and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from cloud_tier.config import CloudConfig, ModelConfig, ServerConfig
from cloud_tier.lineup import line_up
from cloud_tier.plan import Plan
from cloud_tier.scaling.settings import ScalingSettings
from cloud_tier.server import CloudTier, Phase
from models.catalogue.families import load_catalogue
from models.store.store import ModelStore
from router.gateway.listener import bind
from router.tenants.tenancy import KeySources
from router.upstream.settings import BackendSettings
from router.values.request import SLACK_PRIORITY
from router.values.settings import RouterSettings
from tests.support.fake_engine import FakeEngine, toy_model_directory
from tests.support.waiting import until

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Where?"}], "temperature": 0}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return toy_model_directory(tmp_path / "toy")


def _plan(toy: Path, **tables) -> Plan:
    models = (ModelConfig(path=str(toy), name="toy-best", family="toy", device="cpu"),)
    config = CloudConfig(
        **{
            "server": ServerConfig(port=0, warm_up=False, drain_s=1.0),
            "models": models,
            "router": RouterSettings(max_wait_ms=60_000.0),
            **tables,
        }
    )
    catalogue = load_catalogue()
    specs = line_up(config.models, catalogue, ModelStore(toy, catalogue)) if config.models else ()
    return Plan(config, specs, catalogue, KeySources.of({}), "")


@contextlib.asynccontextmanager
async def serving(plan: Plan, make: Callable = FakeEngine, port: int = 0) -> AsyncIterator[tuple[CloudTier, str]]:
    """Run a tier; gives it and its URL."""
    bound = bind("127.0.0.1", port, "server")
    tier = CloudTier(plan, make)
    task = asyncio.create_task(tier.run(bound))
    try:
        await until(lambda: tier.phase is Phase.SERVING or task.done())
        yield tier, f"http://127.0.0.1:{bound.getsockname()[1]}"
        tier.stop()
        tier.stop()
        await asyncio.wait_for(task, 60)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        bound.close()


async def test_an_autoscaler_reads_how_many_there_should_be(toy: Path) -> None:
    """`valueLocation: desired` of KEDA's metrics-api scaler, and the gauge."""
    async with serving(_plan(toy)) as (tier, url), httpx.AsyncClient(base_url=url, timeout=10) as client:
        for _ in range(3):
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        tier.scale.look()
        told = (await client.get("/v1/scale")).json()
        assert (told["desired"], told["now"], told["starting"]) == (1, 1, 0)
        assert told["inputs"]["slots_a_replica"] == 4
        assert told["inputs"]["forecast_per_s"] > 0
        assert "requests a second" in told["why"]
        assert 0 < told["load"] <= 1
        metrics = (await client.get("/metrics")).text
        assert 'overspill_desired_replicas{model="tier"} 1.0' in metrics
        assert f'overspill_needed_replicas{{model="tier"}} {told["load"]}'[:45] in metrics
        assert (await client.get("/v1/scale/unknown")).status_code == 404


async def test_many_that_wait_are_told_as_need(toy: Path) -> None:
    async with serving(_plan(toy, scaling=ScalingSettings(unit="replica", max_replicas=7))) as (tier, url):
        engine = tier.replicas[0].engine
        assert isinstance(engine, FakeEngine)
        engine.may_go_on.clear()
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            asked = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(24)]
            await until(lambda: engine.open == 4)
            await asyncio.sleep(0.05)
            for _ in range(2):
                await asyncio.sleep(0.02)
                tier.scale.look()
            told = (await client.get("/v1/scale/toy")).json()
            whole = (await client.get("/v1/scale")).json()
            engine.may_go_on.set()
            assert [reply.status_code for reply in await asyncio.gather(*asked)] == [200] * 24
    assert told["inputs"]["waiting"] == 20
    assert told["inputs"]["running"] == 4
    assert told["desired"] == 7
    assert told["ready_in_s"] > 30
    assert whole["desired"] == 7
    assert whole["models"]["toy"]["desired"] == 7


@pytest.mark.parametrize("gone", ["unlisted", "dead"])
async def test_a_request_waits_for_a_replica_where_there_is_none(toy: Path, tmp_path: Path, gone: str) -> None:
    """The site's router stays; its only backend goes, a request comes, a backend comes back, and it is answered."""
    listed = tmp_path / "servers"
    backend = BackendSettings(
        name="gpu", kind="overspill", file=str(listed), refresh_s=0.05, poll_interval_s=0.05, warm_up=False
    )
    scaling = ScalingSettings(unit="replica", min_replicas=0, cold_start_s=4.0, idle_s=3600.0)
    listed.write_text("")
    plan = _plan(toy, models=(), backends=(backend,), scaling=scaling)
    async with serving(plan) as (tier, url), httpx.AsyncClient(base_url=url, timeout=30) as client:
        async with serving(_plan(toy)) as (_, server):
            listed.write_text(server)
            await until(lambda: _look(tier).get("now") == 1)
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            assert (await client.get("/v1/scale/toy")).json()["now"] == 1
        if gone == "unlisted":
            listed.write_text("")
        await until(lambda: _look(tier) and tier.scale.absent())
        assert (await client.get("/health/ready")).status_code == 200
        held = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await until(lambda: _look(tier)["inputs"]["waiting"] == 1)
        told = (await client.get("/v1/scale/toy")).json()
        assert told["desired"] == 1
        assert 0 < told["ready_in_s"] <= 4.0
        in_vain = await client.post("/v1/chat/completions", json=CHAT, headers={"x-overspill-deadline-ms": "300"})
        assert in_vain.status_code == 503
        assert float(in_vain.headers["retry-after-ms"]) > 1000
        async with serving(_plan(toy)) as (_, server):
            listed.write_text(server)
            reply = await asyncio.wait_for(held, 60)
            assert reply.status_code == 200
            assert reply.json()["choices"][0]["message"]["content"] == FakeEngine.says
            assert 2000 < float(reply.headers["x-overspill-predicted-ttft-ms"]) < 8000
            await until(lambda: _look(tier) and not tier.scale.absent())


def _look(tier: CloudTier) -> dict:
    tier.scale.look()
    return dict(tier.scale.report("toy") or {})


def test_holding_requests_needs_the_time_to_hold_them() -> None:
    tables = {"scaling": {"unit": "replica", "min_replicas": 0}, "router": {"max_wait_ms": 30000.0}}
    with pytest.raises(msgspec.ValidationError, match="set it to 90000"):
        msgspec.convert(tables, CloudConfig)
    assert msgspec.convert({**tables, "router": {"max_wait_ms": 90000.0}}, CloudConfig).scaling.min_replicas == 0


@pytest.mark.parametrize("counts", [False, True])
async def test_lines_of_batches_are_demand_only_where_that_is_asked_for(toy: Path, counts: bool) -> None:
    """Requests of the lowest priority, which lines have, and callers may ask for."""
    scaling = ScalingSettings(max_replicas=50, cold_start_s=1.0, batches=counts)
    engines: list[FakeEngine] = []

    def make(*arguments: Any) -> FakeEngine:
        engines.append(FakeEngine(*arguments))
        engines[-1].may_go_on.clear()
        return engines[-1]

    async with serving(_plan(toy, scaling=scaling), make) as (tier, url), httpx.AsyncClient(base_url=url) as http:
        lowest = {"x-overspill-priority": str(SLACK_PRIORITY)}
        work = [asyncio.create_task(http.post("/v1/chat/completions", json=CHAT, headers=lowest)) for _ in range(12)]
        await until(lambda: engines[0].open == 4)
        await asyncio.sleep(1.2)
        tier.scale.look()
        load = tier.scale.report()["load"]
        assert (load > 0.5) is counts
        engines[0].may_go_on.set()
        await asyncio.gather(*work)
