"""ONNX Runtime sessions: options that suit a small shared machine, and execution providers without silent fallbacks."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from edge_agent.runtime.manifest import Manifest
from edge_agent.runtime.protocol import RuntimeRequest
from hardware_profiles.loader import RuntimeOptions
from router.base.errors import ArtifactError
from router.base.host import usable_cores

log = structlog.get_logger("edge_agent.runtime")

_PROVIDERS = {
    "tensorrt": "TensorrtExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "cpu": "CPUExecutionProvider",
}


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session, the providers it really has, and one line for each that was asked for and is not there."""

    session: Any
    providers: tuple[str, ...]
    fallbacks: tuple[str, ...]


def open_session(model: Path, manifest: Manifest, request: RuntimeRequest) -> OpenedSession:
    """Load `model`.

    Raises:
        ArtifactError: ONNX Runtime refuses it.
    """
    import onnxruntime as ort  # noqa: PLC0415  (an agent that serves no model must not pay 30 MB for it)

    wanted = request.options.providers
    present = set(ort.get_available_providers())
    fallbacks = [
        f"{name}: this build of onnxruntime has no {_PROVIDERS[name]}"
        for name in wanted
        if _PROVIDERS[name] not in present
    ]
    asked = [name for name in wanted if _PROVIDERS[name] in present] or ["cpu"]
    providers = [(_PROVIDERS[name], _provider_options(name, manifest, request)) for name in asked]
    try:
        session = ort.InferenceSession(str(model), _session_options(ort, request.options), providers=providers)
    except Exception as error:  # ONNX Runtime raises bare RuntimeError and pybind types of its own
        raise ArtifactError(
            f"onnxruntime {ort.__version__} cannot load {model} on {', '.join(asked)}: {error}; "
            "check the artifact with: overspill models verify " + manifest.variant
        ) from error
    session.disable_fallback()  # else a failing provider is replaced by the CPU in the middle of a run
    loaded = tuple(session.get_providers())
    fallbacks += [
        f"{name}: {_PROVIDERS[name]} did not start (see the log of onnxruntime above)"
        for name in asked
        if _PROVIDERS[name] not in loaded
    ]
    for line in fallbacks:
        log.warning("provider fallback", variant=manifest.variant, missing=line, using=loaded)
    return OpenedSession(session, loaded, tuple(fallbacks))


def _session_options(ort: Any, options: RuntimeOptions) -> Any:
    session = ort.SessionOptions()
    session.intra_op_num_threads = options.intra_op_threads or usable_cores()
    session.inter_op_num_threads = 1
    session.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    session.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session.log_severity_level = 3
    # Worker threads that wait a few microseconds for the next of a thousand small operators gain a third of the decode
    # speed; waiting longer, or between two steps, would take the cores from the gateway and the device's application.
    spins = options.spin_us > 0 and session.intra_op_num_threads > 1
    session.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
    if spins:
        session.add_session_config_entry("session.intra_op.spin_duration_us", str(options.spin_us))
        session.add_session_config_entry("session.force_spinning_stop", "1")
    # Shapes change with every token: a plan per shape and an arena that never shrinks would only grow.
    session.enable_mem_pattern = False
    session.enable_cpu_mem_arena = False
    session.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    return session


def _provider_options(name: str, manifest: Manifest, request: RuntimeRequest) -> dict[str, str]:
    if name == "tensorrt":
        return tensorrt_options(manifest, request)
    if name == "cuda":
        return {"arena_extend_strategy": "kSameAsRequested", "cudnn_conv_algo_search": "HEURISTIC"}
    return {}


def tensorrt_options(manifest: Manifest, request: RuntimeRequest) -> dict[str, str]:
    """Options of the TensorRT execution provider on a board whose GPU shares the memory of the CPU.

    Engine and timing cache stay on disk, so an engine is built once for each device; min, opt and max shapes are all
    given, else every new shape would build another engine.
    """
    options = request.options.tensorrt
    cache = _engine_cache(request.artifact_dir, manifest)
    past = min(options.max_past_tokens, request.context_tokens)
    sizes = {
        "min": (1, 1, 1),
        "opt": (1, 1, max(1, min(256, past))),
        "max": (min(options.max_batch, request.slots), options.max_sequence_tokens, past),
    }
    return {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(cache),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(cache),
        "trt_max_workspace_size": str(options.workspace_bytes),
        "trt_auxiliary_streams": "0",
        "trt_int8_enable": "1",
        "trt_fp16_enable": "1",
        **{
            f"trt_profile_{bound}_shapes": _shapes(manifest, batch, tokens, past_tokens)
            for bound, (batch, tokens, past_tokens) in sizes.items()
        },
    }


def _engine_cache(artifact_dir: Path, manifest: Manifest) -> Path:
    """Return a folder for engines: beside the model, or in the user's cache where the store cannot be written.

    Raises:
        ArtifactError: neither can be written.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    content = hashlib.sha256("".join(sorted(file.sha256 for file in manifest.files.values())).encode()).hexdigest()
    name = f"{manifest.variant}-{content[:12]}"  # an engine of other weights must never be found
    tried = (artifact_dir / "tensorrt-cache", home / "overspill" / "tensorrt-cache" / name)
    for folder in tried:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise ArtifactError(f"no folder for TensorRT engines can be written; tried {' and '.join(map(str, tried))}")


def _shapes(manifest: Manifest, batch: int, tokens: int, past: int) -> str:
    fixed = {
        "input_ids": f"{batch}x{tokens}",
        "position_ids": f"{batch}x{tokens}",
        "attention_bias": f"{batch}x1x{tokens}x{past + tokens}",
        "logits_at": f"{batch}x1",
    }
    kv = f"{batch}x{manifest.num_kv_heads}x{past}x{manifest.head_dim}"
    for layer in range(manifest.num_layers):
        fixed[f"past_k.{layer}"] = kv
        fixed[f"past_v.{layer}"] = kv
    return ",".join(f"{name}:{shape}" for name, shape in fixed.items())
