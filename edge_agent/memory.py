"""Memory of this process: how much it holds, and how to make the C library give back what it keeps for later."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil


def rss_bytes() -> int:
    """Resident set of this process, file-backed pages included."""
    return int(psutil.Process().memory_info().rss)


def available_bytes() -> int:
    """Memory that could be taken without swapping."""
    return int(psutil.virtual_memory().available)


def trim_heap() -> None:
    """Return freed heap pages to the system; glibc keeps them otherwise. Does nothing on other C libraries."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def drop_file_pages(directory: Path) -> int:
    """Take the pages of files mapped from `directory` out of this process; they are read again when touched.

    Only mappings without a page of their own (one that was written to) are dropped, so nothing can be lost. Does
    nothing where there is no /proc.

    Returns:
        The bytes that were resident.
    """
    advise = getattr(_libc(), "madvise", None)
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


def _mappings(directory: Path) -> list[_Mapping]:
    """Read /proc/self/smaps for the files below `directory`."""
    try:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    prefix = str(directory.resolve()) + "/"
    found: list[_Mapping] = []
    current: _Mapping | None = None
    for line in lines:
        head = _MAPPING_LINE.match(line)
        if head is not None:
            start, end = int(head["start"], 16), int(head["end"], 16)
            current = _Mapping(start, end - start) if head["path"].startswith(prefix) else None
            if current is not None:
                found.append(current)
        elif current is not None:
            name, _, rest = line.partition(":")
            if name == "Rss":
                current.resident_bytes = int(rest.split()[0]) * 1024
            elif name in ("Anonymous", "Swap"):
                current.changed_bytes += int(rest.split()[0]) * 1024
    return found


def limit_arenas(count: int) -> None:
    """Keep glibc from giving every thread its own heap: each keeps what it once needed.

    Call before threads start; the same as MALLOC_ARENA_MAX, for a process that is already running.
    """
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, count)


_M_ARENA_MAX = -8
_MADV_DONTNEED = 4
_MAPPING_LINE = re.compile(r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) \S+ \S+ \S+ \S+\s*(?P<path>.*)$")


@functools.cache
def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libc.so.6")
    except OSError:
        return None


def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(_libc(), "malloc_trim", None)
