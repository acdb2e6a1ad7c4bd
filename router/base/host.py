"""The machine this process runs on: cores and memory it may use, what its CPU is good at, and the C library's heap."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
from pathlib import Path, PurePosixPath

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


def usable_memory_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the memory that this process may still take, at least 0.

    That is the least of what the system has left, of what its control group and each group around that allow (version
    2: `systemd-run -p MemoryMax=`, a container, a pod), and of its own address space (`ulimit -v`).

    Args:
        root: where control groups are mounted.
        own: says in which of them this process is.
    """
    left = [int(psutil.virtual_memory().available)]
    for group in _control_groups(root, own):
        with contextlib.suppress(OSError, ValueError):  # no such group here, or `max`: no limit
            limit, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
            left.append(limit - used)
    space_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space_bytes != resource.RLIM_INFINITY:
        left.append(space_bytes - int(psutil.Process().memory_info().vms))
    return max(0, min(left))


def _control_groups(root: Path, own: Path) -> list[Path]:
    """Return this process's control group of version 2 and those around it, as far as they are seen from here."""
    try:
        lines = own.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [root]
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    within = PurePosixPath(path.strip("/"))
    if ".." in within.parts:  # it was moved out of what its namespace shows
        return [root]
    return [root / part for part in (within, *within.parents)]


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
