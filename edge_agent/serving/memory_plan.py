"""What a model takes of the device's memory, before it is loaded: weights, workspace, and the KV cache when full."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

from edge_agent.runtime.manifest import Manifest
from edge_agent.runtime.protocol import Runtime, RuntimeRequest
from edge_agent.runtime.registry import engine_bytes
from router.base.errors import ReplicaUnreachable

_FLOAT_BYTES = 4
_WORKING_BYTES = 64 << 20  # activations, the tokenizer's tables, the interpreter's share


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """One model's memory in bytes.

    Attributes:
        weights_bytes: as the runtime holds them. ONNX Runtime repacks the matrices into memory of its own and maps the
            rest; both together stay below the size of the files. TensorRT holds the plan, and reads it from a copy.
        workspace_bytes: scratch memory of the runtime.
        slot_bytes: KV cache of one sequence that fills its window.
    """

    weights_bytes: int
    workspace_bytes: int
    slot_bytes: int

    @property
    def fixed_bytes(self) -> int:
        return self.weights_bytes + self.workspace_bytes

    def total_bytes(self, slots: int) -> int:
        return self.fixed_bytes + slots * self.slot_bytes


def need_of(manifest: Manifest, request: RuntimeRequest) -> MemoryNeed:
    """Say what loading `request` takes at most."""
    window = min(request.context_tokens, manifest.context_tokens)
    slot_bytes = 2 * manifest.num_layers * manifest.num_kv_heads * manifest.head_dim * _FLOAT_BYTES * window
    plan_bytes = engine_bytes(request, manifest)
    if plan_bytes is not None:
        return MemoryNeed(2 * plan_bytes, request.options.tensorrt.workspace_bytes + _WORKING_BYTES, slot_bytes)
    return MemoryNeed(sum(file.bytes for file in manifest.files.values()), _WORKING_BYTES, slot_bytes)


def slots_that_fit(variant: str, need: MemoryNeed, slots: int, free_bytes: int) -> int:
    """Return how many of `slots` fit into memory, at least one.

    Raises:
        ReplicaUnreachable: not even one does; names every figure and the remedy.
    """
    fitting = (free_bytes - need.fixed_bytes) // need.slot_bytes
    if fitting >= 1:
        return min(slots, fitting)
    raise ReplicaUnreachable(
        f"{variant} needs {mib(need.total_bytes(1))} (weights {mib(need.weights_bytes)}, workspace "
        f"{mib(need.workspace_bytes)}, KV cache {mib(need.slot_bytes)} for one slot), {mib(max(0, free_bytes))} are "
        "free: leave it out of models.variants, lower models.context_tokens, or free memory"
    )


@dataclass(frozen=True, eq=False)
class KvPromises:
    """KV memory that loaded models may still take: it is free now, and promised. Safe to use from several threads."""

    _runtimes: weakref.WeakSet[Runtime] = field(default_factory=weakref.WeakSet)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, runtime: Runtime) -> None:
        """Count a model until it is let go of."""
        with self._lock:
            self._runtimes.add(runtime)

    def open_bytes(self) -> int:
        with self._lock:
            return sum(map(_unused_bytes, self._runtimes))


def _unused_bytes(runtime: Runtime) -> int:
    facts = runtime.facts
    return max(0, facts.slots * facts.context_tokens * facts.kv_bytes_per_token - runtime.kv_bytes)


def reduced(variant: str, need: MemoryNeed, wanted: int, slots: int) -> str:
    """Say that a model got fewer slots than the configuration wants."""
    return (
        f"{variant}: {slots} of {wanted} KV slots: {mib(need.total_bytes(wanted))} would be needed for all of them "
        f"({mib(need.slot_bytes)} each); lower models.kv_slots or models.context_tokens, or free memory"
    )


def mib(count: int) -> str:
    """Return a size in words."""
    return f"{count / 2**20:.0f} MiB"
