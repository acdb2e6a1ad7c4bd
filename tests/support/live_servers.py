"""Real servers of other makers on free loopback ports: started, waited for, stopped, or killed as by a power cut.

Each lives in an environment of its own, which an environment variable names; where that is not set, the test that wants
it is skipped and says which variable that is.

| server    | variable                                                                                              |
|-----------|-------------------------------------------------------------------------------------------------------|
| llama.cpp | `OVERSPILL_LIVE_LLAMA`: a Python with `xllamacpp`                                                     |
| vLLM      | `OVERSPILL_LIVE_VLLM`: a Python with `vllm`; `OVERSPILL_LIVE_VLLM_MODEL`: SmolLM2 as the hub lays it out |
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pytest

from examples.demo.processes import Child
from tests.support.ports import unused_port

MODEL = "smollm2-135m"
_GGUF = f"{MODEL}/source/SmolLM2-135M-Instruct.Q4_1.gguf"
_LLAMA = """
import sys, time
import xllamacpp
params = xllamacpp.CommonParams()
path, name, port, slots, context_tokens, threads = sys.argv[1:]
params.model.path = path
params.model_alias = {name}
params.hostnames = ["127.0.0.1"]
params.port = int(port)
params.n_parallel = int(slots)
params.n_ctx = int(context_tokens) * int(slots)
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
params.endpoint_metrics = True
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
while True:
    time.sleep(3600)
"""


def live_python(variable: str) -> str:
    """The interpreter that an environment variable names; the test is skipped where it is not set."""
    python = os.environ.get(variable, "")
    if not python:
        pytest.skip(f"{variable} is not set: it names the Python of the environment with that server")
    found = shutil.which(python)
    if found is None:
        pytest.fail(f"{variable} = {python}: no such program")
    return found


def live_folder(variable: str) -> Path:
    """The folder that an environment variable names; the test is skipped where it is not set."""
    folder = os.environ.get(variable, "")
    if not folder:
        pytest.skip(f"{variable} is not set: it names the folder of a model")
    if not Path(folder).is_dir():
        pytest.fail(f"{variable} = {folder}: no such folder")
    return Path(folder)


class LiveServer:
    """Use as `async with`: ready inside, ended after it, whatever became of it meanwhile.

    Args:
        argv: its command line; it shall listen on `port` of the loopback interface.
        ready_path: answers 200 once it serves.
        patience_s: how long it may take to be ready.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        port: int,
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        ready_path: str = "/health",
        patience_s: float = 60.0,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.child = Child(name, argv, log, env)
        self._ready_path = ready_path
        self._patience_s = patience_s

    async def __aenter__(self) -> LiveServer:
        self.start()
        try:
            await self.ready()
        except BaseException:
            self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.child.stop(grace_s=10.0)

    def start(self) -> None:
        """Start it, also again, and do not wait until it is ready."""
        self.child.start()

    def kill(self) -> None:
        """Kill it with SIGKILL, and all its children."""
        self.child.kill()

    async def ready(self) -> None:
        """Wait until it answers; a server that ends meanwhile fails at once, with the last lines of its log."""
        await self.child.wait_ready(self.url + self._ready_path, self._patience_s)


def llama_server(
    models_root: Path,
    folder: Path,
    *,
    name: str = "llama",
    port: int | None = None,
    slots: int = 4,
    context_tokens: int = 2048,
) -> LiveServer:
    """A llama.cpp server of SmolLM2, as the store holds it, under the model name `smollm2-135m`.

    Args:
        name: of its log in `folder`.
        context_tokens: window of each of its slots.
    """
    python, port = live_python("OVERSPILL_LIVE_LLAMA"), port or unused_port()
    figures = [str(figure) for figure in (port, slots, context_tokens, 1)]
    argv = [python, "-c", _LLAMA, str(models_root / _GGUF), MODEL, *figures]
    return LiveServer(name, argv, port, folder / f"{name}.log")


def vllm_server(folder: Path, *args: str, name: str = "vllm", port: int | None = None) -> LiveServer:
    """A vLLM server of SmolLM2 on the CPU, under the model name `smollm2-135m`.

    Args:
        args: further flags.
        name: of its log in `folder`.
    """
    python, port = live_python("OVERSPILL_LIVE_VLLM"), port or unused_port()
    model = live_folder("OVERSPILL_LIVE_VLLM_MODEL")
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", MODEL]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--enforce-eager"]
    argv += ["--enable-prompt-tokens-details", *args]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return LiveServer(name, argv, port, folder / f"{name}.log", env=env, patience_s=420.0)
