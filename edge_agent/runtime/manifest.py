"""What is inside an artifact directory, and whether it is what was built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from models.store import manifest as stored
from models.store.manifest import MANIFEST_FILE, FileDigest, read_regular
from router.base.errors import ArtifactError
from router.base.json_input import UNREADABLE

FORMAT = "overspill-onnx"
VERSION = 1

Count = Annotated[int, msgspec.Meta(gt=0)]


class Manifest(msgspec.Struct, frozen=True):
    """manifest.json of an ONNX artifact; keys not named here are for other readers.

    Attributes:
        prefix_token_ids: ids whose keys and values prefix.npz holds, empty if there is no such file.
        settled_layer: from this layer on any other first token has the keys and values of the one in prefix.npz; None
            where that is not so, or was not looked at.
        files: every other file of the directory, by name.
    """

    format: str
    version: int
    family: str
    variant: str
    precision: str
    num_layers: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count
    context_tokens: Count
    eos_token_ids: tuple[int, ...]
    files: dict[str, FileDigest]
    bos_token_id: int | None = None
    prepend_bos: bool = False
    prefix_token_ids: tuple[int, ...] = ()
    settled_layer: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Artifact(Protocol):
    """What copies and watches of an artifact need of its manifest, whatever it describes."""

    @property
    def variant(self) -> str:
        """The catalogue's name of it."""
        ...

    @property
    def files(self) -> dict[str, FileDigest]:
        """Every file of its directory but the manifest, by name."""
        ...


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the usual first ids of a prompt leave behind.

    Attributes:
        kv: float32 (2·layers, 1, kv_heads, len(token_ids), head_dim); even entries are keys, odd ones values.
        logits: float32 (vocab,) behind the last of them; None in an artifact of an older recipe.
        settled_layer: see `Manifest`.
    """

    token_ids: tuple[int, ...]
    kv: npt.NDArray[np.float32]
    logits: npt.NDArray[np.float32] | None = None
    settled_layer: int | None = None


def read_manifest(directory: Path) -> Manifest:
    """Read manifest.json.

    Raises:
        ArtifactError: it is missing, broken, or of another format; names the remedy.
    """
    path = directory / MANIFEST_FILE
    try:
        text = read_regular(path)
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}; {_remedy(directory)}") from error
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except UNREADABLE as error:
        raise ArtifactError(f"{path} is not a valid manifest: {error}; {_remedy(directory)}") from error
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        raise ArtifactError(
            f"{path} has format `{manifest.format}` version {manifest.version}, this agent reads "
            f"`{FORMAT}` version {VERSION}; {_remedy(directory)}"
        )
    return manifest


def verify_files(directory: Path, manifest: Artifact) -> None:
    """Compare every file with its size and digest.

    Raises:
        ArtifactError: names the first file that is missing or differs.
    """
    if "model.onnx" not in manifest.files:
        raise ArtifactError(f"{directory / MANIFEST_FILE} lists no model.onnx; {_remedy(directory)}")
    stored.verify_files(directory, manifest.files, _remedy(directory))


def read_prefix(directory: Path, manifest: Manifest) -> Prefix | None:
    """Read prefix.npz, None where the manifest names no prefix.

    Raises:
        ArtifactError: its arrays do not fit the manifest.
    """
    if not manifest.prefix_token_ids:
        return None
    path = directory / "prefix.npz"
    expected = (manifest.num_layers, manifest.num_kv_heads, len(manifest.prefix_token_ids), manifest.head_dim)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            keys, values = arrays["k"], arrays["v"]
            logits = arrays.get("logits")
    except (OSError, KeyError, ValueError) as error:
        raise ArtifactError(f"cannot read {path}: {error}; {_remedy(directory)}") from error
    for array in (keys, values):
        if array.shape != expected or array.dtype != np.float32 or not np.isfinite(array).all():
            raise ArtifactError(
                f"{path}: expected finite float32 {expected}, found {array.dtype} {array.shape}; {_remedy(directory)}"
            )
    if logits is not None and (logits.shape != (manifest.vocab_size,) or logits.dtype != np.float32):
        raise ArtifactError(
            f"{path}: `logits` do not fit the vocabulary of {manifest.vocab_size}; {_remedy(directory)}"
        )
    settled = manifest.settled_layer if logits is not None and len(manifest.prefix_token_ids) == 1 else None
    kv = np.stack([keys, values], axis=1).reshape(2 * expected[0], 1, *expected[1:])
    return Prefix(manifest.prefix_token_ids, np.ascontiguousarray(kv), logits, settled)


def _remedy(directory: Path) -> str:
    return f"run: overspill models pull {directory.parent.name} --prepare --force"
