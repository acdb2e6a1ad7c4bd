"""The C library's heap: giving back what it keeps for later."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def libc() -> ctypes.CDLL | None:
    """Return glibc, None on a system with another C library."""
    try:
        return ctypes.CDLL("libc.so.6")
    except OSError:
        return None


def trim_heap() -> None:
    """Return freed heap pages to the system; glibc keeps them otherwise. Does nothing on other C libraries."""
    trim = getattr(libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)
