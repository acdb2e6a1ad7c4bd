"""What a model is, as V2's metadata and Triton's configuration tell it: plain values for JSON, and for gRPC."""

from __future__ import annotations

from typing import Any

from router.values.replica import ReplicaInfo
from router.values.task import Task
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


def model_metadata(name: str, replicas: list[ReplicaInfo]) -> dict[str, Any]:
    """Describe a family or a variant; the optional inputs are listed because clients look names and types up here."""
    inputs = [(key, kind, [-1, 1]) for key, kind in _inputs()]
    outputs = [(key, kind, [-1, 1]) for key, kind in OUTPUTS.items()]
    if all(Task.GENERATE not in info.tasks for info in replicas):
        inputs, outputs = embedding.INPUTS, embedding.OUTPUTS
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
    inputs = [
        {"name": key, "data_type": _triton(kind), "dims": [1], "optional": key != TEXT_INPUT} for key, kind in _inputs()
    ]
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": max(1, slots),
        "input": inputs,
        "output": [{"name": key, "data_type": _triton(kind), "dims": [1]} for key, kind in OUTPUTS.items()],
        "instance_group": [{"name": name, "kind": "KIND_MODEL", "count": 1}],
        "model_transaction_policy": {"decoupled": True},
        "parameters": {key: {"string_value": str(value)} for key, value in _parameters(replicas).items()},
    }


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
