"""Appends every ended request to the decision file, by a thread of its own: no disk ever holds a request up.

The event loop only hands the record over. The thread turns it into a line, hides names, and writes what has gathered in
one go. A disk that is too slow or full loses lines, never requests; what was lost is counted, and said once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import msgspec
import structlog

from router.base.errors import ConfigError
from router.decisions.line import Decision, encode
from router.decisions.pseudonyms import Pseudonyms, key_path
from router.decisions.rotation import RotatingFile
from router.decisions.settings import DecisionFileSettings

log = structlog.get_logger("decisions")

QUEUE_RECORDS = 4_096
_MOST_AT_ONCE = 64
_LAST_LINES_S = 2.0
_MBYTE = 1_000_000


class Lost(NamedTuple):
    """How many decisions are not in the file.

    Attributes:
        dropped: the disk was too slow, and 4,096 waited to be written.
        unwritten: the disk did not take them.
        untold: they could not be turned into a line: a bug.
    """

    dropped: int
    unwritten: int
    untold: int


class DecisionSink(Protocol):
    """What takes the ended requests of a dispatcher."""

    def append(self, tell: Callable[[], Decision]) -> None:
        """Note a request that has just ended. Never waits, never raises.

        Args:
            tell: what it reads does not change any more.
        """
        ...


class _Ended(NamedTuple):
    tell: Callable[[], Decision]
    ended_unix_s: float


class DecisionFile:
    """Use as `async with`, around the dispatcher that appends to it.

    Args:
        settings: with a path.
        wall_s: seconds since 1970, for the stamp of a line; a simulation gives its own.
    """

    def __init__(self, settings: DecisionFileSettings, wall_s: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._wall_s = wall_s
        self._path = Path(settings.path).expanduser()
        self._ended: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._lock_fd = -1
        self._full = False
        self._failing = False
        self._dropped = 0
        self._unwritten = 0
        self._untold = 0
        self.written = 0

    async def __aenter__(self) -> DecisionFile:
        await asyncio.to_thread(self.open)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    @property
    def lost(self) -> Lost:
        return Lost(self._dropped, self._unwritten, self._untold)

    def open(self) -> None:
        """Begin to write.

        Raises:
            ConfigError: the file or its key cannot be opened, or another process writes it.
        """
        try:
            self._pseudonyms = Pseudonyms.open(self._path)
            self._lock()
            self._file = RotatingFile(self._path, self._settings.max_mbytes * _MBYTE, self._settings.files)
        except BaseException as error:
            self._unlock()
            if not isinstance(error, OSError):
                raise
            raise ConfigError(
                f"decisions.path: cannot write {self._path}: {error.strerror}", param="decisions.path"
            ) from error
        self._thread = threading.Thread(target=self._run, name="decision-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left, for a moment and no longer."""
        self._ended.put(None)
        self._thread.join(_LAST_LINES_S)
        if self._thread.is_alive():  # stuck in a write: the process ends without it
            log.warning("decision file not written to its end", path=str(self._path), waiting=self._ended.qsize())
            return
        self._file.close()
        self._unlock()

    def append(self, tell: Callable[[], Decision]) -> None:
        """Note a request that has just ended; `tell` is called by the writing thread."""
        if self._ended.qsize() >= QUEUE_RECORDS:
            self._dropped += 1
            if not self._full:
                self._full = True
                log.warning("decisions are dropped: their file is written too slowly", path=str(self._path))
            return
        self._ended.put(_Ended(tell, self._wall_s()))

    def _run(self) -> None:
        open_ = True
        while open_:
            lines: list[bytes] = []
            item = self._ended.get()
            while item is not None:
                self._add_line(item, lines)
                if len(lines) >= _MOST_AT_ONCE:
                    break
                try:
                    item = self._ended.get_nowait()
                except queue.Empty:
                    break
            else:
                open_ = False
            self._write(lines)

    def _add_line(self, ended: _Ended, lines: list[bytes]) -> None:
        try:
            decision = ended.tell()
            accepted_s = ended.ended_unix_s - (decision.finish_ms or 0.0) / 1e3
            stamped = msgspec.structs.replace(decision, accepted_unix_s=round(accepted_s, 6))
            lines.append(encode(self._pseudonyms.hide(stamped)))
        except Exception:  # a bug of one record must not end the writer
            self._untold += 1
            if self._untold == 1:
                log.exception("a decision could not be written")

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        try:
            self._file.append(b"".join(lines))
        except OSError as error:
            self._unwritten += len(lines)
            if not self._failing:
                self._failing = True
                log.warning("decisions cannot be written", path=str(self._path), error=error.strerror)
            return
        self.written += len(lines)
        if self._failing or (self._full and self._ended.empty()):
            self._failing = self._full = False
            log.info("decisions are written again", path=str(self._path), **self.lost._asdict())

    def _lock(self) -> None:
        """Keep other processes from writing the same file: each would rotate it under the other.

        Raises:
            ConfigError: another one writes it.
        """
        self._lock_fd = os.open(key_path(self._path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"decisions.path: {self._path} is written by another process; name a file of its own for each tier",
                param="decisions.path",
            ) from None

    def _unlock(self) -> None:
        with contextlib.suppress(OSError):
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
        self._lock_fd = -1
