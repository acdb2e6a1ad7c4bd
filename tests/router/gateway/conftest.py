"""The gateway in a thread, one for all tests of a module, and the `openai` SDK on it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.gateway_fakes import Server, serving


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture
def server(shared_server: Server) -> Server:
    """It, without what earlier tests asked of it."""
    shared_server.dispatcher.forget()
    return shared_server


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
