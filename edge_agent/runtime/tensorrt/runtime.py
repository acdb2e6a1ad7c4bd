"""TensorRT: an engine built on this device runs on memory that CPU and GPU share.

Written against the TensorRT 10 API, which TensorRT for RTX shares; it needs an NVIDIA GPU, and no machine of this
project's tests has one. On the device, with `name = "tensorrt"` in the profile's `[runtime]`:

    overspill models build smollm2-135m-int8 --runtime tensorrt
    overspill edge check --config edge.toml && overspill edge run --config edge.toml

Engines are portable neither between devices nor between TensorRT versions, so they lie in the store under a key over
all they depend on, and only one that was built from exactly this artifact, by exactly this TensorRT, for steps as large
as the configuration asks for, is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edge_agent.runtime.manifest import Manifest, read_manifest, read_prefix, verify_files
from edge_agent.runtime.packed import PackedRuntime, Tensors
from edge_agent.runtime.protocol import RuntimeRequest
from router.base.cuda import Cuda, Gpu, first_gpu
from router.base.errors import ArtifactError, ConfigError
from router.base.extras import install
from router.base.json_input import UNREADABLE

_MODULES = ("tensorrt", "tensorrt_rtx")
_LOG_LINES = 20


def open_tensorrt(request: RuntimeRequest) -> PackedRuntime:
    """Load the engine of an artifact.

    Raises:
        ConfigError: TensorRT, CUDA or a GPU is missing.
        ArtifactError: there is no engine, or not one for this device and TensorRT version.
    """
    trt = tensorrt_module()
    manifest = read_manifest(request.artifact_dir)
    verify_files(request.artifact_dir, manifest)
    prefix = read_prefix(request.artifact_dir, manifest)
    plan = find_plan(trt, manifest, request, first_gpu())
    executor = TensorRtExecutor(trt, Cuda(), plan)
    return PackedRuntime(executor, manifest, prefix, request)


Bounds = tuple[int, int, int]


class _Shapes(msgspec.Struct):
    """Least, usual and most of each; see `models.tensorrt.build.BuildOptions`."""

    batch: Bounds
    new_tokens: Bounds
    past_tokens: Bounds


class _Key(msgspec.Struct):
    variant: str
    onnx: dict[str, str]
    runtime: str
    version: str
    target: str
    cuda: int | None
    options: _Shapes


class _Engine(msgspec.Struct):
    plan: str


class _Record(msgspec.Struct):
    """What `overspill models build` wrote beside a plan."""

    key: _Key
    engine: _Engine


def find_plan(trt: Any, manifest: Manifest, request: RuntimeRequest, gpu: Gpu | None = None) -> Path:
    """Return the engine that this TensorRT built for this GPU, from these files, for steps as large as asked for.

    Of several, one built with this CUDA version is taken, and then the newest.

    Args:
        gpu: the GPU that it must have been built for; None takes engines for any.

    Raises:
        ArtifactError: there is none; names the command that builds one.
    """
    folder = request.artifact_dir.parent / "engines"
    most = (request.slots, request.chunk_tokens, min(request.context_tokens, manifest.context_tokens))
    found: list[tuple[bool, float, Path]] = []
    others: list[str] = []
    for path in folder.glob(f"{manifest.variant}-*.json"):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=_Record)
        except (OSError, *UNREADABLE):  # cut short or of another kind: not ours to use
            continue
        same_files = all(
            name in manifest.files and manifest.files[name].sha256 == digest for name, digest in record.key.onnx.items()
        )
        if (record.key.runtime, record.key.version) != (trt.__name__, str(trt.__version__)) or not same_files:
            continue
        if gpu is not None and record.key.target != gpu.target:
            others.append(f"{record.engine.plan} is for {record.key.target}, this GPU is {gpu.target}")
            continue
        shapes = record.key.options
        allowed = (shapes.batch[2], shapes.new_tokens[2], shapes.past_tokens[2])
        if all(limit >= size for limit, size in zip(allowed, most, strict=True)):
            plan = folder / record.engine.plan
            same_cuda = gpu is None or record.key.cuda == gpu.cuda_version
            found.append((same_cuda, plan.stat().st_mtime if plan.exists() else 0.0, plan))
        else:
            others.append(f"{record.engine.plan} is for {_in_words(allowed)}")
    if not found:
        raise ArtifactError(
            f"no engine of {manifest.variant} for {trt.__name__} {trt.__version__} and {_in_words(most)} in {folder}"
            f"{''.join(f' ({line})' for line in others)}; build it on this device: overspill models build "
            f"{manifest.variant} --runtime {trt.__name__} --batch {most[0]} --chunk {most[1]} --context {most[2]}"
        )
    return max(found)[2]


def _in_words(sizes: Bounds) -> str:
    return f"{sizes[0]} sequences of {sizes[2]} tokens in chunks of {sizes[1]}"


class TensorRtExecutor:
    """`Executor` over one execution context."""

    name = "tensorrt"
    fallbacks: tuple[str, ...] = ()
    min_past_tokens = 1
    owns_memory = True
    scored_tokens = 1  # what engines are built for

    def __init__(self, trt: Any, cuda: Cuda, plan: Path) -> None:
        self._cuda = cuda
        self._log = _log_into(trt)
        try:
            raw = plan.read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"cannot read {plan}: {error.strerror}; build the engine on this device again"
            ) from error
        self._runtime = trt.Runtime(self._log)
        self._engine = self._runtime.deserialize_cuda_engine(raw)
        if self._engine is None:
            raise ArtifactError(
                f"TensorRT {trt.__version__} cannot load {plan}: {self._said()}; engines fit one device and one "
                "TensorRT version: build it again here"
            )
        self._check_types(trt, plan)
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise ArtifactError(f"TensorRT cannot run {plan}: {self._said()}; free memory and try again")
        self._bound: object = None
        self.providers: tuple[str, ...] = (f"{trt.__name__} {trt.__version__}",)

    def empty(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
        return self._cuda.empty(shape, dtype)

    def bind(self, inputs: Tensors, outputs: Tensors) -> Callable[[], None]:
        addresses = {name: self._cuda.device_address(array) for name, array in {**inputs, **outputs}.items()}
        key = object()

        def run() -> None:
            if self._bound is not key:
                self._bound = None
                self._set(inputs, addresses)
                self._bound = key
            if not self._context.execute_async_v3(self._cuda.stream):
                raise RuntimeError(f"TensorRT could not start the step: {self._said()}")
            self._cuda.synchronize()

        return run

    def release_memory(self) -> None:
        """Nothing: the engine's scratch memory belongs to its context."""

    def close(self) -> None:
        self._context = self._engine = self._runtime = None
        self._cuda.close()

    def _set(self, inputs: Tensors, addresses: dict[str, int]) -> None:
        for name, array in inputs.items():
            if not self._context.set_input_shape(name, array.shape):
                raise RuntimeError(f"the engine's profile does not allow {name} {array.shape}: {self._said()}")
        missing = self._context.infer_shapes()
        if missing:
            raise RuntimeError(f"the engine has inputs that the graph contract does not: {', '.join(missing)}")
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise RuntimeError(f"the engine has no tensor {name}: {self._said()}")

    def _check_types(self, trt: Any, plan: Path) -> None:
        """Raises ArtifactError for an engine whose tensors are not the 32-bit floats and 64-bit ids of the contract."""
        for index in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(index)
            found = self._engine.get_tensor_dtype(name)
            if found not in (trt.DataType.FLOAT, trt.DataType.INT64):
                raise ArtifactError(f"{plan}: tensor {name} is {found}; build it with overspill models build")

    def _said(self) -> str:
        return "; ".join(self._log.lines[-3:]) or "no reason given"


def tensorrt_module() -> Any:
    """Import TensorRT under whichever name it is installed.

    Raises:
        ConfigError: it is not; says how to get it.
    """
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:  # noqa: PERF203
            continue
    raise ConfigError(
        "runtime `tensorrt` needs the tensorrt module: JetPack ships it (apt install python3-libnvinfer), elsewhere: "
        f"{install('tensorrt')}",
        param="runtime.name",
    )


def _log_into(trt: Any) -> Any:
    """A logger that keeps TensorRT's last warnings and errors: the only place where it says why it refuses."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.WARNING:
                self.lines = [*self.lines, message][-_LOG_LINES:]

    return Log()
