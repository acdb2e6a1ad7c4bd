"""A share of a core for one tier: a device computes slower than a server, also where both are played by one machine.

Linux, as root: a group of its own under the CPU controller (cgroup v1 or v2), with a quota in each `PERIOD_US` that it
has before others. Without that the tier has all of its core, and whoever asked says so.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import TracebackType

PERIOD_US = 10_000
_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
_PREFIX = "overspill-"
_EMPTY_WITHIN_S = 5.0


class CpuShare:
    """Use as `async with`: what is started with `prefix` gets `share` of a core, all its threads together."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._group: Path | None = None

    @property
    def limited(self) -> bool:
        return self._group is not None

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command; nothing where it cannot be limited."""
        if self._group is None:
            return ()
        return ("sh", "-c", f'echo $$ > {self._group}/cgroup.procs && exec "$@"', "sh")

    async def __aenter__(self) -> CpuShare:
        remove_stale()
        for root in _ROOTS if self.share < 1.0 else ():
            try:
                self._group = _made(root, self.share)
            except OSError:
                continue
            break
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is not None:
            _removed(self._group, _EMPTY_WITHIN_S)


def _made(root: Path, share: float) -> Path:
    """Make a group with a quota.

    Raises:
        OSError: there is no such controller here, or it may not be used.
    """
    group = root / f"{_PREFIX}{os.getpid()}"
    v1 = (root / "cpu.cfs_quota_us").exists()
    if not v1 and "cpu" not in (root / "cgroup.subtree_control").read_text().split():
        raise OSError(f"{root}: no CPU controller")
    group.mkdir()
    quota_us = round(share * PERIOD_US)
    try:
        if v1:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            (group / "cpu.shares").write_text("262144")
        else:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            (group / "cpu.weight").write_text("10000")
    except OSError:
        group.rmdir()
        raise
    return group


def remove_stale() -> None:
    """Remove the groups of processes that are gone."""
    for root in _ROOTS:
        for group in root.glob(f"{_PREFIX}[0-9]*") if root.is_dir() else ():
            pid = group.name.removeprefix(_PREFIX)
            if pid.isdigit() and not Path("/proc", pid).exists():
                _removed(group, 0.0)


def _removed(group: Path, within_s: float) -> None:
    """Remove a group once its processes are gone; one that is not empty by then is left to the next run."""
    until_s = time.monotonic() + within_s
    while (group / "cgroup.procs").read_text().strip() and time.monotonic() < until_s:
        time.sleep(0.1)
    with contextlib.suppress(OSError):
        group.rmdir()
