"""Edge artifacts of models that come as ONNX files (format `overspill-onnx`, version 1): a folder in the store.

model.onnx       as its source has it, but for its dimensions: those of batch, height and width are open
manifest.json    inputs and outputs, recipe digest, and every file's sha256 and size

An ONNX file from long ago may fix a size that the network does not need. What the catalogue says of the tensors
(`signature`) is written into the graph, and ONNX's own shape inference has to agree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import onnx
from onnx import TensorProto

from models.graph.artifact import Note, Recipe, describe, present, silent
from models.store.manifest import MANIFEST_FILE
from router.base.errors import ArtifactError
from router.values.tensors import Signature, TensorSpec

if TYPE_CHECKING:
    from models.catalogue.families import Variant
    from models.store.store import ModelStore

FORMAT, VERSION = "overspill-onnx", 1
_STEPS = ("open-dimensions-1",)
_TYPES = {"FP32": TensorProto.FLOAT, "UINT8": TensorProto.UINT8, "INT64": TensorProto.INT64, "INT32": TensorProto.INT32}
_REMEDY = "pull the model again, or correct its `signature` in the catalogue"


def make_onnx(variant: Variant, store: ModelStore, *, force: bool = False, note: Note = silent) -> Path:
    """Write the artifact of a variant whose source is an ONNX file, unless the same is there; return its folder.

    Raises:
        ArtifactError: the source was not pulled, is damaged, or has other inputs and outputs than the catalogue says.
    """
    signature = store.catalogue.family(variant.family).signature
    if signature is None:
        raise ArtifactError(f"{variant.family}: the catalogue says no `signature` of it; add its inputs and outputs")
    told = msgspec.json.encode(signature).decode()
    recipe = Recipe(store.source_sha256(variant.family), None, (*_STEPS, told))
    there = None if force else present(store, variant, recipe)
    if there is not None:
        note(f"{variant.name}: already made")
        return there
    source = store.source_path(variant.family)
    try:
        model = onnx.load(str(source))
    except Exception as error:  # protobuf raises types of its own
        raise ArtifactError(f"{source}: not an ONNX file: {error}; pull the model again") from error
    note(f"{variant.name}: writing its graph with open dimensions")
    opened = open_dimensions(model, signature, source)
    with store.placing(variant, source.stat().st_size) as folder:
        onnx.save(opened, str(folder / "model.onnx"))
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "family": variant.family,
            "variant": variant.name,
            "precision": variant.precision,
            "signature": json.loads(told),
            "source_sha256": recipe.source_sha256,
            "recipe": recipe.digest,
            "steps": list(recipe.steps),
            "files": {path.name: describe(path) for path in sorted(folder.iterdir())},
        }
        (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return store.artifact_dir(variant)


def open_dimensions(model: Any, signature: Signature, source: Path) -> Any:
    """Return a model whose inputs and outputs are those of a signature, with the batch and every -1 open.

    Args:
        source: the model's file, for errors.

    Raises:
        ArtifactError: it has other inputs or outputs, or its operators do not allow these shapes.
    """
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    weights = {item.name for item in changed.graph.initializer}
    inputs = [item for item in changed.graph.input if item.name not in weights]
    for kind, specs, items in (
        ("inputs", signature.inputs, inputs),
        ("outputs", signature.outputs, list(changed.graph.output)),
    ):
        by_name = {item.name: item for item in items}
        if sorted(by_name) != sorted(spec.name for spec in specs):
            raise ArtifactError(
                f"{source}: its {kind} are {', '.join(by_name)}, "
                f"the catalogue says {', '.join(s.name for s in specs)}: {_REMEDY}"
            )
        for spec in specs:
            _open(by_name[spec.name], spec, source)
    del changed.graph.input[:]
    changed.graph.input.extend(inputs)  # weights are no inputs since IR version 4
    del changed.graph.value_info[:]
    try:
        onnx.checker.check_model(changed)
        onnx.shape_inference.infer_shapes(changed, strict_mode=True)
    except Exception as error:  # onnx raises types of its own
        raise ArtifactError(
            f"{source}: its operators do not allow the catalogue's shapes: {error}; {_REMEDY}"
        ) from error
    return changed


def _open(item: Any, spec: TensorSpec, source: Path) -> None:
    tensor = item.type.tensor_type
    rank = len(tensor.shape.dim)
    if tensor.elem_type != _TYPES.get(spec.datatype) or rank != len(spec.shape) + 1:
        raise ArtifactError(
            f"{source}: `{spec.name}` has {rank} dimensions of type {tensor.elem_type}, "
            f"the catalogue says {spec}: {_REMEDY}"
        )
    for index, (dim, size) in enumerate(zip(tensor.shape.dim, (-1, *spec.shape), strict=True)):
        dim.Clear()
        if size < 0:
            dim.dim_param = "batch" if index == 0 else f"{spec.name}_{index}"
        else:
            dim.dim_value = size
