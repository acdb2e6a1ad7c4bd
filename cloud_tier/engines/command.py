"""The command line and the environment of `vllm serve`, from `[backends.vllm]`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cloud_tier.engines.settings import CloudBackend, VllmSettings
from router.base.errors import ConfigError
from router.base.extras import install
from router.base.json_input import UNREADABLE

_RUN_AS_MODULE = ("-m", "vllm.entrypoints.cli.main")
_ONE = 1


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A vLLM server to start, checked against this machine.

    Attributes:
        gpus: that it gets, as CUDA_VISIBLE_DEVICES names them; empty where it computes on the CPU, where Ray gives
            them out, or where none could be looked for.
    """

    backend: CloudBackend
    settings: VllmSettings
    gpus: tuple[str, ...] = ()
    cpu_bind: str = ""

    @property
    def on_cpu(self) -> bool:
        return not self.gpus and self.settings.executor != "ray"


def is_installed() -> bool:
    """Whether vLLM can be started without saying where it is."""
    return importlib.util.find_spec("vllm") is not None or shutil.which("vllm") is not None


def check_executable(backend: str, settings: VllmSettings) -> None:
    """Look for vLLM before anything starts.

    Raises:
        ConfigError: it is not there; names the remedy.
    """
    if settings.executable:
        if shutil.which(os.path.expanduser(settings.executable)) is None:  # noqa: PTH111 - as in a PATH
            raise ConfigError(
                f"backends.{backend}.vllm.executable = {settings.executable!r}: no such program; give the `vllm` "
                "command of the environment that has it",
                param="backends.vllm.executable",
            )
    elif not is_installed():
        raise ConfigError(
            f"backends.{backend}: vLLM is not installed here; run: {install('vllm')}, or put the `vllm` command of an "
            "environment that has it on the PATH, or into `executable` of [backends.vllm]",
            param="backends.vllm.executable",
        )


def command_of(spec: ServerSpec, port: int) -> list[str]:
    """Return the command that serves on `port` of this machine's loopback interface."""
    settings = spec.settings
    if settings.executable:
        command = [os.path.expanduser(settings.executable)]  # noqa: PTH111
    elif importlib.util.find_spec("vllm") is not None:
        command = [sys.executable, *_RUN_AS_MODULE]
    else:
        command = ["vllm"]
    folder = settings.directory
    command += ["serve", str(folder) if folder is not None else settings.model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", settings.served_name]
    for flag, degree in (
        ("--tensor-parallel-size", settings.tensor_parallel),
        ("--pipeline-parallel-size", settings.pipeline_parallel),
        ("--data-parallel-size", settings.data_parallel),
    ):
        command += [flag, str(degree)] if degree > _ONE else []
    if settings.executor != "auto":
        command += ["--distributed-executor-backend", settings.executor]
    if spec.backend.role:
        command += ["--kv-transfer-config", _transfer(spec)]
    return [*command, *settings.args]


def environment_of(
    spec: ServerSpec, api_key: str, side_port: int, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment: this process's own, what the tier says, and over both what is configured.

    Args:
        api_key: that requests to it will carry; never on its command line, where every user of the machine reads it.
        side_port: where `nixl` servers meet.
    """
    settings = spec.settings
    found = dict(environ) | {
        "VLLM_API_KEY": api_key,
        "VLLM_LOGGING_COLOR": "0",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.gpus:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
    if spec.cpu_bind:
        found.setdefault("VLLM_CPU_OMP_THREADS_BIND", spec.cpu_bind)
    if spec.backend.role and spec.backend.kv_connector == "nixl":
        found.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        found["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_port)
        if spec.on_cpu:
            found.setdefault("UCX_TLS", "tcp,sm,self")
    return found | settings.env


def share_cores(ranks: Sequence[int], cores: Sequence[int]) -> list[str]:
    """Return which cores each server's ranks take, as VLLM_CPU_OMP_THREADS_BIND has it.

    One rank alone is left to vLLM. Several need to be told: vLLM's own choice looks for a NUMA node each and gives up
    where there is but one, and two servers would bind their threads to the same cores.

    Args:
        ranks: of every server that computes on the CPU.
    """
    total = sum(ranks)
    if total <= _ONE:
        return [""] * len(ranks)
    if total > len(cores):
        return ["nobind"] * len(ranks)
    shares = iter(",".join(map(str, cores[rank::total])) for rank in range(total))
    return ["|".join(next(shares) for _ in range(own)) for own in ranks]


def window_of(model: VllmSettings) -> int | None:
    """Return how many tokens the model's own files, or `args`, say that its window has; None where they do not."""
    flags = [arg.replace("_", "-") for arg in model.args]
    for at, flag in enumerate(flags):
        name, _, value = flag.partition("=")
        told = value or (model.args[at + 1] if at + 1 < len(flags) else "")
        if name == "--max-model-len" and told.isdigit():
            return max(1, int(told))
    try:
        config = msgspec.json.decode((Path(model.model).expanduser() / "config.json").read_bytes())
        told_tokens = config["max_position_embeddings"]
    except (OSError, *UNREADABLE, KeyError, TypeError):
        return None
    return told_tokens if type(told_tokens) is int and told_tokens > 0 else None


def _transfer(spec: ServerSpec) -> str:
    backend = spec.backend
    if backend.kv_connector == "shared-folder":
        folder = str(Path(spec.settings.kv_folder).expanduser())
        tree: dict[str, object] = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        }
    else:
        role = "kv_producer" if backend.role == "prefill" else "kv_consumer"
        tree = {"kv_connector": "NixlConnector", "kv_role": role}
        if spec.on_cpu:
            tree["kv_buffer_device"] = "cpu"
    return msgspec.json.encode(tree).decode()
