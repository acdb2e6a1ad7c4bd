"""/v1/embeddings of the real MiniLM on a real agent, asked by OpenAI's own client and by hand."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
import pytest_asyncio
import tritonclient.http as tritonclient

from edge_agent.batching.manifest import read_encoder_manifest
from edge_agent.config import AgentSettings, EdgeConfig, GatewaySettings, LocalModels
from models.store.store import ModelStore
from tests.support.agents import served
from tests.support.embedding import FAMILY, TEXTS, reference

pytestmark = [pytest.mark.real_model, pytest.mark.asyncio(loop_scope="module")]

FP32, INT8 = f"{FAMILY}-fp32-onnx", f"{FAMILY}-int8"


@pytest.fixture(scope="module")
def expected(models_root: Path) -> npt.NDArray[np.float32]:
    return reference(models_root / FAMILY / "source", TEXTS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent(models_root: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    config = EdgeConfig(
        agent=AgentSettings(cache_dir=str(tmp_path_factory.mktemp("cache"))),
        gateway=GatewaySettings(port=0),
        models=LocalModels(
            store=str(models_root), variants=("smollm2-135m-int8", FP32, INT8), preload=(INT8,), intra_op_threads=1
        ),
    )
    async with served(config) as (_, client):
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sdk(agent: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key="none", base_url=f"{agent.base_url}/v1", max_retries=0) as client:
        yield client


async def vectors(sdk: openai.AsyncOpenAI, model: str, given: object, **more: object) -> npt.NDArray[np.float32]:
    """Ask as the SDK does by itself: base64 underneath, numbers on top."""
    reply = await sdk.embeddings.create(model=model, input=given, **more)  # type: ignore[arg-type]
    assert [item.index for item in reply.data] == list(range(len(reply.data)))
    return np.array([item.embedding for item in reply.data], np.float32)


async def test_float32_rung_equals_the_reference(sdk: openai.AsyncOpenAI, expected: npt.NDArray[np.float32]) -> None:
    found = await vectors(sdk, FP32, list(TEXTS))
    assert np.abs(found - expected).max() < 1e-3
    assert np.abs(found - expected).max() < 2e-6  # far better than asked: it is the same arithmetic


async def test_int8_rung_points_the_same_way(sdk: openai.AsyncOpenAI, expected: npt.NDArray[np.float32]) -> None:
    found = await vectors(sdk, INT8, list(TEXTS))
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert (found * expected).sum(axis=1).min() > 0.99


async def test_a_vector_does_not_depend_on_its_company(sdk: openai.AsyncOpenAI) -> None:
    for model in (FP32, INT8):
        together = await vectors(sdk, model, list(TEXTS))
        for index, text in enumerate(TEXTS):
            alone = await vectors(sdk, model, text)
            assert np.abs(together[index] - alone[0]).max() < 1e-5, (model, text)


async def test_the_family_is_answered_by_its_best_rung(agent: httpx.AsyncClient) -> None:
    patient = {"x-overspill-ttft-slo-ms": "60000"}
    reply = await agent.post("/v1/embeddings", json={"model": FAMILY, "input": "hello"}, headers=patient)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] in {FP32, INT8}
    assert reply.headers["x-overspill-model"] == reply.json()["model"]
    assert reply.headers["x-overspill-tier"] == "edge"
    assert reply.headers["x-overspill-degraded"] == "false"
    decision = (await agent.get(f"/v1/decisions/{reply.headers['x-request-id']}")).json()
    assert decision["outcome"] == "completed"


async def test_formats_say_the_same(agent: httpx.AsyncClient) -> None:
    body = {"model": INT8, "input": ["one", "two"]}
    numbers = (await agent.post("/v1/embeddings", json={**body, "encoding_format": "float"})).json()
    coded = (await agent.post("/v1/embeddings", json={**body, "encoding_format": "base64"})).json()
    for plain, code in zip(numbers["data"], coded["data"], strict=True):
        assert np.array_equal(
            np.array(plain["embedding"], np.float32), np.frombuffer(base64.b64decode(code["embedding"]), "<f4")
        )
    assert numbers["usage"] == coded["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert numbers["object"] == "list"
    assert numbers["data"][0]["object"] == "embedding"


async def test_token_ids_are_taken_as_they_are(sdk: openai.AsyncOpenAI) -> None:
    hello = [101, 7592, 102]  # [CLS] hello [SEP], as the model's own tokenizer writes it
    text = await vectors(sdk, INT8, "hello")
    assert np.array_equal(await vectors(sdk, INT8, hello), text)
    assert np.array_equal(await vectors(sdk, INT8, [hello, hello]), np.concatenate([text, text]))


async def test_shorter_vectors_are_the_first_elements_normalised(sdk: openai.AsyncOpenAI) -> None:
    whole = await vectors(sdk, FP32, list(TEXTS))
    short = await vectors(sdk, FP32, list(TEXTS), dimensions=64)
    assert short.shape == (len(TEXTS), 64)
    cut = whole[:, :64] / np.linalg.norm(whole[:, :64], axis=1, keepdims=True)
    assert np.abs(short - cut).max() < 1e-5


@pytest.mark.parametrize(
    ("change", "status", "param", "says"),
    [
        ({"input": ""}, 400, "input", "is empty"),
        ({"input": []}, 400, "input", "is empty"),
        ({"input": ["fine", ""]}, 400, "input[1]", "is empty"),
        ({"input": ["fine", 3]}, 400, "input[1]", "not a number"),
        ({"input": [[101, -1]]}, 400, "input[0][1]", "no token id"),
        ({"input": [40_000, 2]}, 400, "input", "40000 is no token id of this model, which has 30522"),
        ({"input": ["x"] * 2049}, 400, "input", "at most 2048"),
        ({"input": "word " * 300}, 400, "input", "302 tokens"),
        ({"input": "word " * 3000}, 400, "input", "256 tokens"),
        ({"dimensions": 385}, 400, "dimensions", "have 384"),
        ({"dimensions": 0}, 400, "dimensions", ""),
        ({"encoding_format": "int8"}, 400, "encoding_format", ""),
        ({"truncate_prompt_tokens": 8}, 400, "truncate_prompt_tokens", "inputs are not cut"),
        ({"truncate_prompt_tokens": -1, "input": "word " * 300}, 400, "input", "302 tokens"),
        ({"model": "smollm2-135m-int8"}, 404, "model", f"models here that embed: {FAMILY}"),
        ({"model": "nobody"}, 404, "model", FAMILY),
    ],
)
async def test_wrong_input_is_named(
    agent: httpx.AsyncClient, change: dict[str, object], status: int, param: str, says: str
) -> None:
    reply = await agent.post("/v1/embeddings", json={"model": INT8, "input": "hello", **change})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert says in error["message"]


async def test_to_be_cut_at_the_window_changes_nothing_where_it_fits(agent: httpx.AsyncClient) -> None:
    """`vllm bench serve --backend openai-embeddings` asks so."""
    asked = {"model": INT8, "input": "hello"}
    wishes = ({}, {"truncate_prompt_tokens": -1})
    replies = [await agent.post("/v1/embeddings", json={**asked, **wish}) for wish in wishes]
    assert [reply.status_code for reply in replies] == [200, 200], replies[1].text
    assert replies[0].json()["data"] == replies[1].json()["data"]


async def test_an_encoder_does_not_chat(agent: httpx.AsyncClient) -> None:
    chat = {"model": FAMILY, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    reply = await agent.post("/v1/chat/completions", json=chat)
    assert reply.status_code == 400
    assert "can embed" in reply.json()["error"]["message"]


async def test_models_say_what_they_do(agent: httpx.AsyncClient) -> None:
    cards = {card["id"]: card["overspill"] for card in (await agent.get("/v1/models")).json()["data"]}
    assert cards[FAMILY]["tasks"] == cards[INT8]["tasks"] == ["embed"]
    assert cards["smollm2-135m"]["tasks"] == ["generate"]
    assert cards[INT8]["context_tokens"] == 256


async def test_stages_are_measured(agent: httpx.AsyncClient) -> None:
    await agent.post("/v1/embeddings", json={"model": INT8, "input": ["a", "b", "c"]})
    metrics = (await agent.get("/metrics")).text
    for stage in ("tokenize", "encode"):
        assert f'overspill_stage_batch_inputs_count{{stage="{stage}",variant="{INT8}"}}' in metrics.replace(
            f'variant="{INT8}",stage="{stage}"', f'stage="{stage}",variant="{INT8}"'
        )


async def test_padding_counts_only_where_it_is_computed(agent: httpx.AsyncClient, models_root: Path) -> None:
    """Six and eight tokens wait in one line, and are computed together."""
    await agent.post(
        "/v1/embeddings", json={"model": INT8, "input": [[101, *[1000] * 4, 102], [101, *[1000] * 6, 102]]}
    )
    metrics = (await agent.get("/metrics")).text.splitlines()
    lines = [line for line in metrics if f'variant="{INT8}"' in line and 'stage="encode"' in line]
    tokens, padded = (
        next(float(line.split()[-1]) for line in lines if line.startswith(f"overspill_stage_{name}_total"))
        for name in ("tokens", "padded_tokens")
    )
    computed = read_encoder_manifest(ModelStore(models_root).artifact_dir(INT8)).computes_padding
    assert computed or padded == tokens


async def test_triton_s_client_gets_the_same_vectors(
    agent: httpx.AsyncClient, expected: npt.NDArray[np.float32]
) -> None:
    texts = np.array([text.encode() for text in TEXTS], dtype=np.object_)

    def infer(binary: bool) -> npt.NDArray[np.float32]:
        with tritonclient.InferenceServerClient(f"127.0.0.1:{agent.base_url.port}") as client:
            given = tritonclient.InferInput("text_input", [len(TEXTS)], "BYTES")
            given.set_data_from_numpy(texts, binary_data=binary)
            wanted = [tritonclient.InferRequestedOutput("embedding", binary_data=binary)]
            found: npt.NDArray[np.float32] = client.infer(FP32, [given], outputs=wanted).as_numpy("embedding")
            return found

    for binary in (True, False):
        assert np.abs(await asyncio.to_thread(infer, binary) - expected).max() < 2e-6
    metadata = (await agent.get(f"/v2/models/{FP32}")).json()
    assert [output["name"] for output in metadata["outputs"]] == ["embedding", "num_input_tokens"]
    wrong = {
        "inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]}],
        "parameters": {"top_k": 3},
    }
    reply = await agent.post(f"/v2/models/{FP32}/infer", json=wrong)
    assert reply.status_code == 400
    assert "top_k" in reply.json()["error"]


async def test_whoever_comes_beside_very_many_texts_does_not_wait_for_all_of_them(agent: httpx.AsyncClient) -> None:
    """Each batch of long texts takes long: a short text takes its turn between two of them."""

    async def ask(given: object) -> None:
        promise = {"x-overspill-ttft-slo-ms": "600000"}
        body = {"model": INT8, "input": given, "encoding_format": "base64"}
        reply = await agent.post("/v1/embeddings", json=body, headers=promise, timeout=600)
        assert reply.status_code == 200, reply.text

    def batches(metrics: str) -> float:
        lines = [line for line in metrics.splitlines() if "batch_inputs_count" in line and 'stage="encode"' in line]
        return next((float(line.split()[-1]) for line in lines if INT8 in line), 0.0)

    await ask("one")
    before = batches((await agent.get("/metrics")).text)
    many = asyncio.create_task(ask([f"{number} {TEXTS[-1]}" for number in range(256)]))
    while batches((await agent.get("/metrics")).text) < before + 2:
        assert not many.done()
    for text in ("two", "three"):
        await ask(text)
    assert not many.done()
    await many
