"""ONNX Runtime sessions: options that suit a small shared machine, and execution providers without silent fallbacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from edge_agent.device.memory import is_out_of_memory
from hardware_profiles.loader import RuntimeOptions
from router.base.errors import ArtifactError
from router.base.host import usable_cores

log = structlog.get_logger("edge_agent.runtime")

# ONNX Runtime's TensorRT provider is not among them: see `edge_agent.runtime.registry`.
_PROVIDERS = {
    "cuda": "CUDAExecutionProvider",
    "cpu": "CPUExecutionProvider",
}
_SHARED = "AddInitializedOrtValue"  # what two operators share is rewritten twice where sums of 8 bits have to be exact
_OPTIONS = {"cuda": {"arena_extend_strategy": "kSameAsRequested", "cudnn_conv_algo_search": "HEURISTIC"}}


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session, the providers it really has, and one line for each that was asked for and is not there."""

    session: Any
    providers: tuple[str, ...]
    fallbacks: tuple[str, ...]


def open_session(
    model: Path, variant: str, options: RuntimeOptions, missed: tuple[str, ...] = (), *, arena: bool = False
) -> OpenedSession:
    """Load `model`.

    Args:
        missed: why runtimes that were preferred to this one are not used, a line each.
        arena: keep the memory that a run took for the next one; only `shrinking` gives it back.

    Raises:
        ArtifactError: ONNX Runtime refuses it.
    """
    import onnxruntime as ort  # noqa: PLC0415  (an agent that serves no model must not pay 30 MB for it)

    wanted = [name for name in options.providers if name in _PROVIDERS]
    present = set(ort.get_available_providers())
    fallbacks = [
        f"{name}: this build of onnxruntime has no {_PROVIDERS[name]}"
        for name in wanted
        if _PROVIDERS[name] not in present
    ]
    asked = [name for name in wanted if _PROVIDERS[name] in present] or ["cpu"]
    providers = [(_PROVIDERS[name], _OPTIONS.get(name, {})) for name in asked]
    try:
        session = ort.InferenceSession(str(model), _session_options(ort, options, arena), providers=providers)
    except Exception as error:  # ONNX Runtime raises bare RuntimeError and pybind types of its own
        said = f"onnxruntime {ort.__version__} cannot load {model} on {', '.join(asked)}: {error}"
        raise ArtifactError(f"{said}; {_remedy(error, variant)}") from error
    session.disable_fallback()  # else a failing provider is replaced by the CPU in the middle of a run
    loaded = tuple(session.get_providers())
    fallbacks += [
        f"{name}: {_PROVIDERS[name]} did not start (see the log of onnxruntime above)"
        for name in asked
        if _PROVIDERS[name] not in loaded
    ]
    for line in (*missed, *fallbacks):
        log.warning("provider fallback", variant=variant, missing=line, using=loaded)
    return OpenedSession(session, loaded, tuple(fallbacks))


def shrinking() -> Any:
    """Return the options of a run after which the arena keeps nothing that it does not use."""
    import onnxruntime as ort  # noqa: PLC0415  (as above)

    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _remedy(error: Exception, variant: str) -> str:
    if is_out_of_memory(error):
        return "it takes more memory than this process may have: give it more, or serve a smaller variant"
    if _SHARED in str(error):
        return f"an earlier version prepared it: prepare it anew with: overspill models pull {variant} --prepare"
    return f"check the artifact with: overspill models verify {variant}"


def _session_options(ort: Any, options: RuntimeOptions, arena: bool) -> Any:
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
    # Shapes change with every token: a plan per shape, and an arena that nobody shrinks, would only grow.
    session.enable_mem_pattern = False
    session.enable_cpu_mem_arena = arena
    session.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    # An x86 CPU without VNNI adds products of 8 bits in 16, which overflow: it takes slower ones. Others do not mind.
    session.add_session_config_entry("session.x64quantprecision", "1")
    return session
