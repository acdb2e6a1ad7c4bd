"""Build a TensorRT engine of an ONNX artifact: strongly typed, one profile for batch, new and past positions.

Two modules share one API. `tensorrt` (JetPack, data centre) builds for the GPU it runs on. `tensorrt_rtx` builds for
any GPU it knows, on a machine that has none. Engines move neither across platforms nor across TensorRT versions, so a
plan is kept under a key over everything that it depends on, and a key that is there is used again:

    <store>/<family>/engines/<variant>-<key>.plan     the serialised engine
    <store>/<family>/engines/<variant>-<key>.json     what it was built from
    <store>/<family>/engines/tensorrt.timing          the timing cache of this machine
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from models.graph.artifact import Note, silent
from models.graph.export import exported, onnx_variant
from models.graph.gate import check_graph
from models.store import disk
from models.store.manifest import MANIFEST_FILE
from router.base.cuda import first_gpu
from router.base.errors import ArtifactError, InvalidRequest
from router.base.extras import install
from router.base.json_input import UNREADABLE

if TYPE_CHECKING:
    from models.catalogue.families import Variant
    from models.store.store import ModelStore

RuntimeName = Literal["tensorrt", "tensorrt_rtx"]

_MODULES: tuple[RuntimeName, ...] = ("tensorrt", "tensorrt_rtx")
_L4T_FILE = Path("/etc/nv_tegra_release")


@dataclass(frozen=True)
class BuildOptions:
    """The shapes an engine accepts, min to max, and what it is tuned for.

    Attributes:
        batch, new_tokens, past_tokens: (min, opt, max). A past of 0 is left out: prompts begin from the prefix. The
            agent takes an engine whose maxima reach its slots, its prefill chunk and its window.
        workspace_bytes: memory the builder may use for one layer; the whole build takes several times the plan.
        optimization_level: 0 builds fast, 5 searches longest.
    """

    batch: tuple[int, int, int] = (1, 1, 4)
    new_tokens: tuple[int, int, int] = (1, 1, 512)
    past_tokens: tuple[int, int, int] = (1, 256, 2048)
    workspace_bytes: int = 512 << 20
    optimization_level: int = 3

    def __post_init__(self) -> None:
        for name in ("batch", "new_tokens", "past_tokens"):
            low, opt, high = getattr(self, name)
            if not 1 <= low <= opt <= high:
                raise InvalidRequest(f"`{name}` is {(low, opt, high)}; give 1 <= min <= opt <= max", param=name)


@dataclass(frozen=True)
class Engine:
    """A built plan.

    Attributes:
        plan: the serialised engine.
        target: `sm86`, the GPU it is for.
        int8_checked: `engine` if the inspector showed INT8 layers, `network` where no GPU could open the plan and
            only the network that was built could be asked.
        reused: it was there already.
    """

    plan: Path
    runtime: str
    runtime_version: str
    target: str
    plan_bytes: int
    int8_checked: str
    build_s: float
    reused: bool = False


@dataclass
class _Log:
    """What TensorRT said, worst last; errors become the message of an `ArtifactError`."""

    lines: list[str] = field(default_factory=list)

    def tail(self) -> str:
        return "; ".join(self.lines[-3:]) or "it gave no reason"


def build(
    variant_name: str,
    store: ModelStore,
    *,
    runtime: RuntimeName | None = None,
    target: str | None = None,
    options: BuildOptions | None = None,
    note: Note = silent,
) -> Engine:
    """Build the engine of an ONNX artifact, or return the one of the same key.

    Args:
        runtime: None takes what is installed here, `tensorrt` first.
        target: `sm86` and the like; None is the GPU of this machine.

    Raises:
        ModelNotFound, InvalidRequest: the variant or the target is unknown.
        ArtifactError: the artifact was not made, TensorRT is missing or refuses the graph, the target is not one that
            this runtime can build for, the engine came out without INT8, or the disk is full: no plan is left then.
    """
    chosen = options or BuildOptions()
    variant = store.catalogue.variant(variant_name) if not variant_name.endswith("-onnx") else None
    if variant is None or variant.format != "onnx":
        variant, folder = onnx_variant(store, variant_name), exported(variant_name, store)
    else:
        folder = store.artifact_dir(variant)
    runtime = runtime or _installed()
    trt = _module(runtime)
    sm = _target(trt, runtime, target)
    facts = _facts(folder, variant, trt, runtime=runtime, sm=sm, options=chosen)
    key = hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()[:20]
    engines = store.root / variant.family / "engines"
    record = engines / f"{variant.name}-{key}.json"
    there = _reuse(record)
    if there is not None:
        note(f"{variant.name}: engine for {sm} is there already")
        return there
    if variant.precision == "int8":
        check_graph(folder / "model.onnx")
    note(f"{variant.name}: building for {sm} with {runtime} {trt.__version__}; this takes minutes on a board")
    timing = engines / f"{runtime}.timing" if runtime == "tensorrt" else None  # TensorRT-RTX keeps none
    weights_bytes = sum(path.stat().st_size for path in folder.glob("model.onnx*"))
    disk.need_space(engines, weights_bytes)  # a plan is about as large as the weights that it holds
    with disk.disk_errors(engines, weights_bytes):
        engines.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        plan, checked = _build_plan(trt, folder / "model.onnx", _Job(variant, sm, chosen, timing))
        path = record.with_suffix(".plan")
        engine = Engine(path, runtime, str(trt.__version__), sm, len(plan), checked, time.monotonic() - begin)
        _keep(engine, plan, {"key": facts, "engine": {**asdict(engine), "plan": path.name}})
    note(f"{variant.name}: {len(plan) / 1e6:.0f} MB in {engine.build_s:.0f} s")
    return engine


def _keep(engine: Engine, plan: bytes, content: Mapping[str, object]) -> None:
    """Write the plan and then its record; without a record there is no plan."""
    with _atomically(engine.plan) as staged:
        staged.write_bytes(plan)
    try:
        with _atomically(engine.plan.with_suffix(".json")) as staged:
            staged.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
    except OSError:
        engine.plan.unlink()
        raise


def _installed() -> RuntimeName:
    found = next((name for name in _MODULES if importlib.util.find_spec(name) is not None), None)
    if found is None:
        raise ArtifactError(
            "neither tensorrt nor tensorrt_rtx is installed here. For the GPU of this machine, tensorrt: "
            f"{_remedy('tensorrt')}. To build on an x86 machine for other GPUs, tensorrt_rtx: {_remedy('tensorrt_rtx')}"
        )
    return found


def _remedy(runtime: RuntimeName) -> str:
    if runtime == "tensorrt_rtx":
        return "pip install tensorrt-rtx"
    return (
        "on a Jetson, JetPack brings it (apt install python3-libnvinfer; make the virtual environment with "
        f"--system-site-packages), elsewhere {install('tensorrt')}"
    )


def _module(runtime: RuntimeName) -> Any:
    if runtime not in _MODULES:
        raise InvalidRequest(f"unknown runtime `{runtime}`; known: {', '.join(_MODULES)}", param="runtime")
    try:
        return importlib.import_module(runtime)
    except ImportError as error:
        raise ArtifactError(f"{runtime} cannot be loaded ({error}); install it: {_remedy(runtime)}") from error


def _target(trt: Any, runtime: str, target: str | None) -> str:
    """Resolve the target to `smNN`, refusing what the runtime cannot build for."""
    present = device_compute_capability()
    if target is None:
        if present is None:
            raise ArtifactError(
                "there is no NVIDIA GPU here to build for; name one: --target sm86 (needs tensorrt_rtx), "
                "or build on the device itself"
            )
        target = present
    if runtime == "tensorrt":
        if target != present:
            raise ArtifactError(
                f"TensorRT builds only for the GPU it runs on ({present or 'none here'}), not for {target}: "
                "run this command on the device"
            )
        return target
    known = sorted(name.lower() for name in dir(trt.ComputeCapability) if name.startswith("SM"))
    if target not in known:
        raise ArtifactError(
            f"tensorrt_rtx cannot build for {target}; it knows {', '.join(known)}. "
            "Jetsons (sm87, sm110) build on the device, with `tensorrt`"
        )
    return target


def device_compute_capability() -> str | None:
    """The first GPU's, as `sm87`, None without a GPU or its driver."""
    gpu = first_gpu()
    return None if gpu is None else gpu.target


def _cuda_version() -> int | None:
    """CUDA version of the driver, such as 12060; None without one."""
    gpu = first_gpu()
    return None if gpu is None else gpu.cuda_version


def _facts(
    folder: Path, variant: Variant, trt: Any, *, runtime: str, sm: str, options: BuildOptions
) -> dict[str, object]:
    """Everything that an engine depends on."""
    manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes())
    graph = {name: entry["sha256"] for name, entry in manifest["files"].items() if name.startswith("model.onnx")}
    return {
        "variant": variant.name,
        "onnx": graph,
        "runtime": runtime,
        "version": str(trt.__version__),
        "cuda": _cuda_version(),
        "l4t": _L4T_FILE.read_text(encoding="utf-8").split("\n")[0] if _L4T_FILE.is_file() else None,
        "target": sm,
        "options": msgspec.to_builtins(options),
    }


def _reuse(record: Path) -> Engine | None:
    try:
        entry = msgspec.json.decode(record.read_bytes())["engine"]
        engine = Engine(**{**entry, "plan": record.parent / entry["plan"], "reused": True})
    except (OSError, *UNREADABLE, KeyError, TypeError):
        return None
    whole = engine.plan.is_file() and engine.plan.stat().st_size == engine.plan_bytes
    return engine if whole else None


@contextmanager
def _atomically(path: Path) -> Iterator[Path]:
    """Give a temporary file that becomes `path` if the block succeeds."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    try:
        yield Path(name)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Job:
    variant: Variant
    target: str
    options: BuildOptions
    timing_file: Path | None


def _build_plan(trt: Any, model: Path, job: _Job) -> tuple[bytes, str]:
    """Parse, configure, build, and look whether INT8 came out."""
    log = _Log()
    logger = _logger(trt, log)
    builder = trt.Builder(logger)
    network = builder.create_network(_network_flags(trt))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model)):
        errors = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise ArtifactError(f"{model}: TensorRT {trt.__version__} cannot parse the graph: {errors or log.tail()}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job.options.workspace_bytes)
    config.builder_optimization_level = job.options.optimization_level
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if hasattr(config, "num_compute_capabilities"):
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, job.target.upper()), 0)
    cache = _timing_cache(config, job.timing_file) if job.timing_file else None
    config.add_optimization_profile(_profile(builder, network, job.options))
    serialised = builder.build_serialized_network(network, config)
    if serialised is None:
        raise ArtifactError(f"{model}: TensorRT {trt.__version__} cannot build it for {job.target}: {log.tail()}")
    if cache is not None and job.timing_file is not None:
        with _atomically(job.timing_file) as staged:
            staged.write_bytes(bytes(cache.serialize()))
    plan = bytes(serialised)
    checked = _check_int8(trt, logger, plan, network) if job.variant.precision == "int8" else "not INT8"
    return plan, checked


def _logger(trt: Any, log: _Log) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                log.lines.append(message)

    return Logger()


def _network_flags(trt: Any) -> int:
    """Strongly typed: precision is what Q/DQ says. TensorRT 11 knows nothing else and has no flag for it."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _timing_cache(config: Any, file: Path) -> Any:
    """Continue this machine's timing cache; one of another TensorRT or GPU is replaced."""
    cache = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
    if not config.set_timing_cache(cache, ignore_mismatch=False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _profile(builder: Any, network: Any, options: BuildOptions) -> Any:
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shapes = [
            _shape(tensor, *sizes) for sizes in zip(options.batch, options.new_tokens, options.past_tokens, strict=True)
        ]
        profile.set_shape(tensor.name, *shapes)
    return profile


def _shape(tensor: Any, batch: int, new: int, past: int) -> tuple[int, ...]:
    if tensor.name == "attention_bias":
        return batch, 1, new, past + new
    if tensor.name == "logits_at":
        return batch, 1
    if tensor.name.startswith("past_"):
        return batch, int(tensor.shape[1]), past, int(tensor.shape[3])
    return batch, new


def _check_int8(trt: Any, logger: Any, plan: bytes, network: Any) -> str:
    """Look into the engine for INT8 layers where a GPU can open it, else into the network it was built from.

    Raises:
        ArtifactError: neither shows INT8: the build would be a float engine under an INT8 name.
    """
    if device_compute_capability() is not None:
        engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
        if engine is not None:
            inspector = engine.create_engine_inspector()
            if "Int8" not in inspector.get_engine_information(trt.LayerInformationFormat.JSON):
                raise ArtifactError("the engine holds no INT8 layer; TensorRT fell back to float")
            return "engine"
    quantizers = sum(network.get_layer(i).type == trt.LayerType.QUANTIZE for i in range(network.num_layers))
    if not quantizers:
        raise ArtifactError("the network holds no quantization; TensorRT dropped it while parsing")
    return "network"
