"""What clients ask of tokenizers without naming a model, at this tier and at servers behind it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from router.base.errors import NoTokenizer
from router.upstream.settings import BackendModel, BackendSettings
from router.values.feature import Feature
from router.values.task import Task
from tests.support.foreign_server import ForeignServer
from tests.support.gateway_fakes import (
    FAMILY,
    INFOS,
    FakeDispatcher,
    WordCounter,
    client_of,
    gateway_deps,
    replica_info,
)
from tests.support.passed_chain import passing
from tests.support.tiers import Tier

TOLD = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None, "chat_template": "{{ x }}"}
ENCODER = replica_info("encoder", 0, family="encoder", tasks=frozenset({Task.EMBED}))
SECOND = replica_info("second-int8", 0, family="second")
BEHIND = replica_info("second-int8", 0, family="second", offers=frozenset({Feature.TOKENIZE}))


class Some(WordCounter):
    """The tokenizers of some models alone."""

    def __init__(self, *models: str) -> None:
        super().__init__()
        self.models = models

    def tokenizer(self, model: str) -> Any:
        if model not in self.models:
            raise NoTokenizer(f"`{model}` has none here", param="model")
        return super().tokenizer(model)


def local(*infos: Any, **deps: Any) -> httpx.AsyncClient:
    dispatcher = FakeDispatcher()
    dispatcher.known_models = lambda: frozenset(name for info in infos for name in (info.family, info.variant))  # type: ignore[method-assign]
    return client_of(gateway_deps(dispatcher, models=lambda: infos, **deps))


async def test_a_model_that_is_served_alone_need_not_be_named() -> None:
    async with local(*INFOS, ENCODER) as http:
        told = (await http.get("/tokenizer_info")).json()
        assert told == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": True,
            "model_max_length": 2048,
            "chat_template": "{{ messages }}",
        }
        assert (await http.get("/tokenizer_info", params={"model": "tiny-int8"})).json() == told
        reply = await http.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False})
        assert reply.json()["tokens"] == [2, 2]
        assert (await http.post("/detokenize", json={"tokens": [2]})).json() == {"prompt": "xx"}
        reply = await http.post("/tokenizer_info", json={})
        assert (reply.status_code, set(reply.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})


@pytest.mark.parametrize(
    ("infos", "tokenizers", "meant"),
    [
        ([*INFOS, SECOND], [FAMILY, "second"], None),
        ([*INFOS, SECOND], [FAMILY], FAMILY),
        (
            [*INFOS, BEHIND],
            [FAMILY],
            None,
        ),
        ([*INFOS, SECOND], [], None),
        ([ENCODER], ["encoder"], None),
    ],
)
async def test_of_several_the_one_is_meant_whose_tokens_can_be_told(
    infos: list[Any], tokenizers: list[str], meant: str | None
) -> None:
    async with local(*infos, prompts=Some(*tokenizers)) as http:
        replies = [
            await http.get("/tokenizer_info"),
            await http.post("/tokenize", json={"prompt": "ab"}),
            await http.post("/detokenize", json={"tokens": [2]}),
        ]
    for reply in replies:
        if meant is not None:
            assert reply.status_code == 200, reply.text
            continue
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "model"), reply.text
        assert all(f"`{name}`" in error["message"] for name in tokenizers if name != "encoder")


@pytest.mark.parametrize(
    ("query", "status"),
    [("model=nope", 404), ("model=", 400), (f"model={FAMILY}&model=tiny-int8", 400), ("a=b&" * 300, 400)],
)
async def test_what_a_query_names_wrongly(query: str, status: int) -> None:
    async with local(*INFOS) as http:
        reply = await http.get(f"/tokenizer_info?{query}")
    assert reply.status_code == status, reply.text


# ── servers behind ──────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def world(server: ForeignServer) -> AsyncIterator[list[Tier]]:
    entry = BackendSettings(
        name="b", urls=(server.url,), poll_interval_s=0.05, models=(BackendModel(served="m", variant="mine"),)
    )
    async with passing(entry) as tiers:
        yield list(tiers)


async def test_a_server_behind_tells_of_its_tokenizer_over_every_tier() -> None:
    asked: list[tuple[str, dict[str, str], bytes, str | None]] = []

    async def tell(request: web.Request) -> web.Response:
        body = await request.read()
        asked.append((request.method, dict(request.query), body, request.headers.get("content-type")))
        return web.json_response(TOLD)

    async with ForeignServer("vllm") as server:
        server.pages["/tokenizer_info"] = tell
        server.pages["/tokenize"] = {"count": 1, "max_model_len": 64, "tokens": [7]}
        async with world(server) as tiers:
            for tier in tiers:
                async with httpx.AsyncClient(base_url=tier.url) as http:
                    reply = await http.get("/tokenizer_info", headers={"x-request-id": "tok"})
                    assert reply.json() == TOLD, reply.text
                    assert reply.headers["x-request-id"] == "tok"
                    assert (await http.post("/tokenize", json={"prompt": "a"})).json()["tokens"] == [7]
                    assert (await http.get("/tokenizer_info?model=nope")).status_code == 404
    assert set(map(str, asked)) == {str(("GET", {"model": "m"}, b"", None))}


@pytest.mark.parametrize("status", [404, 405])
async def test_a_server_without_that_page_is_well_and_its_operator_is_told_how(status: int) -> None:
    async with ForeignServer("vllm") as server:
        server.pages["/tokenizer_info"] = status
        async with world(server) as tiers:
            for tier in tiers:
                async with httpx.AsyncClient(base_url=tier.url) as http:
                    for _ in range(8):  # more than a breaker bears
                        reply = await http.get("/tokenizer_info")
                        assert reply.status_code == 400, reply.text
                        assert "--enable-tokenizer-info-endpoint" in reply.json()["error"]["message"]
                    body = {"model": "mine", "prompt": "a", "max_tokens": 3}
                    assert (await http.post("/v1/completions", json=body)).status_code == 200
