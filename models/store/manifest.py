"""What the manifest of an artifact says of its files, and whether they are what it says."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from models.store import fetch
from router.base.errors import ArtifactError

MANIFEST_FILE = "manifest.json"


class FileDigest(msgspec.Struct, frozen=True):
    """What a manifest says of one file of an artifact."""

    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    bytes: Annotated[int, msgspec.Meta(ge=0)]


class Listing(msgspec.Struct):
    """The part of any manifest that says which files there are."""

    files: dict[str, FileDigest] = {}


def read_regular(path: Path) -> bytes:
    """Read a file that has to be one: a pipe would be waited for, for ever.

    Raises:
        OSError: it is missing, cannot be read, or is no regular file.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        return file.read()


def verify_files(folder: Path, files: Mapping[str, FileDigest], remedy: str, *, digest: bool = True) -> None:
    """Compare an artifact's files with what its manifest says of them.

    Args:
        remedy: the command that makes the artifact anew, for the error.
        digest: False compares sizes alone, which takes no time.

    Raises:
        ArtifactError: names the first file that is missing, differs, or lies elsewhere.
    """
    outside = next((name for name in files if Path(name).name != name), None)
    if outside is not None:
        raise ArtifactError(f"{folder / MANIFEST_FILE} names a file outside its directory: `{outside}`; {remedy}")
    for name, expected in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            seen = fetch.sha256_of(path) if digest and size == expected.bytes else expected.sha256
        except OSError as error:
            raise ArtifactError(f"cannot read {path}: {error.strerror}; {remedy}") from error
        if size != expected.bytes:
            raise ArtifactError(f"{path} has {size} bytes, not {expected.bytes}; {remedy}")
        if seen != expected.sha256:
            raise ArtifactError(f"{path} is damaged: sha256 {seen[:12]}… instead of {expected.sha256[:12]}…; {remedy}")
