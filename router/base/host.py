"""The machine this process runs on: how many cores it may keep busy, and its heaps, Python's and the C library's."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores of this process: its affinity, and its container's quota (cgroup v2); at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    try:
        quota_us, period_us = cgroup.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota_us) // int(period_us)))
    except (OSError, ValueError):  # no cgroup v2, or `max`: no quota
        return cores


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
