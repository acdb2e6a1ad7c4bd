"""Killed processes and shut-downs: nothing hangs, streams in flight finish, nothing is left behind."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from examples.demo.processes import overspill
from examples.demo.stack import API_KEY, DEVICE, FLEET, Stack, StackOptions
from examples.demo.traffic import Ask, Reply, send
from tests.support.waiting import until_answered

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

CHAT = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hello"}]}
LONG = "Write a long story about a lighthouse keeper and the sea."


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.edge_url}/v1", api_key="x", max_retries=0, timeout=90) as sdk:
        yield sdk


async def test_killed_engine_is_restarted_and_no_request_waits_forever(stack: Stack) -> None:
    before = set(stack.engine_pids())
    killed: list[int] = []

    def kill_one_rank(reply: Reply) -> None:
        if len(reply.text) > 20 and not killed:
            killed.append(stack.kill_engine())

    async with openai.AsyncOpenAI(
        base_url=f"{stack.cloud_url}/v1", api_key=API_KEY, max_retries=0, timeout=90
    ) as cloud:
        asks = [send(cloud, Ask(LONG, max_tokens=80), kill_one_rank) for _ in range(4)]
        replies = await asyncio.wait_for(asyncio.gather(*asks), 120)
        assert killed
        for reply in replies:
            told = reply.outcome == "failed" and reply.error.startswith("APIError:")  # an error event in the stream
            assert reply.served or reply.refused_properly or told, reply

        async def is_back() -> bool:
            pinned = Ask("What is the capital of France?", max_tokens=8, model="smollm2-135m-fp32")
            return (await asyncio.wait_for(send(cloud, pinned), 60)).served

        await until_answered(is_back, 180, every_s=0.2)
    assert killed[0] in before
    assert not psutil.pid_exists(killed[0]) or psutil.Process(killed[0]).status() == psutil.STATUS_ZOMBIE


async def test_cloud_killed_in_mid_stream_is_finished_on_the_edge(stack: Stack, client: openai.AsyncOpenAI) -> None:
    def cut(reply: Reply) -> None:
        if len(reply.text) > 30 and stack.cloud.running:
            stack.cloud.kill()

    broker = f"127.0.0.1:{stack.broker_port}"
    fleet_set = overspill("fleet", "set", DEVICE, "--fleet", FLEET, "--broker", broker, "--replace")
    await asyncio.to_thread(subprocess.run, [*fleet_set, "router.policy=cloud-first"], check=True, timeout=60)
    patient = {"x-overspill-ttft-slo-ms": "60000"}  # so that the cloud is first on a slow machine too
    ask = Ask(LONG, max_tokens=64, headers={"x-request-id": "broken-stream", **patient})
    try:
        reply = await asyncio.wait_for(send(client, ask, cut), 90)
        record = await stack.decision("broken-stream")
        after = await send(client, Ask("What is the capital of France?", max_tokens=8))
    finally:
        await asyncio.to_thread(subprocess.run, [*fleet_set, "router.policy=slo-utility"], check=True, timeout=60)
        if not stack.cloud.running:
            stack.start_cloud_again()
        await stack.cloud_ready()
    assert reply.tier == "cloud"
    assert reply.served, reply.error
    assert "failover" in [event["event"] for event in record["events"]]
    assert reply.completion_tokens == record["tokens"] <= 64
    assert after.served
    assert after.tier == "edge"


@pytest.mark.parametrize("part", ["edge", "cloud"])
async def test_sigterm_lets_streams_finish(tmp_path: Path, models_root: Path, part: str) -> None:
    options = StackOptions(broker=False, cloud=part == "cloud", tensor_parallel=1)
    async with Stack(tmp_path, options) as own:
        child, url = (own.edge, own.edge_url) if part == "edge" else (own.cloud, own.cloud_url)
        stopping: list[asyncio.Task[int | None]] = []

        def terminate(reply: Reply) -> None:
            if len(reply.text) > 20 and not stopping:
                stopping.append(asyncio.create_task(child.stop(grace_s=60)))

        children = psutil.Process(child.pid).children(recursive=True)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0, timeout=60) as sdk:
            reply = await send(sdk, Ask(LONG, max_tokens=96, full_length=True), terminate)
            assert reply.served, reply.error
            assert reply.completion_tokens == 96
        assert await stopping[0] == 0
        assert not [process for process in children if process.is_running()]


async def test_draining_refuses_new_requests_with_a_time_to_come_back(tmp_path: Path, models_root: Path) -> None:
    async with Stack(tmp_path, StackOptions(broker=False, cloud=False)) as own:
        refused: list[httpx.Response] = []

        async def stop_and_ask() -> int | None:
            stopping = asyncio.create_task(own.edge.stop(grace_s=60))
            async with httpx.AsyncClient(timeout=60) as plain:
                while (response := await plain.get(f"{own.edge_url}/health/ready")).status_code == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                refused.append(response)
                refused.append(await plain.post(f"{own.edge_url}/v1/chat/completions", json=CHAT))
            return await stopping

        tasks: list[asyncio.Task[int | None]] = []

        def terminate(reply: Reply) -> None:
            if len(reply.text) > 20 and not tasks:
                tasks.append(asyncio.create_task(stop_and_ask()))

        async with openai.AsyncOpenAI(base_url=f"{own.edge_url}/v1", api_key="x", max_retries=0, timeout=60) as sdk:
            assert (await send(sdk, Ask(LONG, max_tokens=200, full_length=True), terminate)).served
        assert await tasks[0] == 0
        assert len(refused) == 2
        for response in refused:
            assert response.status_code == 503
            assert response.headers["retry-after"]
