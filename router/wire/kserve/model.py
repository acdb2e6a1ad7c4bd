"""What a model is, as V2's metadata and Triton's configuration tell it: plain values for JSON, and for gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.values.replica import ReplicaInfo
from router.values.task import Task
from router.values.tensors import Signature, TensorSpec
from router.wire.kserve import embedding
from router.wire.kserve.call import OUTPUTS, VERSION
from router.wire.kserve.parameters import INPUTS, SAMPLING_INPUT, TEXT_INPUT

PLATFORM = "overspill"
EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "statistics",
    "generate",
)
_SPELLING = {int: "INT32", float: "FP32", bool: "BOOL", str: "BYTES"}


_Told = tuple[str, str, list[int]]
"""Name, datatype and shape of a tensor; a first dimension of -1 is the batch."""


def signature_of(replicas: Sequence[ReplicaInfo]) -> Signature | None:
    """Return the tensors of a pipeline; all rungs of a family have the same."""
    return next((info.signature for info in replicas if info.signature is not None), None)


def model_metadata(name: str, replicas: list[ReplicaInfo]) -> dict[str, Any]:
    """Describe a family or a variant; the optional inputs are listed because clients look names and types up here."""
    inputs, outputs = _tensors(replicas)
    return {
        "name": name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [{"name": key, "datatype": kind, "shape": shape} for key, kind, shape in inputs],
        "outputs": [{"name": key, "datatype": kind, "shape": shape} for key, kind, shape in outputs],
        "parameters": _parameters(replicas),
    }


def model_config(name: str, replicas: list[ReplicaInfo], slots: int) -> dict[str, Any]:
    """Describe a model as Triton's configuration does, as far as it has words for it.

    Args:
        slots: answers that its replicas compute at once; 0 where that is not known.
    """
    inputs, outputs = ([_configured(told) for told in tensors] for tensors in _tensors(replicas))
    generates = _generates(replicas)
    if generates:
        inputs = [{**one, "optional": one["name"] != TEXT_INPUT} for one in inputs]
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": max(1, slots),
        "input": inputs,
        "output": outputs,
        "instance_group": [{"name": name, "kind": "KIND_MODEL", "count": 1}],
        "model_transaction_policy": {"decoupled": generates},
        "parameters": {key: {"string_value": str(value)} for key, value in _parameters(replicas).items()},
    }


def _generates(replicas: Sequence[ReplicaInfo]) -> bool:
    return signature_of(replicas) is None and any(Task.GENERATE in info.tasks for info in replicas)


def _tensors(replicas: Sequence[ReplicaInfo]) -> tuple[list[_Told], list[_Told]]:
    """Return what a model takes, and what it returns."""
    if _generates(replicas):
        return [(key, kind, [-1, 1]) for key, kind in _inputs()], [
            (key, kind, [-1, 1]) for key, kind in OUTPUTS.items()
        ]
    if (signature := signature_of(replicas)) is None:
        return embedding.INPUTS, embedding.OUTPUTS
    return _of_specs(signature.inputs), _of_specs(signature.outputs)


def _of_specs(specs: Sequence[TensorSpec]) -> list[_Told]:
    return [(spec.name, spec.datatype, [-1, *spec.shape]) for spec in specs]


def _configured(told: _Told) -> dict[str, Any]:
    name, datatype, shape = told
    return {"name": name, "data_type": _triton(datatype), "dims": shape[1:] if shape[0] == -1 else shape}


def _inputs() -> list[tuple[str, str]]:
    named = [(key, _SPELLING[kind]) for key, kind in INPUTS.items()]
    return [(TEXT_INPUT, "BYTES"), *named, (SAMPLING_INPUT, "BYTES")]


def _triton(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def _parameters(replicas: list[ReplicaInfo]) -> dict[str, object]:
    return {
        "family": replicas[0].family,
        "variants": ",".join(dict.fromkeys(info.variant for info in replicas)),
        "context_tokens": max(info.context_tokens for info in replicas),
    }
