"""Declared pipelines of a whole agent, and what one caller may do there to another."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from PIL import Image

from edge_agent.config import AgentSettings, EdgeConfig, GatewaySettings, LocalModels
from edge_agent.daemon import EdgeAgent
from edge_agent.serving.over_pipeline import OverPipeline
from models.pipelines.declared.settings import PipelineSettings
from tests.support.agents import served

MIB = 2**20
GUEST, MALLORY = "guest-0123456789abcdef", "mallory-0123456789abcdef"
X = {"name": "x", "datatype": "FP32", "shape": [1]}
SICKENS = {
    "name": "own",
    "use": "tests.support.stages:Sickens",
    "inputs": [X],
    "outputs": [{**X, "name": "y"}],
    "max_batch": 16,
}


@asynccontextmanager
async def agent(folder: Path, **pipeline: Any) -> AsyncIterator[tuple[EdgeAgent, httpx.AsyncClient]]:
    """An agent with one pipeline, and two callers with a key of their own."""
    config = EdgeConfig(
        agent=AgentSettings(cache_dir=str(folder)),
        gateway=GatewaySettings(port=0, api_keys=(GUEST, MALLORY)),
        models=LocalModels(variants=(), preload=()),
        pipelines=(msgspec.convert({"name": "own", **pipeline}, PipelineSettings),),
    )
    async with served(config) as (running, client):
        yield running, client


async def ask(client: httpx.AsyncClient, key: str, *numbers: float) -> httpx.Response:
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(numbers), 1], "data": list(numbers)}
    return await client.post(
        "/v2/models/own/infer", json={"inputs": [tensor]}, headers={"authorization": f"Bearer {key}"}
    )


async def test_who_sends_what_fails_again_and_again_has_nothing_loaded_anew(tmp_path: Path) -> None:
    async with agent(tmp_path, stages=[SICKENS]) as (running, client):
        [replica] = running.lineup.replicas
        assert isinstance(replica, OverPipeline)
        assert (await ask(client, GUEST, 4)).json()["outputs"][0]["data"] == [8]
        for _ in range(10):
            bad = await ask(client, MALLORY, 13)
            assert bad.status_code == 503
            assert "thirteen" in bad.json()["error"]
        good, *others = await asyncio.gather(ask(client, GUEST, 5), *(ask(client, MALLORY, 13) for _ in range(7)))
        assert good.status_code == 200, good.text
        assert {other.status_code for other in others} == {503}
        assert replica.facts().cold_starts == 1


async def test_a_stage_that_is_sick_is_loaded_anew_all_the_same(tmp_path: Path) -> None:
    async with agent(tmp_path, stages=[SICKENS]) as (running, client):
        [replica] = running.lineup.replicas
        assert isinstance(replica, OverPipeline)
        assert (await ask(client, GUEST, 4)).status_code == 200
        assert (await ask(client, MALLORY, -1)).status_code == 503  # from now on it fails on everything
        statuses = [(await ask(client, GUEST, 5)).status_code for _ in range(4)]
        while statuses[-1] != 200 and len(statuses) < 100:  # the third failure has it tried, beside the event loop
            await asyncio.sleep(0.02)
            statuses.append((await ask(client, GUEST, 5)).status_code)
        assert statuses[-1] == 200, statuses
        assert replica.facts().cold_starts == 2


@pytest.mark.process
async def test_who_ends_a_stage_s_process_again_and_again_is_told_to_wait_and_nobody_else(tmp_path: Path) -> None:
    deadly = {**SICKENS, "use": "tests.support.stages:deadly", "pool": "processes"}
    async with agent(tmp_path, stages=[deadly]) as (_, client):
        assert (await ask(client, GUEST, 1)).status_code == 200  # else three ends have all of it loaded anew
        for number in range(1, 4):
            assert "ended with code 9" in (await ask(client, MALLORY, -number)).json()["error"]
        process = (await ask(client, GUEST, 1)).json()["outputs"][0]["data"]
        for number in (-4, -5, 6):
            late = await ask(client, MALLORY, number)
            assert late.status_code == 503
            assert "its process has ended on 3 inputs of yours" in late.json()["error"]
            assert int(late.headers["retry-after"]) > 0
        assert (await ask(client, GUEST, 1)).json()["outputs"][0]["data"] == process, "it was begun anew"


async def test_images_that_one_caller_sends_take_no_more_of_the_memory_than_the_bound(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (640, 640)).save(file, "PNG")  # 2 KB, and 1.2 MB decoded
    decode = {"name": "decode", "use": "decode-image"}
    own = {"name": "own", "use": "tests.support.stages:sizes", "inputs": [PIXELS], "outputs": [SIDES]}
    async with agent(tmp_path, stages=[decode, own], queue_mib=4) as (running, client):
        [replica] = running.lineup.replicas
        assert isinstance(replica, OverPipeline)
        mallory = asyncio.create_task(show(client, MALLORY, [file.getvalue()] * 60))
        most, seen = 0, 0
        while not mallory.done():
            held = sum(stage.size_bytes for stage in replica.pipeline.stages)
            most, seen = max(most, held), seen + 1
            if seen == 20:
                assert (await show(client, GUEST, [file.getvalue()])).json()["outputs"][0]["data"] == [640, 640]
            await asyncio.sleep(0.001)
        assert (await mallory).status_code == 200
        assert most < 4 * MIB + 2 * 640 * 640 * 3, "beyond the bound, no more than what is on its way"


PIXELS = {"name": "pixels", "datatype": "UINT8", "shape": [-1, -1, 3]}
SIDES = {"name": "sides", "datatype": "INT64", "shape": [2]}


async def show(client: httpx.AsyncClient, key: str, files: list[bytes]) -> httpx.Response:
    data = b"".join(len(file).to_bytes(4, "little") + file for file in files)
    size = {"binary_data_size": len(data)}
    image = {"name": "image", "shape": [len(files), 1], "datatype": "BYTES", "parameters": size}
    head = msgspec.json.encode({"inputs": [image]})
    headers = {"authorization": f"Bearer {key}", "inference-header-content-length": str(len(head))}
    return await client.post("/v2/models/own/infer", content=head + data, headers=headers)
