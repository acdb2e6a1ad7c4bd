"""A file of lines that never grows past a bound: at its bound it is renamed, and the oldest of its kind goes.

`log`, `log.1`, `log.2`, …: the higher, the older. Only whole lines are written. Where the disk takes a part of one,
that part is cut off again; where the process dies in it, the next start ends it, and readers skip it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_MODE = 0o640


def rotated(path: Path, number: int) -> Path:
    """Return the name of the `number`-th older file; 0 is the one that is written."""
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


class RotatingFile:
    """Open for appending; one process at a time.

    Args:
        max_bytes: no file grows past it, unless a single line is longer.
        files: kept at most, the one that is written included.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._files = files
        self._fd = -1
        self._size = 0
        self._open()

    def append(self, lines: bytes) -> None:
        """Write whole lines.

        Raises:
            OSError: none of them was written.
        """
        if self._fd < 0 or self._is_gone():
            self._open()
        if self._size and self._size + len(lines) > self._max_bytes:
            self._rotate()
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(lines)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _open(self) -> None:
        self.close()
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # a line that a crash cut
                size += os.write(fd, b"\n")
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._size = fd, size

    def _is_gone(self) -> bool:
        """Whether somebody else removed or renamed the file: what is written to it would be lost."""
        try:
            there, mine = self.path.stat(), os.fstat(self._fd)
        except FileNotFoundError:
            return True
        return (there.st_ino, there.st_dev) != (mine.st_ino, mine.st_dev)

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                rotated(self.path, number - 1).replace(rotated(self.path, number))
        self._remove_beyond()
        self._open()

    def _remove_beyond(self) -> None:
        """Remove what an earlier, larger number of files has left."""
        number = self._files
        while (path := rotated(self.path, number)).exists():
            path.unlink()
            number += 1
