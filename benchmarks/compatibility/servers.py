"""The columns of the table: how each server is started. Ours three ways, and the peers that they are measured against.

Servers of other makers live in environments of their own, which the variables of the live tests name; where one is not
set, its column is not run, and says so.

| variable                   | names                                                              |
|----------------------------|--------------------------------------------------------------------|
| `OVERSPILL_LIVE_VLLM`       | a Python with `vllm`                                                |
| `OVERSPILL_LIVE_VLLM_MODEL` | SmolLM2 as the hub lays it out                                      |
| `OVERSPILL_LIVE_TRITON`     | a Python with the wheel `nvidia-pytriton`, which has a tritonserver |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks._stamp import commit
from benchmarks.compatibility.clients.checking import Server
from benchmarks.compatibility.environments import MissingError
from benchmarks.compatibility.registry import Protocol
from examples.demo.processes import Child, free_port, overspill
from models.store.store import ModelStore

FAMILY = "smollm2-135m"
EMBEDDINGS = "all-minilm-l6-v2"
CONTEXT_TOKENS = 2048
KEY = "compatibility-key-0123456789"  # of this run's servers, on the loopback interface
READY_S = 420.0  # vLLM's CPU build on a busy machine

EDGE_TOML = """\
[agent]
log_format = "json"
cache_dir = "{cache}"

[gateway]
port = {port}
api_keys = ["{key}"]

[grpc]
enabled = true
port = {grpc}

[cors]
allow_origins = ["{page}"]

[jobs]
dir = "{jobs}"

[models]
variants = ["smollm2-135m-int8", "all-minilm-l6-v2-int8"]
preload = ["smollm2-135m-int8", "all-minilm-l6-v2-int8"]
kv_slots = 4
context_tokens = {context}

[router]
# What is asked here is whether clients work; this machine may be busy with other things.
ttft_slo_ms = 60000.0
"""
CLOUD_TOML = """\
[server]
port = {port}
log_format = "json"

[grpc]
enabled = true
port = {grpc}

[cors]
allow_origins = ["{page}"]

[jobs]
dir = "{jobs}"

{models}

[router]
ttft_slo_ms = 60000.0
"""
ENGINE_TOML = """\
[[models]]
variant = "smollm2-135m-fp32"
device = "cpu"
max_running = 8
max_context_tokens = {context}

[[models]]
variant = "all-minilm-l6-v2"
device = "cpu"
"""
BACKEND_TOML = """\
[[backends]]
name = "vllm"
kind = "openai"
urls = ["{url}"]
api_key = "{key}"

[[backends.models]]
served = "smollm2-135m"
variant = "smollm2-135m-vllm"
family = "smollm2-135m"

[[backends]]
name = "vllm-embeddings"
kind = "openai"
urls = ["{embeddings_url}"]
api_key = "{key}"

[[backends.models]]
served = "all-minilm-l6-v2"
variant = "all-minilm-l6-v2-vllm"
family = "all-minilm-l6-v2"
tasks = ["embed"]
"""


@dataclass(frozen=True)
class Place:
    """What every server of a run shares.

    Attributes:
        folder: for configurations and logs.
        tokenizer: the model's, in Hugging Face's form.
        page_port: where a web page will be served from.
    """

    folder: Path
    tokenizer: Path
    page_port: int

    @property
    def page(self) -> str:
        """The origin of that page."""
        return f"http://127.0.0.1:{self.page_port}"

    def emptied(self, name: str) -> Path:
        """Return a folder in which nothing is left of the run before."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name


@dataclass(frozen=True)
class Running:
    """A server that is up.

    Attributes:
        commit: of this project when it was started.
    """

    server: Server
    version: str
    commit: str = field(default_factory=commit)


class Peers:
    """Servers of other makers that several columns use: each is started once, by the first that wants it."""

    def __init__(self, place: Place, stack: AsyncExitStack) -> None:
        self._place = place
        self._stack = stack
        self._vllm: Running | None = None

    async def vllm(self) -> Running:
        if self._vllm is None:
            self._vllm = await self._stack.enter_async_context(_vllm(self._place))
        return self._vllm


@dataclass(frozen=True)
class Kind:
    """One column.

    Attributes:
        speaks: protocols; clients of others are not asked of it.
        peer: it is what ours are measured against.
    """

    name: str
    title: str
    speaks: frozenset[Protocol]
    start: Callable[[Place, Peers], AbstractAsyncContextManager[Running]]
    peer: bool = False


def live_python(variable: str) -> str:
    """Return the interpreter that a variable names.

    Raises:
        MissingError: it is not set, or there is no such program.
    """
    python = os.environ.get(variable, "")
    if not python:
        raise MissingError(f"{variable} is not set: it names the Python of the environment with that server")
    if shutil.which(python) is None:
        raise MissingError(f"{variable} = {python}: no such program")
    return python


def live_folder(variable: str) -> str:
    """Return the folder of a model that a variable names.

    Raises:
        MissingError: it is not set, or holds no model.
    """
    folder = os.environ.get(variable, "")
    if not Path(folder, "config.json").is_file():
        raise MissingError(f"{variable} = {folder!r}: it names a folder with a model's config.json")
    return folder


@contextlib.asynccontextmanager
async def _up(
    name: str, argv: Sequence[str], folder: Path, health: str, env: Mapping[str, str]
) -> AsyncIterator[Child]:
    child = Child(name, argv, folder / f"{name}.log", env)
    child.log.unlink(missing_ok=True)
    child.start()
    try:
        await child.wait_ready(health, READY_S)
        yield child
    finally:
        await child.stop(grace_s=10.0)


def _described(name: str, place: Place, url: str, **others: str) -> Server:
    told = {
        "key": KEY,
        "model": FAMILY,
        "embeddings_url": url,
        "embeddings_model": EMBEDDINGS,
        "grpc": "",
        "whole_model": FAMILY,
        "stream_model": FAMILY,
        **others,
    }
    return Server(
        name,
        url,
        tokenizer=place.tokenizer,
        context_tokens=CONTEXT_TOKENS,
        page_port=place.page_port,
        folder=place.folder / name,
        **told,
    )


@contextlib.asynccontextmanager
async def _edge(place: Place, _peers: Peers) -> AsyncIterator[Running]:
    port, grpc, config = free_port(), free_port(), place.folder / "edge.toml"
    told = {"port": port, "grpc": grpc, "page": place.page, "key": KEY, "context": CONTEXT_TOKENS}
    folders = {"cache": place.folder / "serving", "jobs": place.emptied("edge-jobs")}
    config.write_text(EDGE_TOML.format(**told, **folders), encoding="utf-8")
    url = f"http://127.0.0.1:{port}"
    argv = overspill("edge", "run", "--config", str(config))
    async with _up("edge", argv, place.folder, f"{url}/health/ready", {}):
        yield Running(_described("edge", place, url, grpc=f"127.0.0.1:{grpc}"), f"overspill {commit()}")


@contextlib.asynccontextmanager
async def _cloud(place: Place, _peers: Peers) -> AsyncIterator[Running]:
    async with _tier("cloud", place, ENGINE_TOML.format(context=CONTEXT_TOKENS)) as running:
        yield running


@contextlib.asynccontextmanager
async def _cloud_over_vllm(place: Place, peers: Peers) -> AsyncIterator[Running]:
    behind = await peers.vllm()
    urls = {"url": behind.server.url, "embeddings_url": behind.server.embeddings_url}
    async with _tier("cloud-vllm", place, BACKEND_TOML.format(**urls, key=KEY)) as running:
        yield Running(running.server, f"{running.version} over {behind.version}")


@contextlib.asynccontextmanager
async def _tier(name: str, place: Place, models: str) -> AsyncIterator[Running]:
    port, grpc, config = free_port(), free_port(), place.folder / f"{name}.toml"
    told = {"port": port, "grpc": grpc, "page": place.page, "jobs": place.emptied(f"{name}-jobs"), "models": models}
    config.write_text(CLOUD_TOML.format(**told), encoding="utf-8")
    url = f"http://127.0.0.1:{port}"
    argv = overspill("cloud", "serve", "--config", str(config))
    async with _up(name, argv, place.folder, f"{url}/health/ready", {"OVERSPILL_CLOUD_API_KEYS": KEY}):
        server = _described(name, place, url, grpc=f"127.0.0.1:{grpc}")
        await _serves(server)
        yield Running(server, f"overspill {commit()}")


async def _serves(server: Server) -> None:
    """Ask for one token: a tier is ready before each of its backends was measured."""
    told = {"model": server.model, "prompt": "Hello", "max_tokens": 1}
    async with httpx.AsyncClient(timeout=120, headers={"authorization": f"Bearer {KEY}"}) as client:
        for _ in range(60):
            reply = await client.post(f"{server.openai_url}/completions", json=told)
            if reply.status_code == 200:
                return
            await asyncio.sleep(1.0)
    raise RuntimeError(f"{server.name} is up and serves nothing: {reply.text[:300]}")


@contextlib.asynccontextmanager
async def _vllm(place: Place) -> AsyncIterator[Running]:
    """Run vLLM twice: a server of it has one model, and embeddings want another one."""
    python, model = live_python("OVERSPILL_LIVE_VLLM"), live_folder("OVERSPILL_LIVE_VLLM_MODEL")
    chat = ["--model", model, "--served-model-name", FAMILY, "--max-model-len", str(CONTEXT_TOKENS), "--enforce-eager"]
    chat += ["--enable-prompt-tokens-details", "--enable-tokenizer-info-endpoint"]
    chat += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    encoder = ["--model", str(ModelStore().source_path(EMBEDDINGS)), "--served-model-name", EMBEDDINGS]
    encoder += ["--runner", "pooling", "--dtype", "float32"]
    async with (
        _vllm_server("vllm", python, chat, place) as url,
        _vllm_server("vllm-embeddings", python, encoder, place) as embeddings_url,
    ):
        server = _described("vllm", place, url, embeddings_url=embeddings_url)
        yield Running(server, f"vllm {_version(python, 'vllm')}")


@contextlib.asynccontextmanager
async def _vllm_server(name: str, python: str, options: Sequence[str], place: Place) -> AsyncIterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port), *options]
    argv += ["--api-key", KEY, "--allowed-origins", json.dumps([place.page])]
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": "",
    }
    async with _up(name, argv, place.folder, f"{url}/health", env):
        yield url


@contextlib.asynccontextmanager
async def _vllm_itself(_place: Place, peers: Peers) -> AsyncIterator[Running]:
    yield await peers.vllm()


def _version(python: str, package: str) -> str:
    script = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.strip()


@contextlib.asynccontextmanager
async def _triton(place: Place, _peers: Peers) -> AsyncIterator[Running]:
    live_python("OVERSPILL_LIVE_TRITON")
    from tests.support.live_triton import triton_server

    grpc = free_port()
    async with triton_server(place.folder, "--allow-grpc=true", f"--grpc-port={grpc}") as triton:
        names = {"key": "", "grpc": f"127.0.0.1:{grpc}", "model": "whole"}
        server = _described("triton", place, triton.url, **names, whole_model="whole", stream_model="counting")
        async with httpx.AsyncClient() as client:
            version = (await client.get(f"{triton.url}/v2")).json()["version"]
        yield Running(server, f"triton {version}")


KINDS: tuple[Kind, ...] = (
    Kind("edge", "edge agent", frozenset({"openai", "kserve", "http"}), _edge),
    Kind("cloud", "cloud tier", frozenset({"openai", "kserve", "http"}), _cloud),
    Kind("cloud-vllm", "cloud tier over vLLM", frozenset({"openai", "kserve", "http"}), _cloud_over_vllm),
    Kind("vllm", "vLLM itself", frozenset({"openai", "http"}), _vllm_itself, peer=True),
    Kind("triton", "Triton itself", frozenset({"kserve"}), _triton, peer=True),
)
