"""The machine this process runs on: cores and memory it may use, what its CPU is good at, and the C library's heap."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import psutil


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores of this process: its affinity, and its container's quota (cgroup v2); at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    try:
        quota_us, period_us = cgroup.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota_us) // int(period_us)))
    except (OSError, ValueError):  # no cgroup v2, or `max`: no quota
        return cores


def usable_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that this process may still take: what the system has left, and its container (cgroup v2)."""
    left = int(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        return max(0, min(left, int(limit) - int(used)))
    except (OSError, ValueError):  # no cgroup v2, or `max`: no limit
        return left


def computes_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether the CPU multiplies bfloat16 itself (AVX512-BF16, AMX, or Arm's bf16); False where none can tell."""
    try:
        words = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


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


def on_read_only_disk(path: Path) -> bool:
    """Tell whether nothing can be written beside a path because of its file system, whatever this user may."""
    try:
        return bool(os.statvfs(path.parent).f_flag & os.ST_RDONLY)
    except OSError:
        return False
