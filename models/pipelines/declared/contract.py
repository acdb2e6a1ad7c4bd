"""What a stage takes and gives, and whether stages in a row fit: checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from models.pipelines.declared.settings import PipelineSettings, StageSettings
from router.base.errors import ConfigError
from router.values.tensors import Signature, TensorSpec

Array = npt.NDArray[Any]

ArrayWork = Callable[[dict[str, Array]], Mapping[str, Array | Sequence[Array]]]
"""A function of a batch of arrays by name. The first dimension counts the inputs; elements of BYTES are Python `bytes`
in an array of objects. An output whose rows differ in shape is a list of arrays, one for each input."""


@dataclass(frozen=True, slots=True)
class Contract:
    """The tensors of a stage under its own names, without the dimension that counts inputs."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class Kind(Protocol):
    """What a stage does; can be pickled, since the worker may be another process.

    Attributes:
        shared: one function serves all threads of the pool.
    """

    @property
    def contract(self) -> Contract: ...

    @property
    def shared(self) -> bool: ...

    def open(self) -> ArrayWork:
        """Load what it needs, in the worker; raises OverspillError."""
        ...


@dataclass(frozen=True, slots=True)
class Wired:
    """A stage among the others of its pipeline.

    Attributes:
        reads: name in the pipeline, and the stage's own description of it; writes: the other way round.
        keep: tensors that stages behind it, or callers, still need, and that it does not write.
    """

    pipeline: str
    settings: StageSettings
    kind: Kind
    reads: tuple[tuple[str, TensorSpec], ...]
    writes: tuple[tuple[TensorSpec, str], ...]
    keep: frozenset[str] = frozenset()

    @property
    def where(self) -> str:
        return f"pipeline `{self.pipeline}`, stage `{self.settings.name}`"


@dataclass(frozen=True, slots=True)
class Checked:
    """A pipeline whose stages fit."""

    settings: PipelineSettings
    signature: Signature
    stages: tuple[Wired, ...]


def fault(pipeline: str, stage: str, what: str) -> ConfigError:
    """Return the error of a stage that cannot be."""
    return ConfigError(f"pipeline `{pipeline}`, stage `{stage}`: {what}", param="pipelines")


def wire(settings: PipelineSettings, kinds: Sequence[Kind]) -> Checked:
    """Connect stages by the names of their tensors. Callers send what the first stage reads.

    Raises:
        ConfigError: a stage reads what no stage writes, or what has another type or shape; names the remedy.
    """
    known: dict[str, TensorSpec] = {}
    wired: list[Wired] = []
    for stage, kind in zip(settings.stages, kinds, strict=True):
        contract = kind.contract
        _check_names(settings.name, stage, contract)
        reads = tuple((stage.reads.get(spec.name, spec.name), spec) for spec in contract.inputs)
        if not wired:
            known = {name: msgspec.structs.replace(spec, name=name) for name, spec in reads}
            inputs = tuple(known.values())
        for name, spec in reads:
            _check_read(settings.name, stage.name, name, spec, known)
        writes = tuple((spec, stage.writes.get(spec.name, spec.name)) for spec in contract.outputs)
        known |= {name: msgspec.structs.replace(spec, name=name) for spec, name in writes}
        wired.append(Wired(settings.name, stage, kind, reads, writes))
    wanted = settings.outputs or tuple(name for _, name in wired[-1].writes)
    missing = [name for name in wanted if name not in known]
    if missing:
        raise ConfigError(
            f"pipeline `{settings.name}`: `outputs` names {', '.join(missing)}, which no stage writes; there are: "
            f"{', '.join(known)}",
            param="pipelines",
        )
    outputs = tuple(known[name] for name in wanted)
    return Checked(settings, Signature(inputs, outputs), _pruned(wired, set(wanted)))


def _check_names(pipeline: str, stage: StageSettings, contract: Contract) -> None:
    for key, given, specs in (("reads", stage.reads, contract.inputs), ("writes", stage.writes, contract.outputs)):
        own = [spec.name for spec in specs]
        unknown = sorted(set(given) - set(own))
        if unknown:
            raise fault(
                pipeline, stage.name, f"`{key}` names {', '.join(unknown)}; `{stage.use}` has: {', '.join(own)}"
            )


def _check_read(pipeline: str, stage: str, name: str, spec: TensorSpec, known: Mapping[str, TensorSpec]) -> None:
    there = known.get(name)
    if there is None:
        raise fault(
            pipeline,
            stage,
            f"reads `{name}`, which nothing before it writes; there are: {', '.join(known)}: "
            f'write reads = {{ "{spec.name}" = "…" }}',
        )
    if not spec.takes(there):
        raise fault(
            pipeline,
            stage,
            f"reads `{name}` as {spec.datatype}{list(spec.shape)}, and what is written before it is "
            f"{there.datatype}{list(there.shape)}: put a stage between that converts it, or correct the contract",
        )


def _pruned(wired: Sequence[Wired], needed: set[str]) -> tuple[Wired, ...]:
    """Let every stage hand on only what is needed behind it."""
    found: list[Wired] = []
    for stage in reversed(wired):
        written = {name for _, name in stage.writes}
        found.append(
            Wired(stage.pipeline, stage.settings, stage.kind, stage.reads, stage.writes, frozenset(needed - written))
        )
        needed = (needed - written) | {name for name, _ in stage.reads}
    return tuple(reversed(found))


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return numpy's type for one of V2; BYTES are objects."""
    return np.dtype(_DTYPES[datatype])


_DTYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
    "BYTES": "O",
}
