"""The agent's own copies of the files that a runtime maps into memory.

ONNX Runtime maps the weights and reads them for as long as the model serves. Whoever writes into such a file changes
the weights under the agent, and whoever cuts it short ends the agent with SIGBUS: no signal handler can make up for a
page that is gone, and reading everything into memory instead would cost memory that cannot be given back under
pressure. So a copy is mapped that nobody else has a reason to touch, on disk, under the digests of its content. Where
the file system shares blocks between files (btrfs, XFS) it costs no space; elsewhere it costs the artifact's size once.

What remains is a disk that fails to read a page back: that still ends the process, and the service manager starts it
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from edge_agent.runtime.manifest import Artifact, verify_files
from models.store.manifest import MANIFEST_FILE
from router.base.errors import ArtifactError

log = structlog.get_logger("edge_agent.runtime")

_AT_ONCE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """Where to load an artifact from.

    Attributes:
        problem: why that is the store itself and no copy; empty for a copy.
    """

    folder: Path
    problem: str = ""


@dataclass(frozen=True)
class PrivateCopies:
    """Copies of the artifacts that this agent has loaded; safe to use from several threads.

    Args:
        home: their folder; made when the first one is.
    """

    home: Path
    _taken: dict[str, Path] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, directory: Path, manifest: Artifact) -> Held:
        """Return a verified copy of `directory`.

        The store's own files are verified when the artifact is loaded for the first time in this process. Later loads
        take the copy, whatever has become of the store meanwhile.

        Raises:
            ArtifactError: a file of the store is missing or differs from the manifest, and there is no copy.
        """
        with self._lock:
            key = _key(manifest)
            folder = self.home / manifest.variant / key
            if self._taken.get(key) == folder and _is_whole(folder, manifest):
                return Held(folder)
            verify_files(directory, manifest)
            if not _is_whole(folder, manifest):
                try:
                    _copy(directory, folder, manifest)
                except OSError as error:
                    problem = (
                        f"no private copy of {manifest.variant} in {self.home} ({error.strerror or error}): its files "
                        "are mapped from the store, and must not be written to while the agent runs"
                    )
                    log.warning("no private copy", variant=manifest.variant, why=problem)
                    return Held(directory, problem)
            self._taken[key] = folder
            return Held(folder)

    def holds(self, manifest: Artifact) -> bool:
        """Whether this process has loaded the artifact from a copy, so that it can load it again without the store."""
        return _key(manifest) in self._taken


def _key(manifest: Artifact) -> str:
    content = "".join(f"{name}:{file.sha256}\n" for name, file in sorted(manifest.files.items()))
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def _is_whole(folder: Path, manifest: Artifact) -> bool:
    try:
        verify_files(folder, manifest)
    except ArtifactError:
        return False
    return (folder / MANIFEST_FILE).is_file()


def _copy(directory: Path, folder: Path, manifest: Artifact) -> None:
    """Make `folder` in one rename, and remove the copies of other builds of the variant.

    Raises:
        OSError: there is no room, or no permission.
        ArtifactError: the store was written to meanwhile.
    """
    home = folder.parent
    home.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".part-", dir=home))
    try:
        for name in (*manifest.files, MANIFEST_FILE):
            _copy_file(directory / name, staging / name)
        verify_files(staging, manifest)
        for other in home.iterdir():
            if other != staging:
                shutil.rmtree(other, ignore_errors=True)  # what is mapped from it stays readable
        staging.replace(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _copy_file(source: Path, target: Path) -> None:
    """Copy within the kernel, which shares the blocks where the file system can. Not flushed: copies are digested."""
    with source.open("rb") as reader, target.open("xb") as writer:
        copied = 0
        with contextlib.suppress(OSError, AttributeError):  # not between these file systems, or not on this system
            while count := os.copy_file_range(reader.fileno(), writer.fileno(), _AT_ONCE_BYTES):
                copied += count
        reader.seek(copied)
        writer.seek(copied)
        shutil.copyfileobj(reader, writer, 1 << 20)
    target.chmod(0o400)
