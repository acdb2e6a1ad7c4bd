"""Built-in stages by name; each is imported when a pipeline names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from models.pipelines.declared.contract import Contract, Kind, fault
from models.pipelines.declared.function import function
from models.pipelines.declared.settings import StageSettings
from models.pipelines.kinds.onnx import Onnx, OnnxOptions, OpenModel

ONNX = "onnx"
_KINDS = {
    "decode-image": "models.pipelines.kinds.decode_image:DecodeImage",
    "resize": "models.pipelines.kinds.resize:Resize",
    "normalise": "models.pipelines.kinds.normalise:Normalise",
    "centre-boxes": "models.pipelines.kinds.centre_boxes:CentreBoxes",
    "non-maximum-suppression": "models.pipelines.kinds.suppression:Suppression",
    "top-k": "models.pipelines.kinds.top_k:TopK",
    "tokenize": "models.pipelines.kinds.tokenize:Tokenize",
    "pool": "models.pipelines.kinds.pool:Pool",
    "unit": "models.pipelines.kinds.unit:Unit",
}
NAMES = (*_KINDS, ONNX)


@dataclass(frozen=True, slots=True)
class Supplies:
    """What a tier has for the stages of its pipelines.

    Attributes:
        artifact: the folder of a catalogue variant, whole, with the tensors that its manifest tells of, if it does;
            raises ArtifactError, ModelNotFound.
        load: computes ONNX files; None where this tier does not.
    """

    artifact: Callable[[str], tuple[Path, Contract | None]]
    load: OpenModel | None = None


def kind_of(pipeline: str, settings: StageSettings, supplies: Supplies) -> Kind:
    """Return what a stage does.

    Raises:
        ConfigError: there is no such stage, or its options are wrong; names pipeline, stage and remedy.
        ArtifactError, ModelNotFound: its model is not here.
    """
    if ":" in settings.use:
        return function(pipeline, settings)
    if settings.use not in NAMES:
        raise fault(
            pipeline,
            settings.name,
            f"use = `{settings.use}` is no built-in stage: take one of {', '.join(NAMES)}, or a function of your own "
            "as module:function",
        )
    if settings.use == ONNX:
        return _onnx(pipeline, settings, supplies)
    if settings.inputs or settings.outputs:
        raise fault(pipeline, settings.name, f"`{settings.use}` has inputs and outputs of its own: leave them out")
    module, name = _KINDS[settings.use].split(":")
    made = _options(pipeline, settings, getattr(import_module(module), name))
    tokenizer = getattr(made, "tokenizer", "")
    if tokenizer and not Path(tokenizer).expanduser().is_file():
        made = msgspec.structs.replace(made, tokenizer=str(supplies.artifact(tokenizer)[0] / "tokenizer.json"))
    kind: Kind = made
    return kind


def _options(pipeline: str, settings: StageSettings, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(settings.options, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind)) or "none"
        raise fault(pipeline, settings.name, f"options: {error}; `{settings.use}` knows: {known}") from None


def _onnx(pipeline: str, settings: StageSettings, supplies: Supplies) -> Kind:
    options: OnnxOptions = _options(pipeline, settings, OnnxOptions)
    if supplies.load is None:
        raise fault(
            pipeline,
            settings.name,
            "this tier runs no ONNX files: serve them on an edge agent, or load the model in a function of your own",
        )
    told = Contract(settings.inputs, settings.outputs) if settings.inputs and settings.outputs else None
    if options.variant is not None:
        folder, known = supplies.artifact(options.variant)
        contract, file = told or known, folder / "model.onnx"
    else:
        contract, file = told, Path(str(options.path)).expanduser()
        if not file.is_file():
            raise fault(pipeline, settings.name, f"path: {file} is no file")
    if contract is None:
        raise fault(
            pipeline,
            settings.name,
            "say what the file takes and gives: inputs and outputs, each "
            '[{ name = "…", datatype = "FP32", shape = [-1] }], without the dimension that counts inputs',
        )
    if settings.pool == "processes":
        raise fault(pipeline, settings.name, 'an ONNX model computes in threads: leave `pool = "processes"` out')
    return Onnx(file, contract, supplies.load)
