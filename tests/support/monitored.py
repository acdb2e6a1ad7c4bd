"""Both tiers with all that an operator watches: engines, GPUs, a device in a fleet, and traffic that goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trustme

import cloud_tier.server
from cloud_tier.config import CloudConfig, ModelConfig, ServerConfig
from cloud_tier.gpu_watch import GpuWatch
from cloud_tier.lineup import line_up
from cloud_tier.plan import Plan
from cloud_tier.server import CloudTier, Phase
from edge_agent.daemon import EdgeAgent
from models.catalogue.families import load_catalogue
from models.store.store import ModelStore
from router.gateway.listener import bind
from router.tenants.tenancy import KeySources
from tests.support.fake_engine import FakeEngine, toy_model_directory
from tests.support.fake_nvml import Card, Nvml
from tests.support.tiny_store import TinyWorld
from tests.support.waiting import until

PROMISE = {"x-overspill-deadline-ms": "20000", "x-overspill-ttft-slo-ms": "10000", "x-overspill-tpot-slo-ms": "5000"}


@dataclasses.dataclass(frozen=True, slots=True)
class Monitored:
    """Two tiers that have served.

    Attributes:
        edge, cloud: clients of their gateways.
        engines: those of the cloud, the best first.
    """

    edge: httpx.AsyncClient
    cloud: httpx.AsyncClient
    engines: list[FakeEngine]

    async def pages(self) -> dict[str, str]:
        """Scrape both."""
        return {name: (await getattr(self, name).get("/metrics")).text for name in ("edge", "cloud")}

    async def ask(self, client: httpx.AsyncClient, model: str, **headers: str) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 12, "temperature": 0}
        return await client.post("/v1/chat/completions", json=body, headers=headers)

    async def traffic(self) -> None:
        """Answers, kept promises, a refusal, a stream that breaks and goes on, an engine that dies and comes back."""
        for client, model in ((self.edge, "tiny"), (self.cloud, "toy"), (self.edge, "toy")):
            for _ in range(3):
                reply = await self.ask(client, model, **PROMISE)
                assert reply.status_code == 200, reply.text
        assert (await self.ask(self.edge, "tiny", **{"x-overspill-min-quality": "1.0"})).status_code >= 400
        best = self.engines[0]
        best.may_go_on.clear()
        broken = asyncio.ensure_future(self.ask(self.cloud, "toy"))
        await until(lambda: best.open)
        best.die()
        assert (await broken).status_code == 200
        best.may_go_on.set()
        best.revive()
        await until(lambda: best.ready)


def _plan(toy: Path) -> Plan:
    entries = tuple(
        ModelConfig(path=str(toy), name=name, family="toy", rung=rung, quality=1.0 - rung / 10, device="cpu")
        for rung, name in enumerate(("toy-best", "toy-small"))
    )
    catalogue = load_catalogue()
    config = CloudConfig(server=ServerConfig(port=0, warm_up=False), models=entries)
    return Plan(config, line_up(entries, catalogue, ModelStore(toy, catalogue)), catalogue, KeySources.of({}), "")


@contextlib.asynccontextmanager
async def monitored(world: TinyWorld, folder: Path) -> AsyncIterator[Monitored]:
    """Run both tiers, and let them serve.

    Args:
        folder: for the cloud's model and the device's state.
    """
    engines: list[FakeEngine] = []

    def make(config: object, clock: object) -> FakeEngine:
        engines.append(FakeEngine(config, clock))  # type: ignore[arg-type]
        return engines[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cloud_tier.server, "GpuWatch", lambda clock: GpuWatch(clock, lambda: Nvml(Card("H100"))))
        tier = CloudTier(_plan(toy_model_directory(folder / "toy")), make)
    bound = bind("127.0.0.1", 0, "server")
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    identity = folder / "device.pem"
    made = trustme.CA().issue_cert("d")
    identity.write_bytes(made.private_key_and_cert_chain_pem.bytes())
    tls = {"cert_file": str(identity), "key_file": str(identity)}
    agent = EdgeAgent(
        world.config(
            agent={"health_interval_s": 600.0},
            fleet={"enabled": True, "port": 1, "device": "d", "state_dir": str(folder / "state"), "tls": tls},
            upstream={"url": url, "poll_interval_s": 0.05},
            decisions={"path": str(folder / "decisions.jsonl")},
        )
    )
    tasks = [asyncio.create_task(tier.run(bound))]
    try:
        await until(lambda: tier.phase is Phase.SERVING or tasks[0].done())
        tasks.append(asyncio.create_task(agent.run()))
        await until(lambda: agent.serving.is_set() or tasks[1].done())
        edge = httpx.AsyncClient(base_url=f"http://127.0.0.1:{agent.port}", timeout=30)
        async with edge, httpx.AsyncClient(base_url=url, timeout=30) as cloud:
            await until(lambda: "toy" in agent.dispatcher.known_models())
            stack = Monitored(edge, cloud, engines)
            await stack.traffic()
            read = await until(lambda: agent.health)
            agent.health = dataclasses.replace(read, temperatures_c={"cpu-thermal": 61.0})  # few machines of CI tell it
            yield stack
        agent.stop()
        tier.stop()
        tier.stop()
        await asyncio.wait(tasks, timeout=30)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        bound.close()
