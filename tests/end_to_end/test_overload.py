"""200 streaming requests at once against an edge agent with room for a few: every one ends, and says how."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from typing import Any

import httpx
import openai
import psutil
import pytest

from examples.demo.stack import Stack
from examples.demo.traffic import Ask, send
from tests.support.waiting import until

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]


async def test_200_concurrent_streams_all_end_and_memory_comes_back(stack: Stack) -> None:
    process = psutil.Process(stack.edge.pid)
    # The bound on connections is the client's own, not the agent's.
    own: Any = httpx.AsyncClient(limits=httpx.Limits(max_connections=256), timeout=180)  # newer SDKs name another httpx
    async with openai.AsyncOpenAI(
        base_url=f"{stack.edge_url}/v1",
        api_key="none",
        max_retries=0,
        timeout=180,
        http_client=own,
    ) as client:
        # A first, smaller wave: both rungs loaded, pools and arenas at their working size.
        await asyncio.gather(*(send(client, Ask(f"Say hello ({i}).", max_tokens=16)) for i in range(40)))
        before_bytes = process.memory_info().rss
        headers = {"x-overspill-ttft-slo-ms": "8000", "x-overspill-deadline-ms": "30000"}
        asks = [Ask(f"Tell me something about the number {i}.", max_tokens=48, headers=headers) for i in range(200)]
        replies = await asyncio.gather(*(send(client, ask) for ask in asks))
    outcomes = Counter(reply.outcome for reply in replies)
    assert set(outcomes) <= {"completed", "degraded", "shed", "unavailable"}, [
        reply.error for reply in replies if reply.outcome == "failed"
    ][:5]
    assert all(reply.served or reply.refused_properly for reply in replies)
    assert all(reply.finish in {"stop", "length"} for reply in replies if reply.served)
    assert outcomes["completed"] + outcomes["degraded"] > 0
    assert outcomes["shed"] + outcomes["unavailable"] > 0
    gc.collect()
    most_bytes = before_bytes * 1.10
    with contextlib.suppress(AssertionError):  # the next one tells the figures
        await until(lambda: process.memory_info().rss <= most_bytes)
    after_bytes = process.memory_info().rss
    assert after_bytes <= most_bytes, f"{before_bytes / 1e6:.0f} MB before, {after_bytes / 1e6:.0f} MB after"
