"""What the control groups around this process allow it, of version 2 and of version 1: a container, a pod, a unit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
"""Where control groups are mounted."""
OWN = Path("/proc/self/cgroup")
"""Says in which of them this process is."""


def cpu_quotas(root: Path = ROOT, own: Path = OWN) -> Iterator[float]:
    """Yield the quota of each group, in cores; none of a group without one."""
    for group in _groups("cpu", root, own):
        for quota in (_numbers(group, "cpu.max"), _numbers(group, "cpu.cfs_quota_us", "cpu.cfs_period_us")):
            if len(quota) == 2 and min(quota) > 0:  # version 1 says -1 for none
                yield quota[0] / quota[1]


def memory_left(root: Path = ROOT, own: Path = OWN) -> Iterator[int]:
    """Yield the bytes that each group with a limit may still take, less than 0 where it has too much."""
    for group in _groups("memory", root, own):
        for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            found = _numbers(group, *names)
            if len(found) == 2:
                yield found[0] - found[1]


def _numbers(group: Path, *names: str) -> list[int]:
    """Return the numbers of a group's files, one after another; none where one is not there, or says `max`."""
    try:
        return [int(word) for name in names for word in (group / name).read_text(encoding="ascii").split()]
    except (OSError, ValueError):
        return []


def _groups(controller: str, root: Path, own: Path) -> list[Path]:
    """Return this process's groups of a controller, and those around them, as far as they are seen from here."""
    try:
        lines = own.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = {root: None}
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        within = PurePosixPath(path.strip("/"))
        if ".." in within.parts:  # it was moved out of what its namespace shows
            within = PurePosixPath()
        for mounted in (root / controllers, root / controller) if controllers else (root,):
            found.update({mounted / part: None for part in (within, *within.parents)})
    return list(found)
