"""Appends every ended request to the decision file, by a thread of its own: no disk ever holds a request up.

The event loop only appends the record to a list; nothing wakes the thread, which would take the interpreter from the
loop at once. Every quarter of a second it turns what has gathered into lines, naps after each so that the loop goes
first, and writes them in one go. A disk that is too slow or full loses lines, never requests; what was lost is counted,
and said once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Protocol

import structlog

from router.base.errors import ConfigError, in_words
from router.decisions.line import Decision
from router.decisions.line_file import LineFile
from router.decisions.settings import DecisionFileSettings

log = structlog.get_logger("decisions")

QUEUE_RECORDS = 4_096
_MOST_AT_ONCE = 64
_GATHER_S = 0.25
_NAP_S = 0.0005
_HURRY = QUEUE_RECORDS // 4  # with so many waiting, it does not nap
_LAST_LINES_S = 2.0
_FAILING_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})


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


class SimulatedDecisions:
    """Appends at once, on the thread of a simulation, whose time stands still meanwhile. Use as `with`.

    Args:
        wall_s: seconds of the simulation's clock.

    Raises:
        ConfigError: see `DecisionFile`.
    """

    def __init__(self, settings: DecisionFileSettings, wall_s: Callable[[], float]) -> None:
        self._lines = LineFile(settings)
        self._wall_s = wall_s

    def __enter__(self) -> SimulatedDecisions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()

    def append(self, tell: Callable[[], Decision]) -> None:
        """Write the line of a request that has just ended; a disk that fails ends the simulation."""
        self._lines.append(self._lines.line(tell(), self._wall_s()))


class DecisionFile:
    """Use as `async with`, around the dispatcher that appends to it.

    Args:
        settings: with a path.
        wall_s: seconds since 1970, for the stamp of a line; a simulation gives its own.
    """

    def __init__(self, settings: DecisionFileSettings, wall_s: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._wall_s = wall_s
        self._ended: deque[tuple[Callable[[], Decision], float]] = deque()
        self._closing = threading.Event()
        self._lines: LineFile | None = None
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
        """Begin to write; on a disk that is full, read-only or failing, once it can.

        Raises:
            ConfigError: the file or its key cannot be opened, or another process writes it.
        """
        try:
            self._lines = LineFile(self._settings)
        except ConfigError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _FAILING_DISK:
                raise
            self._fail(cause.strerror)
        self._thread = threading.Thread(target=self._run, name="decision-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left, for a moment and no longer."""
        self._closing.set()
        self._thread.join(_LAST_LINES_S)
        if self._thread.is_alive():  # stuck in a write: the process ends without it
            log.warning("decision file not written to its end", path=self._settings.path, waiting=len(self._ended))
            return
        if self._lines is not None:
            self._lines.close()

    def append(self, tell: Callable[[], Decision]) -> None:
        """Note a request that has just ended; `tell` is called by the writing thread."""
        if len(self._ended) >= QUEUE_RECORDS:
            self._dropped += 1
            if not self._full:
                self._full = True
                log.warning("decisions are dropped: their file is written too slowly", path=self._settings.path)
            return
        self._ended.append((tell, self._wall_s()))

    def _run(self) -> None:
        """Write what gathers until the end, whatever goes wrong with some of it or with this thread."""
        closing = False
        while not closing:
            closing = self._closing.wait(_GATHER_S)
            while self._ended:
                lines: list[bytes] = []
                try:
                    self._write_some(lines, closing=closing)
                except Exception as error:  # noqa: BLE001 - a bug, or no memory: those to come may well be written
                    self._unwritten += len(lines)
                    self._fail(in_words(error))
                    self._begin_anew()

    def _write_some(self, lines: list[bytes], *, closing: bool) -> None:
        file = self._lines or self._opened()
        while self._ended and len(lines) < _MOST_AT_ONCE:
            tell, ended_unix_s = self._ended.popleft()
            if file is None:
                self._unwritten += 1
                continue
            self._add_line(file, tell, ended_unix_s, lines)
            if not closing and len(self._ended) < _HURRY:
                time.sleep(_NAP_S)
        if file is not None:
            self._write(file, lines)

    def _opened(self) -> LineFile | None:
        """Open the file that could not be opened before; None where it still cannot."""
        with contextlib.suppress(ConfigError):
            self._lines = LineFile(self._settings)
        return self._lines

    def _begin_anew(self) -> None:
        """Open the file anew for what comes next: something was wrong that is no matter of its disk."""
        file, self._lines = self._lines, None
        if file is not None:
            with contextlib.suppress(Exception):
                file.close()

    def _add_line(self, file: LineFile, tell: Callable[[], Decision], ended_unix_s: float, lines: list[bytes]) -> None:
        try:
            lines.append(file.line(tell(), ended_unix_s))
        except Exception:  # a bug of one record must not end the writer
            self._untold += 1
            if self._untold == 1:
                log.exception("a decision could not be written")

    def _write(self, file: LineFile, lines: list[bytes]) -> None:
        if not lines:
            return
        try:
            file.append(b"".join(lines))
        except OSError as error:
            self._unwritten += len(lines)
            self._fail(error.strerror)
            return
        self.written += len(lines)
        if self._failing or (self._full and not self._ended):
            self._failing = self._full = False
            log.info("decisions are written again", path=self._settings.path, **self.lost._asdict())

    def _fail(self, why: str | None) -> None:
        if not self._failing:
            self._failing = True
            log.warning("decisions cannot be written", path=self._settings.path, error=why)
