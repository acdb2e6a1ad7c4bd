"""The heap of a server on large pages, where Linux gives them.

A request touches a thousand objects, which lie all over the tens of megabytes that were imported. On pages of 4 KiB
most of them are an address that the processor has to look up; on pages of 2 MiB hardly any is.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil

from router.base.host import libc

_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1 and later: it moves what is there, and changes nothing for what comes
_MOSTLY = 0.75  # of a mapping that is in memory: stacks of threads, and room that is only reserved, stay as they are


def move_heap(size_told: Path = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")) -> int:
    """Move what this process's heap holds by now to large pages; returns the bytes that lie on them.

    None, and no error, where the system has no such pages, is older, forbids them, or has none left.

    Args:
        size_told: where it says how large they are.
    """
    try:
        size = int(size_told.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
    advise = getattr(libc(), "madvise", None)
    if advise is None:
        return 0
    moved = 0
    for mapping in psutil.Process().memory_maps(grouped=False):
        if mapping.path not in {"[anon]", "[heap]"} or mapping.rss < _MOSTLY * mapping.size:
            continue
        start, end = (int(address, 16) for address in mapping.addr.split("-"))
        first, last = -(-start // size) * size, end // size * size
        if first < last and advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _COLLAPSE) == 0:
            moved += last - first
    return moved
