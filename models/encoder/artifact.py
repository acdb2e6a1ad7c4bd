"""Edge artifacts of sentence encoders (format `overspill-encoder`, version 1): a folder in the store.

model.onnx, model.onnx.data    inputs and outputs: see `models.encoder.graph`
tokenizer.json
manifest.json                  shapes, recipe digest, and every file's sha256 and size
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.encoder.graph import write_encoder
from models.formats.encoder import EncoderWeights, read_encoder
from models.graph.artifact import Note, Recipe, describe, present, silent
from models.store.manifest import MANIFEST_FILE
from router.base.errors import ArtifactError

if TYPE_CHECKING:
    from models.catalogue.families import Variant
    from models.store.store import ModelStore

FORMAT, VERSION = "overspill-encoder", 1
_STEPS = {"fp32": ("encoder-fp32-3",), "int8": ("encoder-int8-rows-4",)}
_TOKENIZER = "tokenizer.json"


def make_encoder(variant: Variant, store: ModelStore, *, force: bool = False, note: Note = silent) -> Path:
    """Write the artifact of an ONNX variant of an encoder, unless the same is there; return its folder.

    Raises:
        ArtifactError: the source was not pulled, is damaged, or is no encoder of a known kind, or the disk is full.
    """
    recipe = Recipe(store.source_sha256(variant.family), None, _STEPS[variant.precision])
    there = None if force else present(store, variant, recipe)
    if there is not None:
        note(f"{variant.name}: already made")
        return there
    note(f"{variant.name}: reading the weights")
    source = store.source_path(variant.family)
    if not source.is_dir():
        raise ArtifactError(f"{source}: an encoder's source is a directory with config.json, weights and tokenizer")
    weights = read_encoder(source)
    with store.placing(variant, _bytes_of(weights)) as folder:
        note(f"{variant.name}: writing {len(weights.layers)} layers in {variant.precision}")
        write_encoder(weights, folder, int8=variant.precision == "int8")
        shutil.copyfile(source / _TOKENIZER, folder / _TOKENIZER)
        family = store.catalogue.family(variant.family)
        window = min(family.context_tokens, weights.config.max_position_embeddings)
        _write_manifest(folder, variant, _Shape(weights, window), recipe)
    return store.artifact_dir(variant)


@dataclass(frozen=True)
class _Shape:
    weights: EncoderWeights
    context_tokens: int


def _write_manifest(folder: Path, variant: Variant, shape: _Shape, recipe: Recipe) -> None:
    config = shape.weights.config
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "family": variant.family,
        "variant": variant.name,
        "precision": variant.precision,
        "dimensions": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "context_tokens": shape.context_tokens,
        "computes_padding": False,
        "source_sha256": recipe.source_sha256,
        "recipe": recipe.digest,
        "steps": list(recipe.steps),
        "files": {path.name: describe(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST_FILE},
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _bytes_of(weights: EncoderWeights) -> int:
    tables = weights.words.nbytes + weights.positions.nbytes
    matrices = [m for layer in weights.layers for m in (layer.qkv, layer.out, layer.up, layer.down)]
    return tables + sum(matrix.weight.nbytes for matrix in matrices) + (1 << 20)
