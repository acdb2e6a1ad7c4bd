"""What makes a folder an ONNX artifact: the graph, the tokenizer, the chat template, the prefix and the manifest.

`manifest.json` names every file with its sha256 and size, and the `recipe`: a digest over all that the artifact was
made from (source, layers, steps, calibration data). An artifact with the recipe asked for is used again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from models.store.fetch import sha256_of
from models.store.manifest import MANIFEST_FILE
from models.text.chat import PromptEncoder
from router.base.errors import ArtifactError
from router.base.json_input import UNREADABLE

if TYPE_CHECKING:
    from models.catalogue.families import Variant
    from models.formats.weights import ModelConfig
    from models.graph.fused import Array
    from models.store.store import ModelStore

FORMAT, VERSION = "overspill-onnx", 1
PREFIX_FILE = "prefix.npz"

Note = Callable[[str], None]
"""Takes one line of progress."""


def silent(_line: str) -> None:
    """A `Note` that says nothing."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what an artifact contains."""

    source_sha256: str
    layers: tuple[int, ...] | None
    steps: tuple[str, ...]

    @property
    def digest(self) -> str:
        parts = {"source": self.source_sha256, "layers": self.layers, "steps": self.steps, "version": VERSION}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Prefix:
    """What a sequence's first tokens leave behind.

    Attributes:
        k, v: keys and values, each float32 (layers, G, len(token_ids), D).
        logits: float32 (V,), behind the last of them.
        settled_layer: from this layer on another single first token has nearly the same; None where none is.
    """

    token_ids: tuple[int, ...]
    k: Array
    v: Array
    logits: Array
    settled_layer: int | None = None


class Rotation(msgspec.Struct, frozen=True):
    """Which rotation an INT8 artifact was rounded under.

    Attributes:
        seed: of the random orthogonal matrices (`models.graph.rotate`).
        refused: seeds that were tried before and lost what float32 says.
    """

    seed: int
    refused: tuple[int, ...] = ()


@dataclass(frozen=True)
class Made:
    """How an artifact was made; `prefix` and `rotation` only for INT8."""

    recipe: Recipe
    prefix: Prefix | None = None
    rotation: Rotation | None = None


class Record(msgspec.Struct, frozen=True):
    """The part of a manifest that says how an artifact was made; `recipe` is a digest."""

    recipe: str = ""
    rotation: Rotation | None = None


def record_of(store: ModelStore, variant: Variant) -> Record | None:
    """Return how a complete artifact was made, None if there is none that can be read."""
    try:
        return msgspec.json.decode((store.artifact_dir(variant) / MANIFEST_FILE).read_bytes(), type=Record)
    except (ArtifactError, OSError, *UNREADABLE):
        return None


def present(store: ModelStore, variant: Variant, recipe: Recipe) -> Path | None:
    """The artifact's folder, if one made by this very recipe is complete."""
    record = record_of(store, variant)
    return store.artifact_dir(variant) if record is not None and record.recipe == recipe.digest else None


def encoder_of(store: ModelStore, family_name: str) -> PromptEncoder:
    """The family's prompt encoder, read from its source."""
    family = store.catalogue.family(family_name)
    return PromptEncoder.load(store.source_path(family), prepend_bos=family.prepend_bos)


def prefix_ids(encoder: PromptEncoder) -> tuple[int, ...]:
    """The tokens that every sequence begins with: the first one, where chats and raw text share it."""
    bos = encoder.tokenizer.bos_id
    return (bos,) if encoder.prepend_bos and bos is not None else ()


def finish(folder: Path, variant: Variant, config: ModelConfig, encoder: PromptEncoder, made: Made) -> None:
    """Add tokenizer, template, prefix and manifest to a folder that holds the graph."""
    encoder.tokenizer.save(folder)
    if encoder.template is not None:
        encoder.template.save(folder)
    prefix = made.prefix
    if prefix is not None:
        _save_arrays(folder / PREFIX_FILE, {"k": prefix.k, "v": prefix.v, "logits": prefix.logits})
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "family": variant.family,
        "variant": variant.name,
        "precision": variant.precision,
        "layers": list(variant.layers if variant.layers is not None else range(config.num_layers)),
        "num_layers": config.num_layers,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context_tokens": config.max_context_tokens,
        "bos_token_id": encoder.tokenizer.bos_id,
        "eos_token_ids": sorted(encoder.tokenizer.eos_ids),
        "prepend_bos": encoder.prepend_bos,
        "prefix_token_ids": list(prefix.token_ids) if prefix is not None else [],
        "settled_layer": prefix.settled_layer if prefix is not None else None,
        "source_sha256": made.recipe.source_sha256,
        "recipe": made.recipe.digest,
        "steps": list(made.recipe.steps),
        "rotation": None if made.rotation is None else msgspec.to_builtins(made.rotation),
        "files": {path.name: describe(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST_FILE},
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def describe(path: Path) -> dict[str, str | int]:
    return {"sha256": sha256_of(path), "bytes": path.stat().st_size}


def _save_arrays(path: Path, arrays: dict[str, Array]) -> None:
    """Write an .npz whose bytes depend on the arrays alone (numpy's own carries the time)."""
    import zipfile  # noqa: PLC0415

    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w") as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def digest_of(parts: Sequence[bytes]) -> str:
    """One sha256 over several byte strings, each with its length in front."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
