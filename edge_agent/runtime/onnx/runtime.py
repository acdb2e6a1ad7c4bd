"""ONNX Runtime: inputs and outputs are bound by address, so a decode step copies nothing but what is new."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_agent.device.memory import drop_file_pages
from edge_agent.runtime.manifest import Manifest, read_manifest, read_prefix, verify_files
from edge_agent.runtime.onnx.session import OpenedSession, open_session
from edge_agent.runtime.packed import PackedRuntime, Tensors
from edge_agent.runtime.private_copy import Held
from edge_agent.runtime.protocol import RuntimeRequest
from router.base.errors import ArtifactError

_CPU_ONLY = ("CPUExecutionProvider",)


def open_onnx(request: RuntimeRequest) -> PackedRuntime:
    """Load an artifact directory written by the model toolchain.

    Raises:
        ArtifactError: a file is missing or damaged, or the graph is not the one that the manifest describes.
    """
    manifest = request.manifest or read_manifest(request.artifact_dir)
    if request.copies is None:
        verify_files(request.artifact_dir, manifest)
        held = Held(request.artifact_dir)
    else:
        held = request.copies.hold(request.artifact_dir, manifest)
    prefix = read_prefix(held.folder, manifest)
    opened = open_session(held.folder / "model.onnx", manifest.variant, request.options, request.missed)
    _check_graph(opened.session, manifest, request)
    if held.problem:
        request = dataclasses.replace(request, notes=(*request.notes, held.problem))
    return PackedRuntime(OnnxExecutor(opened, held.folder), manifest, prefix, request)


@dataclass(frozen=True, slots=True)
class _BoundRun:
    """One call of the graph. The tensors are bound by address: they must live as long as the binding."""

    session: Any
    binding: Any
    tensors: tuple[Tensors, Tensors]

    def __call__(self) -> None:
        self.session.run_with_iobinding(self.binding)


class OnnxExecutor:
    """`Executor` over a session. On a GPU the providers copy the past to the device and the new positions back."""

    name = "onnx"
    owns_memory = False
    scored_tokens = 64  # a vocabulary of floats each: 13 MB for SmolLM2's

    def __init__(self, opened: OpenedSession, directory: Path) -> None:
        self._session = opened.session
        self._directory = directory
        self.providers = opened.providers
        self.fallbacks = opened.fallbacks
        self.min_past_tokens = 0 if opened.providers == _CPU_ONLY else 1

    def empty(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
        return np.zeros(shape, dtype)

    def bind(self, inputs: Tensors, outputs: Tensors) -> Callable[[], None]:
        binding = self._session.io_binding()
        for tensors, bind in ((inputs, binding.bind_input), (outputs, binding.bind_output)):
            for name, array in tensors.items():
                bind(name, "cpu", 0, array.dtype.type, list(array.shape), array.ctypes.data)
        return _BoundRun(self._session, binding, (inputs, outputs))

    def release_memory(self) -> None:
        drop_file_pages(self._directory)  # the embedding is read in place: rows once used would stay resident

    def close(self) -> None:
        self._session = None


def _check_graph(session: Any, manifest: Manifest, request: RuntimeRequest) -> None:
    """Raises ArtifactError when the graph's inputs and outputs are not those of the manifest."""
    kv = [f"{letter}.{layer}" for layer in range(manifest.num_layers) for letter in "kv"]
    inputs = {"input_ids", "position_ids", "attention_bias", "logits_at", *(f"past_{name}" for name in kv)}
    outputs = {"logits", *(f"new_{name}" for name in kv)}
    found_inputs = {item.name for item in session.get_inputs()}
    found_outputs = {item.name for item in session.get_outputs()}
    difference = sorted((inputs ^ found_inputs) | (outputs ^ found_outputs))
    if difference:
        raise ArtifactError(
            f"{request.artifact_dir / 'model.onnx'} does not fit its manifest: {', '.join(difference[:6])}; "
            f"run: overspill models pull {manifest.family} --prepare --force"
        )
