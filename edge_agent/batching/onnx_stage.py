"""ONNX Runtime as the model of a declared pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.generate.turn import Turn
from edge_agent.runtime.onnx.session import OpenedSession, open_session
from hardware_profiles.loader import RuntimeOptions
from models.pipelines.declared.contract import Array, Contract, dtype_of
from router.base.errors import ArtifactError, ConfigError
from router.values.tensors import TensorSpec

_TYPES = {
    "BOOL": "bool",
    **{f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    "FP16": "float16",
    "FP32": "float",
    "FP64": "double",
    "BYTES": "string",
}


@dataclass(frozen=True, slots=True)
class OnnxModels:
    """Loads ONNX files for stages: `models.pipelines.kinds.onnx.OpenModel`.

    Attributes:
        turn: what computes beside it takes turns with it; None computes at any time.
    """

    pipeline: str
    options: RuntimeOptions
    allow_provider_fallback: bool
    turn: Turn | None

    def __call__(self, file: Path, contract: Contract) -> _Session:
        """Load a file.

        Raises:
            ArtifactError: ONNX Runtime refuses it, or it has other inputs and outputs than `contract`.
            ConfigError: the profile's accelerator is missing and no fallback is allowed.
        """
        opened = open_session(file, self.pipeline, self.options)
        if opened.fallbacks and not self.allow_provider_fallback:
            raise ConfigError(
                f"pipeline `{self.pipeline}`: {'; '.join(opened.fallbacks)}; install it, or set "
                "models.allow_provider_fallback = true to serve without it",
                param="models.allow_provider_fallback",
            )
        for kind, specs, items in (
            ("inputs", contract.inputs, opened.session.get_inputs()),
            ("outputs", contract.outputs, opened.session.get_outputs()),
        ):
            _check(file, kind, specs, {item.name: item for item in items})
        return _Session(opened, contract, self.turn)


def _check(file: Path, kind: str, specs: tuple[TensorSpec, ...], items: Mapping[str, Any]) -> None:
    missing = [name for name in items if name not in {spec.name for spec in specs}] if kind == "inputs" else []
    wrong = [spec for spec in specs if spec.name not in items or not _fits(items[spec.name], spec)]
    if missing or wrong:
        there = ", ".join(f"{item.name} {item.type}{item.shape}" for item in items.values())
        raise ArtifactError(
            f"{file}: its {kind} are {there}; the stage says {', '.join(map(str, specs))}, each behind one that counts "
            "inputs: correct the stage's contract"
        )


def _fits(item: Any, spec: TensorSpec) -> bool:
    if item.type != f"tensor({_TYPES[spec.datatype]})" or len(item.shape) != len(spec.shape) + 1:
        return False
    sizes = zip(item.shape, (-1, *spec.shape), strict=True)
    return all(not isinstance(own, int) or said in (-1, own) for own, said in sizes)


@dataclass(frozen=True, slots=True)
class _Session:
    """One session, used by all instances: they share its weights, and each computes a batch of its own."""

    opened: OpenedSession
    contract: Contract
    turn: Turn | None

    def __call__(self, batch: dict[str, Array]) -> dict[str, Array]:
        names = [spec.name for spec in self.contract.outputs]
        with self.turn or contextlib.nullcontext():
            found = self.opened.session.run(names, batch)
        kinds = {spec.name: dtype_of(spec.datatype) for spec in self.contract.outputs}
        return {name: np.asarray(array, kinds[name]) for name, array in zip(names, found, strict=True)}
