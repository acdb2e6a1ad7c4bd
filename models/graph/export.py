"""Export a variant's float32 weights to ONNX, as an edge artifact of its own: `<variant>-onnx`.

It is not on the ladder. It is what quantized rungs are verified and timed against, in the same runtime, and a way to
run a model on an edge device whose accelerator prefers float.

An edge artifact (format `overspill-onnx`, version 1) is a folder in the store, root/<family>/<variant>/:
    model.onnx, model.onnx.data    inputs and outputs: see `models.graph.graph`
    tokenizer.json, tokenizer_config.json, generation_config.json, chat_template.jinja
    prefix.npz                     only with prefix_token_ids: arrays k and v, float32 (layers, G, P0, D), the float32
                                   keys and values of the first tokens; sequences that begin so start from them
    manifest.json                  shapes, ids, recipe digest, and every file's sha256 and size
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from models.graph.artifact import Made, Note, Recipe, encoder_of, finish, present, silent
from models.graph.fused import fuse
from models.graph.graph import artifact_bytes, write_graph
from router.base.errors import ArtifactError, InvalidRequest

if TYPE_CHECKING:
    from models.catalogue.families import Variant
    from models.store.store import ModelStore

_STEPS = ("export-fp32-2",)


def onnx_variant(store: ModelStore, variant_name: str) -> Variant:
    """The off-ladder variant that `export` makes of a weights variant; `<name>-onnx` is accepted as `variant_name`.

    Raises:
        ModelNotFound: the weights variant is unknown.
        InvalidRequest: it is no weights variant.
    """
    source = store.catalogue.variant(variant_name.removesuffix("-onnx"))
    if source.format != "weights":
        raise InvalidRequest(
            f"`{source.name}` is an {source.format} variant; export takes float32 weights, such as "
            f"`{source.derived_from or source.family}`; INT8 variants are made by: overspill models quantize",
            param="variant",
        )
    return msgspec.structs.replace(
        source, name=f"{source.name}-onnx", format="onnx", runtimes=("onnxruntime", "tensorrt")
    )


def export(variant_name: str, store: ModelStore, *, force: bool = False, note: Note = silent) -> Path:
    """Write the artifact of a weights variant, unless the same is there; return its folder.

    Raises:
        ModelNotFound, InvalidRequest: the variant is unknown or no weights variant.
        ArtifactError: the source was not pulled, is damaged, or is no llama-family model, or the disk is full.
    """
    variant = onnx_variant(store, variant_name)
    recipe = Recipe(store.source_sha256(variant.family), variant.layers, _STEPS)
    there = None if force else present(store, variant, recipe)
    if there is not None:
        note(f"{variant.name}: already exported")
        return there
    note(f"{variant.name}: reading the weights")
    model = fuse(store.weights(variant_name.removesuffix("-onnx")))
    with store.placing(variant, artifact_bytes(model, 4)) as folder:
        note(f"{variant.name}: writing {len(model.layers)} layers in float32")
        write_graph(model, folder)
        finish(folder, variant, model.config, encoder_of(store, variant.family), Made(recipe))
    return store.artifact_dir(variant)


def exported(variant_name: str, store: ModelStore) -> Path:
    """The folder that `export` made earlier.

    Raises:
        ArtifactError: it is not there; names the command.
    """
    variant = onnx_variant(store, variant_name)
    try:
        return store.artifact_dir(variant)
    except ArtifactError as error:
        remedy = f"run: overspill models export {variant_name.removesuffix('-onnx')}"
        raise ArtifactError(f"no float32 artifact `{variant.name}` in {store.root}; {remedy}") from error
