"""Which servers the tier starts itself: `[[backends]]` of kind `vllm`, and the `[[models]]` that vLLM serves here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import structlog

from cloud_tier.config import CloudConfig, ModelConfig
from cloud_tier.engines.command import ServerSpec, check_executable, is_installed, share_cores
from cloud_tier.engines.settings import CloudBackend, VllmSettings
from cloud_tier.gpus import Gpu, GpuFinder, find_gpus
from cloud_tier.lineup import find_variant
from models.catalogue.families import Catalogue
from models.store.store import ModelStore
from router.base.errors import ConfigError
from router.upstream.settings import BackendModel, check_backends

log = structlog.get_logger("cloud_tier")

_DEFAULTS = ModelConfig(variant="any")
# How much is computed at once is vLLM's own choice, from the memory that it finds.
_TORCH_ONLY = ("max_running", "token_budget", "kv_cache_tokens", "threads", "draft")
_MAX_NAME_CHARS = 56
_START_TIMEOUT_S = 1800.0  # the default of `[[models]]` is the embedded engine's, which compiles nothing


@dataclass(frozen=True, slots=True)
class Servers:
    """What is to be started beside the embedded engines.

    Attributes:
        config: without the models that vLLM serves, and with their servers among its backends.
        specs: of each server to start.
        engine_gpus: finds the GPUs that are left for the embedded engines.
    """

    config: CloudConfig
    specs: tuple[ServerSpec, ...]
    engine_gpus: GpuFinder


def plan_servers(
    config: CloudConfig,
    catalogue: Catalogue,
    store: ModelStore,
    gpus: GpuFinder = find_gpus,
    installed: Callable[[], bool] = is_installed,
) -> Servers:
    """Choose who serves each `[[models]]` entry, and which GPUs each server of ours gets.

    Raises:
        ConfigError: vLLM is not here, cannot serve an entry, or wants more GPUs than there are.
        ModelNotFound, ArtifactError: a model that vLLM shall serve is unknown, or its weights are not here.
    """
    finder = _Once(gpus)
    embedded, backends = [], list(config.backends)
    for entry in config.models:
        if _for_vllm(entry, finder, installed):
            backends.append(_as_backend(entry, catalogue, store, config.server.warm_up, [b.name for b in backends]))
        else:
            embedded.append(entry)
    ours = [(backend, backend.vllm) for backend in backends if backend.vllm is not None]
    for backend, settings in ours:
        check_executable(backend.name, settings)
    if ours:
        try:
            check_backends(backends)
        except ValueError as error:
            raise ConfigError(str(error), param="backends") from error
        placed = _give_gpus(ours, finder)
        config = msgspec.structs.replace(config, models=tuple(embedded), backends=tuple(backends))
        taken = {gpu for ids in placed for gpu in ids}
        left: GpuFinder = _Left(finder, taken) if taken else gpus
        specs = [ServerSpec(backend, settings, ids) for (backend, settings), ids in zip(ours, placed, strict=True)]
        return Servers(config, tuple(_with_cores(specs)), left)
    return Servers(config, (), gpus)


class _Once:
    """Looks for GPUs once: it takes torch, in a process of its own."""

    def __init__(self, gpus: GpuFinder) -> None:
        self._gpus = gpus
        self._found: tuple[Gpu, ...] | None = None

    def __call__(self, *, expected: bool) -> tuple[Gpu, ...]:
        if self._found is None:
            self._found = self._gpus(expected=expected)
        return self._found


class _Left:
    """The GPUs that no server of ours has."""

    def __init__(self, gpus: GpuFinder, taken: set[str]) -> None:
        self._gpus = gpus
        self._taken = taken

    def __call__(self, *, expected: bool) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self._gpus(expected=expected) if gpu.id not in self._taken)


def _for_vllm(entry: ModelConfig, gpus: GpuFinder, installed: Callable[[], bool]) -> bool:
    """Say whether vLLM serves an entry: where it is asked for, or where it is here, with CUDA, and can.

    Raises:
        ConfigError: it is asked for and cannot, as far as the entry shows.
    """
    only_torch = [key for key in _TORCH_ONLY if getattr(entry, key) != getattr(_DEFAULTS, key)]
    if entry.engine == "vllm":
        if only_torch:
            raise ConfigError(
                f'`{only_torch[0]}` of {entry.label} is for engine = "torch"; vLLM sizes that itself, and takes '
                'flags in `args` of a [[backends]] entry of kind "vllm"',
                param=f"models.{only_torch[0]}",
            )
        return True
    if entry.engine == "torch" or entry.device == "cpu" or only_torch:
        return False
    suits = entry.path is not None and (Path(entry.path).expanduser() / "config.json").is_file() and installed()
    if not suits or not gpus(expected=False):
        return False
    log.info("vLLM serves this model", model=entry.label, why="it is installed, and torch finds a GPU")
    return True


def _as_backend(
    entry: ModelConfig, catalogue: Catalogue, store: ModelStore, warm_up: bool, taken: Sequence[str]
) -> CloudBackend:
    """Return the server that serves a `[[models]]` entry.

    Raises:
        ConfigError: its weights are in no form that vLLM loads.
    """
    served, source = entry.served_name, entry.path or ""
    family, rung, quality = entry.family or served, entry.rung, entry.quality
    if entry.path is None:
        variant, _ = find_variant(served, catalogue)
        folder = store.source_path(variant.family)
        if not folder.is_dir() or variant.layers is not None:
            raise ConfigError(
                f"vLLM loads Hugging Face directories, and {served} is "
                f"{'a selection of layers' if variant.layers is not None else f'the file {folder.name}'}: "
                'name a directory with --model, or set engine = "torch"',
                param="models.engine",
            )
        source, family, rung, quality = str(folder), variant.family, variant.rung, variant.quality
    args = [] if entry.dtype == "auto" else ["--dtype", entry.dtype]
    args += [] if entry.max_context_tokens is None else ["--max-model-len", str(entry.max_context_tokens)]
    args += [] if entry.prefix_caching else ["--no-enable-prefix-caching"]
    name = served[:_MAX_NAME_CHARS]
    number = next(n for n in range(1, len(taken) + 2) if _numbered(name, n) not in taken)
    return CloudBackend(
        name=_numbered(name, number),
        kind="vllm",
        warm_up=warm_up,
        models=(BackendModel(served=served, family=family, rung=rung, quality=quality),),
        vllm=VllmSettings(
            model=source,
            served=served,
            tensor_parallel=entry.tensor_parallel,
            gpus=entry.gpus,
            args=tuple(args),
            start_timeout_s=max(entry.start_timeout_s, _START_TIMEOUT_S),
            silent_s=2 * entry.step_timeout_s,
        ),
    )


def _with_cores(specs: Sequence[ServerSpec]) -> Iterator[ServerSpec]:
    ranks = [spec.settings.ranks if spec.on_cpu else 0 for spec in specs]
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    for spec, bound in zip(specs, share_cores(ranks, cores), strict=True):
        yield replace(spec, cpu_bind=bound) if spec.on_cpu else spec


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}.{number}"


def _give_gpus(ours: Sequence[tuple[CloudBackend, VllmSettings]], gpus: GpuFinder) -> list[tuple[str, ...]]:
    """Give every server GPUs of its own, most free memory first: vLLM takes nearly all of what it finds.

    Those that the configuration names may be shared, at the operator's word. Without GPUs, they compute on the CPU.

    Raises:
        ConfigError: there are too few.
    """
    found = gpus(expected=False)
    named = {gpu for _, settings in ours for gpu in settings.gpus}
    free = [gpu for gpu in sorted(found, key=lambda gpu: -gpu.free_bytes) if gpu.id not in named]
    placed: list[tuple[str, ...]] = []
    for entry, settings in ours:
        if settings.gpus or settings.executor == "ray" or not found:
            placed.append(settings.gpus)
            continue
        if settings.ranks > len(free):
            raise ConfigError(
                f"backends.{entry.name}: tensor × pipeline × data parallel = {settings.ranks} GPUs, and of the "
                f"{len(found)} here {len(free)} are free of other servers; lower them, name GPUs to share in `gpus` "
                'with --gpu-memory-utilization in `args`, or set executor = "ray" for a cluster',
                param="backends.vllm.tensor_parallel",
            )
        placed.append(tuple(gpu.id for gpu in free[: settings.ranks]))
        free = free[settings.ranks :]
    return placed
