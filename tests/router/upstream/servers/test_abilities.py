"""What servers say of their models' abilities: vLLM by its paths, llama.cpp and Ollama in words."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from router.upstream.servers.abilities import refuses_media, tasks_of
from router.upstream.settings import BackendModel, BackendSettings
from router.values.feature import Feature
from router.values.task import GENERATES, Task
from tests.support.foreign_server import ForeignServer
from tests.support.passed_chain import passing

# What vLLM 0.32 describes of a sentence encoder.
POOLING = {"paths": {path: {} for path in ("/health", "/v1/embeddings", "/v1/models", "/v1/rerank", "/v1/score")}}


def described(*paths: str) -> bytes:
    return json.dumps({"openapi": "3.1.0", "paths": {path: {} for path in paths}}).encode()


def test_paths_tell_the_tasks() -> None:
    assert tasks_of(described("/v1/completions", "/v1/chat/completions")) is GENERATES
    assert tasks_of(described("/v1/embeddings", "/v1/rerank")) == {Task.EMBED, Task.RERANK}
    assert tasks_of(described("/v1/completions", "/v1/audio/transcriptions")) == {Task.GENERATE, Task.TRANSCRIBE}
    assert tasks_of(described("/health")) is GENERATES


@pytest.mark.parametrize(
    ("message", "alone"),
    [
        ("smollm2-135m is not a multimodal model None", True),  # vLLM 0.32
        ("image input is not supported - hint: if this is unexpected, you may need to provide the mmproj", True),
        ("At most 0 image(s) may be provided in one prompt.", True),
        ("cannot identify image file", False),
        ("This model's maximum context length is 512 tokens.", False),
    ],
)
def test_only_a_word_about_the_model_is_one(message: str, *, alone: bool) -> None:
    assert refuses_media(message) is alone


async def test_a_vllm_that_pools_is_found_out_without_a_word_of_configuration() -> None:
    ranked = {"results": [{"index": 0, "relevance_score": 0.5}]}
    async with ForeignServer() as server:
        server.pages |= {"/openapi.json": POOLING, "/v1/rerank": ranked}
        entry = BackendSettings(name="b", urls=(server.url,), poll_interval_s=0.05)
        async with passing(entry) as tiers:
            for tier in tiers:
                (replica,) = tier.dispatcher.replicas
                assert replica.info.tasks == {Task.EMBED, Task.RERANK, Task.SCORE}
                async with httpx.AsyncClient(base_url=tier.url) as http:
                    reply = await http.post("/v1/rerank", json={"model": "m", "query": "a", "documents": ["b"]})
                    assert reply.json()["results"] == ranked["results"]
        assert not server.bodies, "such a model is not measured"


async def test_a_vllm_whose_description_nobody_can_read_generates() -> None:
    async with ForeignServer() as server:
        server.pages |= {"/openapi.json": ["a page of a proxy, say"]}
        async with passing(BackendSettings(name="b", urls=(server.url,), poll_interval_s=0.05)) as tiers:
            for tier in tiers:
                (replica,) = tier.dispatcher.replicas
                assert replica.info.tasks == {Task.GENERATE}


@pytest.mark.parametrize(
    ("owner", "page", "told", "takes"),
    [
        ("llamacpp", "/props", {"modalities": {"vision": True, "audio": False}}, {Feature.IMAGES}),
        ("llamacpp", "/props", {}, set()),
        ("library", "/api/show", {"capabilities": ["completion", "vision"]}, {Feature.IMAGES}),
        ("library", "/api/show", {"capabilities": ["completion"]}, set()),
    ],
)
async def test_who_says_what_chats_may_hold_is_believed(
    owner: str, page: str, told: dict[str, Any], takes: set[Feature]
) -> None:
    async with ForeignServer(owner) as server:
        server.pages |= {page: told, "/api/version": {"version": "1"}, "/api/ps": {"models": []}}
        for modalities in (None, ("text", "audio")):
            model = BackendModel(served="m", modalities=modalities)  # type: ignore[arg-type]
            entry = BackendSettings(name="b", urls=(server.url,), poll_interval_s=0.05, warm_up=False, models=(model,))
            async with passing(entry) as tiers:
                for tier in tiers:
                    (replica,) = tier.dispatcher.replicas
                    found = replica.info.offers & {Feature.IMAGES, Feature.AUDIO}
                    assert found == (takes if modalities is None else {Feature.AUDIO})
