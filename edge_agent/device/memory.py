"""Memory of this process: how much it holds, and how to make it hold less."""

from __future__ import annotations

import ctypes
import errno
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from router.base.host import libc


def rss_bytes() -> int:
    """Resident set of this process, file-backed pages included."""
    return int(psutil.Process().memory_info().rss)


def available_bytes() -> int:
    """Memory that could be taken without swapping."""
    return int(psutil.virtual_memory().available)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether something failed for want of memory; native libraries say so in words alone."""
    short = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return short or _OUT_OF_MEMORY.search(str(error)) is not None


def drop_file_pages(directory: Path) -> int:
    """Take the pages of files mapped from `directory` out of this process; they are read again when touched.

    Only mappings without a page of their own (one that was written to) are dropped, so nothing can be lost. Does
    nothing where there is no /proc.

    Returns:
        The bytes that were resident.
    """
    advise = getattr(libc(), "madvise", None)
    if advise is None:
        return 0
    dropped = 0
    for mapping in _mappings(directory):
        if mapping.changed_bytes == 0 and mapping.resident_bytes > 0:
            advise(ctypes.c_void_p(mapping.start), ctypes.c_size_t(mapping.size), _MADV_DONTNEED)
            dropped += mapping.resident_bytes
    return dropped


@dataclass(slots=True)
class _Mapping:
    start: int
    size: int
    resident_bytes: int = 0
    changed_bytes: int = 0

    @classmethod
    def below(cls, prefix: str, head: re.Match[str]) -> _Mapping | None:
        """The mapping whose first line `head` is, if its file lies below `prefix`."""
        if not head["path"].startswith(prefix):
            return None
        start, end = int(head["start"], 16), int(head["end"], 16)
        return cls(start, end - start)

    def read(self, line: str) -> None:
        """Take in one of the lines that follow the first."""
        name, _, rest = line.partition(":")
        if name == "Rss":
            self.resident_bytes = int(rest.split()[0]) * 1024
        elif name in ("Anonymous", "Swap"):
            self.changed_bytes += int(rest.split()[0]) * 1024


def _mappings(directory: Path) -> list[_Mapping]:
    """Read /proc/self/smaps for the files below `directory`, line by line: a large process has megabytes of it."""
    prefix = str(directory.resolve()) + "/"
    found: list[_Mapping] = []
    current: _Mapping | None = None
    try:
        with Path("/proc/self/smaps").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                head = _MAPPING_LINE.match(line)
                if head is not None:
                    current = _Mapping.below(prefix, head)
                    if current is not None:
                        found.append(current)
                elif current is not None:
                    current.read(line)
    except OSError:
        return []
    return found


def limit_arenas(count: int) -> None:
    """Keep glibc from giving every thread its own heap: each keeps what it once needed.

    Call before threads start; the same as MALLOC_ARENA_MAX, for a process that is already running.
    """
    mallopt = getattr(libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, count)


_OUT_OF_MEMORY = re.compile("bad_alloc|failed to allocate memory|out of memory", re.IGNORECASE)
_M_ARENA_MAX = -8
_MADV_DONTNEED = 4
_MAPPING_LINE = re.compile(r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) \S+ \S+ \S+ \S+\s*(?P<path>.*)\n?$")
