"""Whether an artifact in the store is still what it was when this agent read its manifest."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from edge_agent.runtime.manifest import Artifact, verify_files
from models.store.manifest import MANIFEST_FILE, read_regular
from router.base.errors import ArtifactError

_Mark = tuple[int, int, int, int]


class ArtifactWatch:
    """Looks at inodes, sizes and times, which is cheap, and at digests only where those have changed.

    Attributes:
        digest: `sha256:…` of the manifest, which holds the digests of all other files.
    """

    def __init__(self, directory: Path, manifest: Artifact, manifest_bytes: bytes) -> None:
        self.digest = _digest(manifest_bytes)
        self._directory = directory
        self._manifest = manifest
        self._marks = self._look()
        self._digested = False
        self._lock = threading.Lock()

    def vouch(self) -> None:
        """Note that somebody else has digested the files since they were described: loading them does."""
        self._digested = True

    def touched(self) -> bool:
        """Whether a file may have changed since it was digested; True before it ever was."""
        return not self._digested or self._marks != self._look()

    def fault(self) -> str:
        """Digest every file; say what is wrong, nothing if all is as it was."""
        with self._lock:
            marks = self._look()  # first: what is written while the digests are computed is seen the next time
            try:
                found = _digest(read_regular(self._directory / MANIFEST_FILE))
                if found != self.digest:
                    return f"{self._directory / MANIFEST_FILE} is of another build than the one read at first"
                verify_files(self._directory, self._manifest)
            except OSError as error:
                return f"cannot read {self._directory / MANIFEST_FILE}: {error.strerror}"
            except ArtifactError as error:
                return error.message
            finally:
                self._marks, self._digested = marks, True
            return ""

    def _look(self) -> list[_Mark | None]:
        return [_mark(self._directory / name) for name in (MANIFEST_FILE, *self._manifest.files)]


def _mark(path: Path) -> _Mark | None:
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def _digest(raw: bytes) -> str:
    return "sha256:" + hashlib.sha256(raw).hexdigest()
