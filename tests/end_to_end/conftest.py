"""One real Overspill for all end-to-end tests: mosquitto, cloud tier (tensor parallel 2), edge agent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from examples.demo.stack import API_KEY, Stack, StackOptions
from tests.support.patience import PATIENT


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, models_root: Path) -> Iterator[Stack]:
    """The running stack. A test that kills a part of it starts that part again."""
    running = Stack(tmp_path_factory.mktemp("stack"), StackOptions())
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(running.__aenter__())
        yield running
    finally:
        loop.run_until_complete(running.stop())
        loop.close()


@pytest.fixture(params=["edge", "cloud"])
def tier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def client(stack: Stack, tier: str) -> Iterator[openai.OpenAI]:
    """The real SDK, without its own retries, talking to either tier, in no hurry."""
    url = stack.edge_url if tier == "edge" else stack.cloud_url
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key=API_KEY, max_retries=0, timeout=60, default_headers=PATIENT
    ) as sdk:
        yield sdk


@pytest.fixture
def edge(stack: Stack) -> Iterator[openai.OpenAI]:
    """The real SDK on the edge agent, in no hurry."""
    with openai.OpenAI(
        base_url=f"{stack.edge_url}/v1", api_key="none", max_retries=0, timeout=60, default_headers=PATIENT
    ) as sdk:
        yield sdk
