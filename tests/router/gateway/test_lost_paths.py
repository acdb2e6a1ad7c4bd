"""A path that is not served is told what was probably meant: mostly another base URL."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.gateway_fakes import FAMILY, Server, gateway_deps, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(gateway_deps()) as running:
        yield running


def told(server: Server, path: str, method: str = "POST") -> str:
    reply = httpx.request(method, f"{server.url}{path}", json={"model": FAMILY})
    assert reply.status_code == 404
    return str(reply.json()["error"]["message"])


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/completions", "/v1/completions"),
        ("/openai/v1/embeddings", "/v1/embeddings"),
        ("/openai/deployments/any/chat/completions?api-version=2024-10-21", "/v1/chat/completions"),
        ("/api/v1/models", "/v1/models"),
        ("/v1/openai/v1/models", "/v1/models"),
        ("/responses/", "/v1/responses"),
    ],
)
def test_another_base_url_is_told_the_path(server: Server, path: str, meant: str) -> None:
    assert f"no such path; {meant} is one; the base URL of an OpenAI client ends in /v1" in told(server, path)


@pytest.mark.parametrize("path", ["/v1/v1/messages", "/v1/v1/messages/count_tokens", "/v1/messages/v1/messages"])
def test_anthropics_clients_are_told_of_their_base_url_in_their_form(server: Server, path: str) -> None:
    reply = httpx.post(f"{server.url}{path}", json={}, headers={"anthropic-version": "2023-06-01"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
    assert "Anthropic's SDKs take the base URL without /v1" in reply.json()["error"]["message"]


def test_the_openai_client_shows_it(server: Server) -> None:
    sdk = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    with sdk, pytest.raises(openai.NotFoundError, match="/v1/completions is one"):
        sdk.completions.create(model=FAMILY, prompt="x")


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/v1/messages/batches", "many requests in one file are run by /v1/batches"),
        ("/v1/messages/msg_1", "of Anthropic's API /v1/messages, /v1/messages/count_tokens and /v1/models are served"),
        ("/v1/complete", "Anthropic's older API is not served"),
        ("/v1/responses/input_tokens", "tokens are counted by /tokenize"),
        ("/v1/responses/compact", "conversations are not shortened here"),
        ("/v1/responses/resp_1", "nothing is kept between calls here"),
        ("/v1/chat/completions/chatcmpl-1", "nothing is kept between calls here"),
        ("/v1/threads/thread_1/messages", "nothing is kept between calls here"),
        ("/v1/vector_stores/vs_1/files", "no documents are kept here"),
        ("/v1/realtime/client_secrets", "speech in real time is not served"),
        ("/v1/moderations", "the APIs are below /v1 and /v2"),
        ("/v1/containers/one/files", "the APIs are below /v1 and /v2"),
        ("/", "the APIs are below /v1 and /v2"),
        ("/nope", "the APIs are below /v1 and /v2"),
    ],
)
def test_what_is_not_served_at_all_is_told_why(server: Server, path: str, remedy: str) -> None:
    assert f"no such path; {remedy}" in told(server, path)


@pytest.mark.parametrize(
    ("path", "remedy"), [("/v2/nope", "the APIs are below"), ("/api/chat", "Ollama's own API is not served")]
)
def test_clients_of_kserve_and_ollama_are_told_in_a_text(server: Server, path: str, remedy: str) -> None:
    reply = httpx.post(f"{server.url}{path}", json={"model": FAMILY})
    assert reply.status_code == 404
    assert f"no such path; {remedy}" in reply.json()["error"]
