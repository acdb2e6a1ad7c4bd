"""What survives a restart: the last good configuration and the birth counter, written atomically; and the lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from edge_agent.fleet.reconcile import Knowledge
from router.base.errors import ConfigError
from router.base.json_input import UNREADABLE

log = structlog.get_logger("edge_agent.fleet")

_KNOWLEDGE = "desired.json"
_PREVIOUS = "desired.json.previous"
_BIRTH = "birth"
_LOCK = "lock"
_UNREADABLE = (OSError, *UNREADABLE)
_FAILING_DISK = frozenset({errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO})


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a crash leaves the old or the new content, on disk and whole.

    Its folder is made where it is missing: at the start the disk may have been read-only.

    Raises:
        OSError: the disk is full, read-only or gone; the old content stays.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass(slots=True)
class StateDir:
    """The folder of one device's fleet state. A disk that fails is logged and never stops the agent.

    Attributes:
        damaged: whether `load` met a configuration that it could not read.
        fault: why the last `save` failed, empty if it did not.
    """

    path: Path
    damaged: bool = False
    fault: str = ""
    _lock: int | None = None
    _birth: int = 0

    def open(self) -> None:
        """Create the folder if need be and take its lock.

        A disk that is full, read-only or failing is only logged: the agent goes on and remembers nothing.

        Raises:
            ConfigError: another agent holds it, or the folder can be neither created nor used.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in _FAILING_DISK:
                log.warning("fleet state will not survive a restart", path=str(self.path), error=str(error))
                return
            raise ConfigError(
                f"fleet.state_dir: cannot use {self.path}: {error.strerror}; name a folder the agent may write to",
                param="fleet.state_dir",
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ConfigError(
                f"fleet.state_dir: another agent uses {self.path}; give each agent a device name or folder of its own",
                param="fleet.state_dir",
            ) from error
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def load(self) -> Knowledge:
        """Read what is known; a damaged file is set aside, and the generation before stands in for it."""
        path = self.path / _KNOWLEDGE
        try:
            return _decoded(path)
        except FileNotFoundError:
            return Knowledge()
        except _UNREADABLE:
            log.exception("the stored configuration cannot be read and is set aside", path=str(path))
        self.damaged = True
        with contextlib.suppress(OSError):
            path.replace(path.with_name(path.name + ".damaged"))
        try:
            return _decoded(self.path / _PREVIOUS)
        except _UNREADABLE as error:
            log.warning("nor is there an older one", error=str(error))
            return Knowledge()

    def save(self, known: Knowledge) -> bool:
        """Write what is known, and keep the generation before.

        Returns:
            False if the disk would not take it, then `fault` says why: a restart begins with older knowledge.
        """
        current, previous = self.path / _KNOWLEDGE, self.path / _PREVIOUS
        with contextlib.suppress(OSError):  # a file system without hard links keeps one generation only
            previous.unlink(missing_ok=True)
            os.link(current, previous)
        try:
            write_atomically(current, msgspec.json.encode(known))
        except OSError as error:
            log.warning("fleet state could not be written", path=str(current), error=str(error))
            self.fault = str(error)
            return False
        self.fault = ""
        return True

    def next_birth(self) -> int:
        """Return the next value of the birth counter, which grows over restarts as long as the disk remembers."""
        if self._birth == 0:
            with contextlib.suppress(OSError, ValueError):
                self._birth = max(0, int((self.path / _BIRTH).read_text(encoding="ascii")))
        self._birth += 1
        try:
            write_atomically(self.path / _BIRTH, str(self._birth).encode("ascii"))
        except OSError as error:
            log.warning("fleet state could not be written", path=str(self.path / _BIRTH), error=str(error))
        return self._birth


def _decoded(path: Path) -> Knowledge:
    return msgspec.json.decode(path.read_bytes(), type=Knowledge)
