"""What is inside the artifact directory of an encoder, and what it takes of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from models.store.manifest import MANIFEST_FILE, FileDigest, read_regular
from router.base.errors import ArtifactError
from router.base.json_input import UNREADABLE

FORMAT = "overspill-encoder"
VERSION = 1

Count = Annotated[int, msgspec.Meta(gt=0)]

_FLOAT_BYTES = 4
_WORKING_BYTES = 64 << 20  # the tokenizer's tables, the interpreter's share
_LIVE_ROWS = 7  # of the hidden size, that a layer holds at once: its input, queries, keys, values, their mean, two sums
_LIVE_SCORES = 2  # of attention: before and after the softmax


class EncoderManifest(msgspec.Struct, frozen=True):
    """manifest.json of an encoder; keys not named here are for other readers.

    Attributes:
        files: every other file of the directory, by name.
        computes_padding: whether its graph computes rows for padding, as those of older recipes do.
    """

    format: str
    version: int
    family: str
    variant: str
    precision: str
    dimensions: Count
    intermediate_size: Count
    num_heads: Count
    vocab_size: Count
    context_tokens: Count
    files: dict[str, FileDigest]
    computes_padding: bool = True

    @property
    def weights_bytes(self) -> int:
        """Its files: as the runtime holds them, at most."""
        return sum(file.bytes for file in self.files.values())

    def batch_bytes(self, tokens: int) -> int:
        """What computing a batch of so many padded tokens takes, at most: all in texts of the full window."""
        row = _LIVE_ROWS * self.dimensions + 2 * self.intermediate_size
        return _FLOAT_BYTES * tokens * (row + _LIVE_SCORES * self.num_heads * self.context_tokens)

    def needed_bytes(self, batch_tokens: int, instances: int) -> int:
        """Everything that serving it takes."""
        return self.weights_bytes + _WORKING_BYTES + instances * self.batch_bytes(batch_tokens)


def read_encoder_manifest(directory: Path) -> EncoderManifest:
    """Read manifest.json.

    Raises:
        ArtifactError: it is missing, broken, or of another format; names the remedy.
    """
    path = directory / MANIFEST_FILE
    remedy = f"run: overspill models pull {directory.parent.name} --prepare --force"
    try:
        manifest = msgspec.json.decode(read_regular(path), type=EncoderManifest)
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}; {remedy}") from error
    except UNREADABLE as error:
        raise ArtifactError(f"{path} is not a valid manifest: {error}; {remedy}") from error
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        raise ArtifactError(
            f"{path} has format `{manifest.format}` version {manifest.version}, this agent reads `{FORMAT}` version "
            f"{VERSION}; {remedy}"
        )
    return manifest
