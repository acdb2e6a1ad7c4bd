"""Room on the disk: asked for before writing, and told in one way when it runs out."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from router.base.errors import ArtifactError

_CHUNK_BYTES = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that a folder lies on, or would lie on."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free


def need_space(folder: Path, size_bytes: int) -> None:
    """Refuse before writing what cannot fit.

    Raises:
        ArtifactError: the disk has less free space than that.
    """
    free = free_bytes(folder)
    if size_bytes > free:
        raise ArtifactError(
            f"{folder}: {size_bytes:,} bytes are needed, {free:,} are free; "
            "free some, or point OVERSPILL_MODELS at a larger disk"
        )


@contextmanager
def disk_errors(place: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn a failing disk into an `ArtifactError` that names the remedy.

    Args:
        needed_bytes: what the block writes in all, 0 if unknown.

    Raises:
        ArtifactError: the block raised `OSError`.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno not in FULL:
            raise ArtifactError(f"cannot write {error.filename or place}: {reason}; check the folder") from error
        needed = f"{needed_bytes:,} bytes are needed, " if needed_bytes else ""
        raise ArtifactError(
            f"cannot write {place}: {reason}: {needed}{free_bytes(place):,} are free; "
            "free some space, or point OVERSPILL_MODELS at a larger disk"
        ) from error


def write_through(source: IO[bytes], path: Path) -> None:
    """Write a stream to a file and to the disk."""
    with path.open("wb") as file:
        shutil.copyfileobj(source, file, _CHUNK_BYTES)
        file.flush()
        os.fsync(file.fileno())
