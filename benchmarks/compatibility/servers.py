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
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from benchmarks._stamp import commit
from benchmarks.compatibility.clients.checking import Server
from benchmarks.compatibility.configurations import BACKEND_TOML, CLOUD_TOML, EDGE_TOML, ENGINE_TOML
from benchmarks.compatibility.environments import MissingError
from benchmarks.compatibility.registry import Protocol
from benchmarks.compatibility.studio import CONFIGURED, VIEWER, VOICE, studio
from examples.demo.processes import Child, free_port, overspill
from models.store.store import ModelStore

FAMILY = "smollm2-135m"
EMBEDDINGS = "all-minilm-l6-v2"
CONTEXT_TOKENS = 2048
KEY = "compatibility-key-0123456789"  # of this run's servers, on the loopback interface
READY_S = 420.0  # vLLM's CPU build on a busy machine


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
        self._studio = ""

    async def studio(self) -> str:
        """Return what the configuration of a tier says of it."""
        if not self._studio:
            self._studio = CONFIGURED.format(url=await self._stack.enter_async_context(studio()))
        return self._studio

    async def vllm(self) -> Running:
        if self._vllm is None:
            self._vllm = await self._stack.enter_async_context(_vllm(self._place))
        return self._vllm


@dataclass(frozen=True)
class Ours:
    """How a tier of ours is started: its command, the template of its configuration, its environment."""

    name: str
    command: tuple[str, str]
    template: str
    env: Mapping[str, str]


EDGE = Ours("edge", ("edge", "run"), EDGE_TOML, {})
CLOUD = Ours("cloud", ("cloud", "serve"), CLOUD_TOML, {"OVERSPILL_CLOUD_API_KEYS": KEY})


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
        "ranker": "",
        "voice": "",
        "viewer": "",
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
async def _edge(place: Place, peers: Peers) -> AsyncIterator[Running]:
    told = {"key": KEY, "cache": place.folder / "serving", "studio": await peers.studio()}
    async with _ours(EDGE, place, told) as server:
        yield Running(server, f"overspill {commit()}")


@contextlib.asynccontextmanager
async def _cloud(place: Place, peers: Peers) -> AsyncIterator[Running]:
    models = ENGINE_TOML.format(context=CONTEXT_TOKENS) + await peers.studio()
    async with _tier("cloud", place, models) as server:
        yield Running(server, f"overspill {commit()}")


@contextlib.asynccontextmanager
async def _cloud_over_vllm(place: Place, peers: Peers) -> AsyncIterator[Running]:
    behind = await peers.vllm()
    urls = {"url": behind.server.url, "embeddings_url": behind.server.embeddings_url}
    models = BACKEND_TOML.format(**urls, key=KEY) + await peers.studio()
    async with _tier("cloud-vllm", place, models) as server:
        yield Running(replace(server, ranker=EMBEDDINGS), f"overspill {commit()} over {behind.version}")


@contextlib.asynccontextmanager
async def _tier(name: str, place: Place, models: str) -> AsyncIterator[Server]:
    async with _ours(replace(CLOUD, name=name), place, {"models": models}) as server:
        await _serves(server)
        yield server


@contextlib.asynccontextmanager
async def _ours(tier: Ours, place: Place, told: Mapping[str, object]) -> AsyncIterator[Server]:
    """Start a tier of ours on free ports, with what every configuration of this run says."""
    port, grpc, config = free_port(), free_port(), place.folder / f"{tier.name}.toml"
    jobs = place.emptied(f"{tier.name}-jobs")
    alike = {"port": port, "grpc": grpc, "page": place.page, "jobs": jobs, "context": CONTEXT_TOKENS}
    config.write_text(tier.template.format(**alike, **told), encoding="utf-8")
    url = f"http://127.0.0.1:{port}"
    argv = overspill(*tier.command, "--config", str(config))
    async with _up(tier.name, argv, place.folder, f"{url}/health/ready", tier.env):
        yield _described(tier.name, place, url, grpc=f"127.0.0.1:{grpc}", voice=VOICE, viewer=VIEWER)


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
        server = _described("vllm", place, url, embeddings_url=embeddings_url, ranker=EMBEDDINGS)
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
    Kind("edge", "edge agent", frozenset({"openai", "anthropic", "kserve", "http"}), _edge),
    Kind("cloud", "cloud tier", frozenset({"openai", "anthropic", "kserve", "http"}), _cloud),
    Kind("cloud-vllm", "cloud tier over vLLM", frozenset({"openai", "anthropic", "kserve", "http"}), _cloud_over_vllm),
    Kind("vllm", "vLLM itself", frozenset({"openai", "anthropic", "http"}), _vllm_itself, peer=True),
    Kind("triton", "Triton itself", frozenset({"kserve"}), _triton, peer=True),
)
