"""Whole edge agents in a test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec

from edge_agent.config import EdgeConfig
from edge_agent.daemon import EdgeAgent
from tests.support.patience import unhurried
from tests.support.waiting import PATIENCE_S


@asynccontextmanager
async def served(config: EdgeConfig) -> AsyncIterator[tuple[EdgeAgent, httpx.AsyncClient]]:
    """Run an agent until the block ends; give it and a client of its gateway. What promises nothing has a minute."""
    agent = EdgeAgent(msgspec.structs.replace(config, router=unhurried(config.router)))
    running = asyncio.create_task(agent.run())
    serving = asyncio.create_task(agent.serving.wait())
    await asyncio.wait({running, serving}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    if running.done():
        running.result()
    try:
        limits = httpx.Limits(max_connections=400)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{agent.port}", timeout=60, limits=limits) as client:
            yield agent, client
    finally:
        agent.stop()
        await asyncio.wait_for(running, PATIENCE_S)
