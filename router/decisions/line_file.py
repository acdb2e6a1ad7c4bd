"""The decision file of one process: decisions become lines without names, and are appended."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from router.base.errors import ConfigError
from router.decisions.line import Decision, encode
from router.decisions.pseudonyms import Pseudonyms, key_path
from router.decisions.rotation import RotatingFile
from router.decisions.settings import DecisionFileSettings

_MBYTE = 1_000_000


class LineFile:
    """Opened by its constructor; call it from one thread.

    Raises:
        ConfigError: the file or its key cannot be opened, or another process writes it.
    """

    def __init__(self, settings: DecisionFileSettings) -> None:
        self.path = Path(settings.path).expanduser()
        self._lock_fd = -1
        try:
            self._pseudonyms = Pseudonyms.open(self.path)
            self._lock()
            self._file = RotatingFile(self.path, settings.max_mbytes * _MBYTE, settings.files)
        except OSError as error:
            self._unlock()
            raise ConfigError(
                f"decisions.path: cannot write {self.path}: {error.strerror}", param="decisions.path"
            ) from error
        except ConfigError:
            self._unlock()
            raise

    def line(self, decision: Decision, ended_unix_s: float) -> bytes:
        """Return a decision as it is written, stamped with when its request was accepted."""
        accepted_s = ended_unix_s - (decision.finish_ms or 0.0) / 1e3
        stamped = msgspec.structs.replace(decision, accepted_unix_s=round(accepted_s, 6))
        return encode(self._pseudonyms.hide(stamped))

    def append(self, lines: bytes) -> None:
        """Write whole lines.

        Raises:
            OSError: none of them was written.
        """
        self._file.append(lines)

    def close(self) -> None:
        self._file.close()
        self._unlock()

    def _lock(self) -> None:
        """Keep other processes from writing the same file: each would rotate it under the other."""
        self._lock_fd = os.open(key_path(self.path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"decisions.path: {self.path} is written by another process; name a file of its own for each tier",
                param="decisions.path",
            ) from None

    def _unlock(self) -> None:
        with contextlib.suppress(OSError):
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
        self._lock_fd = -1
