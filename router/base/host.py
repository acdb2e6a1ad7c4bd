"""The machine this process runs on: cores and memory it may use, what its CPU is good at, and the C library's heap."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
from pathlib import Path

import psutil

from router.base.control_groups import OWN, ROOT, cpu_quotas, memory_left


def usable_cores(root: Path = ROOT, own: Path = OWN) -> int:
    """Return the cores of this process, at least 1: its affinity, and the least quota of the control groups around it.

    Args:
        root, own: see `router.base.control_groups`.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, int(min([cores, *cpu_quotas(root, own)])))


def usable_memory_bytes(root: Path = ROOT, own: Path = OWN) -> int:
    """Return the memory that this process may still take, at least 0.

    That is the least of what the system has left, of what its control group and each group around that allow
    (`systemd-run -p MemoryMax=`, a container, a pod), and of its own address space (`ulimit -v`).

    Args:
        root, own: see `router.base.control_groups`.
    """
    left = [int(psutil.virtual_memory().available), *memory_left(root, own)]
    space_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space_bytes != resource.RLIM_INFINITY:
        left.append(space_bytes - int(psutil.Process().memory_info().vms))
    return max(0, min(left))


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
