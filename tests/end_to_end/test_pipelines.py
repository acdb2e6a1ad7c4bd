"""Declared pipelines on real tiers: faces in a real photograph, MiniLM as stages, functions of an operator's own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from matplotlib import cbook

from cloud_tier.config import CloudConfig, ServerConfig
from cloud_tier.plan import make_plan
from cloud_tier.server import CloudTier
from edge_agent.config import AgentSettings, EdgeConfig, GatewaySettings, LocalModels, UpstreamSettings, load_config
from edge_agent.report import check_lines
from models.pipelines.declared.settings import PipelineSettings
from models.store.store import ModelStore
from router.base.errors import ArtifactError, ConfigError
from router.gateway.grpc.settings import GrpcSettings
from router.gateway.kserve import routes
from router.gateway.listener import bind
from router.upstream.settings import BackendSettings
from tests.support.agents import served
from tests.support.embedding import FAMILY, TEXTS, reference
from tests.support.paths import REPOSITORY
from tests.support.ports import unused_port
from tests.support.waiting import until, until_answered

pytestmark = [pytest.mark.real_model, pytest.mark.asyncio(loop_scope="module")]

FACE = (215, 140, 310, 310)  # of Grace Hopper: left, top, right, bottom of what is surely face, in pixels
SPEC = {"datatype": "FP32", "shape": [2]}

MINILM: dict[str, Any] = {
    "name": "minilm-stages",
    "outputs": ["vector"],
    "stages": [
        {
            "name": "tokenize",
            "use": "tokenize",
            "max_batch": 64,
            "options": {"tokenizer": f"{FAMILY}-int8", "mask": "FP32"},
        },
        {
            "name": "encode",
            "use": "onnx",
            "options": {"variant": f"{FAMILY}-fp32-onnx"},
            "reads": {"mask": "attention_mask"},
            "max_batch": 16,
            "max_wait_ms": 5,
            "buckets": [8, 16, 32, 64],
        },
        {"name": "unit", "use": "unit", "options": {"size": 384}, "max_batch": 16},
    ],
}


def own(name: str, function: str, **more: Any) -> PipelineSettings:
    stage = {
        "name": "own",
        "use": f"tests.support.stages:{function}",
        "inputs": [{"name": "x", **SPEC}],
        "outputs": [{"name": "y", **SPEC}],
        "max_batch": 16,
        "max_wait_ms": 100,
    }
    return msgspec.convert({"name": name, "stages": [stage], **more}, PipelineSettings)


@pytest.fixture(scope="module")
def photograph() -> bytes:
    return Path(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)).read_bytes()


@contextlib.asynccontextmanager
async def example_agent(models_root: Path, cache: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The example's own configuration, and further pipelines."""
    store = ModelStore(models_root)
    if not (models_root / "centerface").is_dir():
        pytest.skip(f"no centerface in {store.root}: overspill models pull centerface --prepare")
    example = load_config(REPOSITORY / "examples" / "faces.toml", environ={})
    config = msgspec.structs.replace(
        example,
        agent=AgentSettings(cache_dir=str(cache)),
        gateway=GatewaySettings(port=0),
        models=LocalModels(store=str(models_root), variants=(), preload=(), intra_op_threads=1),
        grpc=GrpcSettings(enabled=True, port=(grpc_port := unused_port())),
        pipelines=(*example.pipelines, msgspec.convert(MINILM, PipelineSettings), own("poisoned", "poisoned")),
    )
    async with served(config) as (_, client):
        client.headers["grpc-port"] = str(grpc_port)  # the gateway does not look at it
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent(models_root: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    async with example_agent(models_root, tmp_path_factory.mktemp("cache")) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def unasked(models_root: Path, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """An agent of which nobody asked anything before: whom it serves by a smaller rung goes by those who came."""
    async with example_agent(models_root, tmp_path) as client:
        yield client


def infer(model: str, client: httpx.AsyncClient, files: list[bytes], *, grpc: bool) -> dict[str, npt.NDArray[Any]]:
    """Ask by Triton's own clients, which know names and types from the model's metadata."""
    library: Any = triton_grpc if grpc else triton_http
    port = client.headers["grpc-port"] if grpc else client.base_url.port
    with library.InferenceServerClient(f"127.0.0.1:{port}") as triton:
        told = triton.get_model_metadata(model, **({"as_json": True} if grpc else {}))
        [image] = told["inputs"]
        given = library.InferInput(image["name"], [len(files), 1], image["datatype"])
        given.set_data_from_numpy(np.array([[file] for file in files], dtype=np.object_))
        found = triton.infer(model, [given])
        return {output["name"]: found.as_numpy(output["name"]) for output in told["outputs"]}


def is_the_face(box: npt.NDArray[Any]) -> bool:
    left, top, right, bottom = FACE
    return bool(box[0] < left and box[1] < top and box[2] > right and box[3] > bottom and box[3] - box[1] < 350)


@pytest.mark.parametrize("grpc", [False, True], ids=["http", "grpc"])
async def test_a_face_is_found_where_it_is(agent: httpx.AsyncClient, photograph: bytes, grpc: bool) -> None:
    for model in ("faces-640", "faces-320"):
        found = await asyncio.to_thread(infer, model, agent, [photograph], grpc=grpc)
        assert found["count"].tolist() == [[1]], model
        assert is_the_face(found["boxes"][0, 0]), (model, found["boxes"])
        eyes = found["landmarks"][0, 0, :2]
        assert eyes[0, 0] < eyes[1, 0]
        assert (eyes > found["boxes"][0, 0, :2]).all()


async def test_many_numbers_in_json_hold_nobody_else_up(
    agent: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million of them take half a second to read: the event loop has others to answer meanwhile."""
    beside: dict[str, list[bool]] = {}
    for name in ("array_infer", "encode_array_infer"):
        real, seen = getattr(routes, name), beside.setdefault(name, [])

        def call(*given: Any, real: Any = real, seen: list[bool] = seen) -> Any:
            seen.append(threading.current_thread() is not threading.main_thread())
            return real(*given)

        monkeypatch.setattr(routes, name, call)
    for rows in (1, 2048):
        numbers = [[float(row), 1.0] for row in range(20, 20 + rows)]
        asked = {"name": "x", "datatype": "FP32", "shape": [rows, 2], "data": numbers}
        reply = await agent.post("/v2/models/poisoned/infer", json={"inputs": [asked]})
        assert reply.status_code == 200, reply.text
        assert reply.json()["outputs"][0]["data"][:2] == [40.0, 2.0]
    assert beside == {"array_infer": [False, True], "encode_array_infer": [False, True]}


async def test_several_images_of_several_sizes_in_one_request(agent: httpx.AsyncClient, photograph: bytes) -> None:
    import io

    from PIL import Image

    with Image.open(io.BytesIO(photograph)) as picture:
        two = Image.new("RGB", (1100, 600))
        two.paste(picture, (0, 0))
        two.paste(picture, (560, 0))
        files = []
        for shown in (two, Image.new("RGB", (64, 48), "white"), picture):
            file = io.BytesIO()
            shown.save(file, "PNG")
            files.append(file.getvalue())
    found = await asyncio.to_thread(infer, "faces-640", agent, files, grpc=False)
    assert found["count"].tolist() == [[2], [0], [1]]
    assert found["boxes"].shape == (3, 2, 4)
    assert not found["boxes"][1].any()  # filled up
    assert is_the_face(found["boxes"][2, 0])


async def test_the_router_serves_a_pipeline_as_anything_else(unasked: httpx.AsyncClient, photograph: bytes) -> None:
    image = [{"name": "image", "shape": [1, 1], "datatype": "BYTES"}]
    head = msgspec.json.encode({"inputs": [image[0] | {"parameters": {"binary_data_size": len(photograph) + 4}}]})
    body = head + len(photograph).to_bytes(4, "little") + photograph
    told = {"inference-header-content-length": str(len(head))}

    async def ask(model: str, **headers: str) -> httpx.Response:
        return await unasked.post(f"/v2/models/{model}/infer", content=body, headers=told | headers)

    best = await ask("faces", **{"x-overspill-ttft-slo-ms": "60000"})
    assert (best.headers["x-overspill-model"], best.headers["x-overspill-degraded"]) == ("faces-640", "false")
    exact = await ask("faces-320")
    assert (exact.headers["x-overspill-model"], exact.headers["x-overspill-rung"]) == ("faces-320", "1")
    nowhere = await ask("faces-320", **{"x-overspill-min-quality": "0.95"})
    assert nowhere.status_code in {400, 404, 503}
    hopeless = await ask("faces", **{"x-overspill-deadline-ms": "1"})
    assert hopeless.status_code == 503
    request_id = best.headers["x-request-id"]
    record = (await unasked.get(f"/v1/decisions/{request_id}")).json()
    assert {c["variant"] for c in record["candidates"]} >= {"faces-640", "faces-320"}
    metrics = (await unasked.get("/metrics")).text
    for stage in ("decode", "resize", "normalise", "model", "boxes", "suppress"):
        assert f'stage="{stage}",variant="faces-640"' in metrics


async def test_metadata_and_configuration_are_the_pipeline_s_own(agent: httpx.AsyncClient) -> None:
    told = (await agent.get("/v2/models/faces")).json()
    assert told["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1, 1]}]
    assert [one["name"] for one in told["outputs"]] == ["boxes", "scores", "landmarks", "count"]
    config = (await agent.get("/v2/models/faces/config")).json()
    assert config["input"] == [{"name": "image", "data_type": "TYPE_STRING", "dims": [1]}]
    assert config["model_transaction_policy"] == {"decoupled": False}
    cards = {card["id"]: card["overspill"] for card in (await agent.get("/v1/models")).json()["data"]}
    assert cards["faces-320"]["tasks"] == ["infer"]
    assert cards["faces-320"]["signature"]["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [1]}]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": "picture"}, "`picture` is no input of this model; it takes: x FP32[2]"),
        ({"datatype": "FP64"}, "`x`: FP64[1, 2], expected FP32[-1, 2] with 1 to 2048 inputs"),
        ({"shape": [2]}, "`x`: FP32[2], expected FP32[-1, 2]"),
        ({"shape": [0, 2], "data": []}, "`x`: FP32[0, 2], expected"),
        ({"shape": [1, 3], "data": [1, 2, 3]}, "`x`: FP32[1, 3], expected"),
        ({"data": [1]}, "the shape asks for 2 elements"),
        ({"data": ["a", "b"]}, "a JSON str is no FP32 element"),
        (None, "`inputs`: missing: x FP32[2]"),
    ],
)
async def test_wrong_input_is_named(agent: httpx.AsyncClient, change: dict[str, Any] | None, told: str) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}
    body = {"inputs": [] if change is None else [tensor | change]}
    reply = await agent.post("/v2/models/poisoned/infer", json=body)
    assert reply.status_code == 400, reply.text
    assert told in reply.json()["error"]


async def test_a_prompt_is_nothing_for_a_pipeline(agent: httpx.AsyncClient) -> None:
    chat = {"model": "faces", "messages": [{"role": "user", "content": "hello"}]}
    assert (await agent.post("/v1/chat/completions", json=chat)).status_code == 400
    reply = await agent.post("/v1/embeddings", json={"model": "faces", "input": "x"})
    assert reply.status_code == 404
    assert "`faces` is there to infer, not to embed" in reply.json()["error"]["message"]


async def test_one_poisoned_input_fails_alone(agent: httpx.AsyncClient, photograph: bytes) -> None:
    async def ask(number: float) -> httpx.Response:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [number, number]}
        return await agent.post("/v2/models/poisoned/infer", json={"inputs": [tensor]})

    replies = await asyncio.gather(*map(ask, range(10, 18)))
    assert [reply.status_code == 200 for reply in replies] == [True] * 3 + [False] + [True] * 4
    assert replies[5].json()["outputs"][0]["data"] == [30, 30]
    assert "thirteen" in replies[3].json()["error"]
    good, bad = await asyncio.gather(
        asyncio.to_thread(infer, "faces-320", agent, [photograph], grpc=False),
        asyncio.to_thread(infer, "faces-320", agent, [b"no image"], grpc=False),
        return_exceptions=True,
    )
    assert isinstance(good, dict)
    assert "no image of a known format" in str(bad)


async def test_minilm_as_declared_stages_is_the_same_model(agent: httpx.AsyncClient, models_root: Path) -> None:
    async def ask(text: str) -> list[float]:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [text]}
        reply = await agent.post("/v2/models/minilm-stages/infer", json={"inputs": [tensor]})
        assert reply.status_code == 200, reply.text
        data: list[float] = reply.json()["outputs"][0]["data"]
        return data

    found = np.array(await asyncio.gather(*map(ask, TEXTS)), np.float32)
    expected = reference(models_root / FAMILY / "source", TEXTS)
    assert np.abs(found - expected).max() < 1e-5
    assert 'stage="encode",variant="minilm-stages"' in (await agent.get("/metrics")).text


async def test_a_stage_that_cannot_be_ends_the_start(tmp_path: Path) -> None:
    wrong = own("wrong", "tripled")
    with pytest.raises(ConfigError, match=r"pipeline `wrong`, stage `own`: .*has no `tripled`"):
        make_plan(CloudConfig(server=ServerConfig(models_dir=str(tmp_path)), pipelines=(wrong,)))
    config = EdgeConfig(
        agent=AgentSettings(cache_dir=str(tmp_path)),
        gateway=GatewaySettings(port=0),
        models=LocalModels(variants=(), preload=()),
        pipelines=(wrong,),
    )
    with pytest.raises(ConfigError, match=r"pipeline `wrong`, stage `own`: .*has no `tripled`"):
        async with served(config):
            pass


async def test_a_pipeline_without_its_model_says_what_brings_it(tmp_path: Path) -> None:
    example = load_config(REPOSITORY / "examples" / "faces.toml", environ={})
    config = msgspec.structs.replace(
        example,
        agent=AgentSettings(cache_dir=str(tmp_path)),
        gateway=GatewaySettings(port=0),
        models=LocalModels(store=str(tmp_path), variants=(), preload=()),
        backends=(BackendSettings(name="b", kind="openai", urls=("http://127.0.0.1:9",)),),
    )
    with pytest.raises(ArtifactError, match="overspill models pull centerface --prepare"):
        list(check_lines(config))
    async with served(config) as (agent, _):
        [first, _] = agent.lineup.replicas
        assert "overspill models pull centerface --prepare" in first.problem


@contextlib.asynccontextmanager
async def cloud(*pipelines: PipelineSettings) -> AsyncIterator[str]:
    config = CloudConfig(server=ServerConfig(port=0, drain_s=1.0), pipelines=pipelines)
    bound = bind("127.0.0.1", 0, "server")
    with contextlib.closing(bound):
        tier = CloudTier(make_plan(config))
        running = asyncio.create_task(tier.run(bound))
        await until(lambda: tier.ready()[0] or running.done(), 60)
        if running.done():
            running.result()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            tier.stop()
            await asyncio.wait_for(running, 60)


async def test_what_the_device_lacks_comes_from_the_cloud(tmp_path: Path) -> None:
    better = msgspec.convert(
        msgspec.to_builtins(own("twice-0", "doubled", family="twice")) | {"rung": 0, "quality": 1.0},
        PipelineSettings,
    )
    local = own("twice-1", "doubled", family="twice", rung=1, quality=0.5)
    async with cloud(better) as url:
        config = EdgeConfig(
            agent=AgentSettings(cache_dir=str(tmp_path)),
            gateway=GatewaySettings(port=0),
            models=LocalModels(variants=(), preload=()),
            upstream=UpstreamSettings(url=url, poll_interval_s=0.2),
            pipelines=(local,),
        )
        async with served(config) as (_, client):

            async def known() -> bool:
                return "twice-0" in {card["id"] for card in (await client.get("/v1/models")).json()["data"]}

            await until_answered(known, 30)
            body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}]}

            async def ask(model: str, **headers: str) -> httpx.Response:
                reply = await client.post(f"/v2/models/{model}/infer", json=body, headers=headers)
                assert reply.status_code == 200, reply.text
                assert reply.json()["outputs"][0]["data"] == [2, 4, 6, 8]
                return reply

            above = await ask("twice", **{"x-overspill-min-quality": "0.9"})
            assert (above.headers["x-overspill-tier"], above.headers["x-overspill-model"]) == ("cloud", "twice-0")
            here = await ask("twice", **{"x-overspill-locality": "local-only"})
            assert (here.headers["x-overspill-tier"], here.headers["x-overspill-model"]) == ("edge", "twice-1")
            assert (await ask("twice-0")).headers["x-overspill-tier"] == "cloud"
            told = (await client.get("/v2/models/twice-0")).json()
            assert told["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]


@pytest.mark.parametrize("change", ["load", "unload"])
async def test_a_pipeline_stays_as_it_is_declared(agent: httpx.AsyncClient, change: str) -> None:
    for name in ("faces", "faces-640"):
        reply = await agent.post(f"/v2/repository/models/{name}/{change}")
        assert reply.status_code == 400
        assert "served as [[pipelines]] declares it" in reply.json()["error"]
    index = (await agent.post("/v2/repository/index")).json()
    assert {"faces", "faces-640", "faces-320"} <= {model["name"] for model in index if model["state"] == "READY"}


async def test_what_would_run_is_told_before_it_runs(models_root: Path) -> None:
    example = load_config(REPOSITORY / "examples" / "faces.toml", environ={})
    models = LocalModels(store=str(models_root), variants=(), preload=())
    told = "\n".join(check_lines(msgspec.structs.replace(example, models=models, gateway=GatewaySettings(port=0))))
    assert "pipeline  faces-320: rung 1 of faces, quality 0.71, decode → resize → normalise → model →" in told
    assert "image BYTES[1] → boxes FP32[-1, 4], scores FP32[-1]" in told
    assert "model     none" not in told


async def test_a_model_of_pipelines_is_no_model_to_be_served_alone(models_root: Path, tmp_path: Path) -> None:
    config = EdgeConfig(
        agent=AgentSettings(cache_dir=str(tmp_path)),
        gateway=GatewaySettings(port=0),
        models=LocalModels(store=str(models_root), variants=("centerface-fp32",), preload=()),
    )
    with pytest.raises(ConfigError, match=r"`centerface-fp32` is the model of a pipeline: .* name it in a stage"):
        async with served(config):
            pass
