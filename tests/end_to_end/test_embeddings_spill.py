"""Embeddings on the cloud tier (torch, in a process of its own), and an agent that overflows to it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
import psutil
import pytest
import pytest_asyncio

from cloud_tier.config import CloudConfig, ModelConfig, ServerConfig
from cloud_tier.plan import make_plan
from cloud_tier.server import CloudTier
from edge_agent.config import AgentSettings, EdgeConfig, GatewaySettings, LocalModels, UpstreamSettings
from router.gateway.listener import bind
from router.upstream.settings import BackendModel, BackendSettings
from tests.support.agents import served
from tests.support.embedding import FAMILY, TEXTS, reference
from tests.support.waiting import until, until_answered

pytestmark = [pytest.mark.real_model, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def expected(models_root: Path) -> npt.NDArray[np.float32]:
    return reference(models_root / FAMILY / "source", TEXTS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cloud(models_root: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = CloudConfig(
        server=ServerConfig(port=0, models_dir=str(models_root), drain_s=1.0),
        models=(ModelConfig(variant=FAMILY, device="cpu", threads=1),),
    )
    bound = bind("127.0.0.1", 0, "server")
    with contextlib.closing(bound):
        tier = CloudTier(make_plan(config))
        running = asyncio.create_task(tier.run(bound))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}", timeout=60) as client:
            await until(lambda: tier.ready()[0] or running.done(), 60)
            if running.done():
                running.result()
            yield client
        tier.stop()
        await asyncio.wait_for(running, 60)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent(cloud: httpx.AsyncClient, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """An agent with no model of its own."""
    config = EdgeConfig(
        agent=AgentSettings(cache_dir=str(tmp_path_factory.mktemp("cache"))),
        gateway=GatewaySettings(port=0),
        models=LocalModels(variants=(), preload=()),
        upstream=UpstreamSettings(url=str(cloud.base_url), poll_interval_s=0.2),
    )
    async with served(config) as (_, client):
        await until_answered(lambda: _knows(client))
        yield client


async def _knows(client: httpx.AsyncClient) -> bool:
    return FAMILY in {card["id"] for card in (await client.get("/v1/models")).json()["data"]}


def rows(reply: httpx.Response) -> npt.NDArray[np.float32]:
    assert reply.status_code == 200, reply.text
    coded = [base64.b64decode(item["embedding"]) for item in reply.json()["data"]]
    return np.stack([np.frombuffer(row, "<f4") for row in coded])


def body(**more: object) -> dict[str, object]:
    return {"model": FAMILY, "input": list(TEXTS), "encoding_format": "base64", **more}


async def test_the_cloud_equals_the_reference(cloud: httpx.AsyncClient, expected: npt.NDArray[np.float32]) -> None:
    reply = await cloud.post("/v1/embeddings", json=body())
    assert np.abs(rows(reply) - expected).max() < 1e-3
    assert np.abs(rows(reply) - expected).max() < 5e-6
    assert reply.headers["x-overspill-model"] == f"{FAMILY}-fp32"
    assert reply.headers["x-overspill-tier"] == "cloud"


async def test_what_the_device_lacks_comes_from_the_cloud(agent: httpx.AsyncClient, cloud: httpx.AsyncClient) -> None:
    there, here = await cloud.post("/v1/embeddings", json=body()), await agent.post("/v1/embeddings", json=body())
    assert np.array_equal(rows(here), rows(there))
    assert here.json()["usage"] == there.json()["usage"]
    assert here.headers["x-overspill-tier"] == "cloud"
    short = await agent.post("/v1/embeddings", json=body(dimensions=32))
    assert rows(short).shape == (len(TEXTS), 32)


async def test_a_backend_that_embeds_is_passed_calls(
    cloud: httpx.AsyncClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The cloud tier stands in for a server of OpenAI's API: the agent knows nothing else of it."""
    model = BackendModel(served=f"{FAMILY}-fp32", variant="vectors", tasks=("embed",), context_tokens=256)
    backend = BackendSettings(
        name="b", urls=(str(cloud.base_url),), server="plain", local=True, poll_interval_s=0.2, models=(model,)
    )
    config = EdgeConfig(
        agent=AgentSettings(cache_dir=str(tmp_path_factory.mktemp("cache"))),
        gateway=GatewaySettings(port=0),
        models=LocalModels(variants=(), preload=()),
        backends=(backend,),
    )
    async with served(config) as (_, client):

        async def listed() -> bool:
            return "vectors" in {card["id"] for card in (await client.get("/v1/models")).json()["data"]}

        await until_answered(listed)
        there = await cloud.post("/v1/embeddings", json=body())
        local = {"x-overspill-locality": "local-only"}
        here = await client.post("/v1/embeddings", json=body(model="vectors"), headers=local)
        assert np.array_equal(rows(here), rows(there))
        refused = await client.post("/v1/embeddings", json=body(model="vectors", dimensions=4000))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")
        chat = {"model": "vectors", "messages": [{"role": "user", "content": "hi"}]}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 400


async def test_local_only_stays_here(agent: httpx.AsyncClient) -> None:
    reply = await agent.post("/v1/embeddings", json=body(), headers={"x-overspill-locality": "local-only"})
    assert reply.status_code == 503
    assert "locality" in reply.json()["error"]["message"]


async def test_the_cloud_s_refusals_reach_the_caller(agent: httpx.AsyncClient) -> None:
    reply = await agent.post("/v1/embeddings", json=body(dimensions=4000))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "dimensions")
    reply = await agent.post("/v1/embeddings", json=body(input="word " * 300))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def children() -> list[int]:
    """Return the processes that multiprocessing has begun for this one."""
    found = psutil.Process().children()
    return [process.pid for process in found if any("spawn_main" in word for word in process.cmdline())]


async def test_a_killed_encoder_comes_back(cloud: httpx.AsyncClient, expected: npt.NDArray[np.float32]) -> None:
    of_encoder = await asyncio.to_thread(children)
    assert of_encoder
    for pid in of_encoder:
        os.kill(pid, signal.SIGKILL)

    async def answers() -> httpx.Response | None:
        reply = await cloud.post("/v1/embeddings", json=body())
        return reply if reply.status_code == 200 else None

    reply = await until_answered(answers, 60)
    assert np.abs(rows(reply) - expected).max() < 5e-6
