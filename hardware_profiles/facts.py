"""Who am I: facts about this machine, read from /proc and /etc (below a root that tests replace)."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from hardware_profiles.loader import DeviceFacts
from router.base.cuda import first_gpu

_L4T = re.compile(r"#\s*R(?P<major>\d+)\s.*?REVISION:\s*(?P<minor>[\d.]+)")


def read_facts(root: Path = Path("/"), *, architecture: str | None = None) -> DeviceFacts:
    """Return what the machine says about itself; whatever cannot be read is left out.

    The GPU is asked for below `/` only: it is this machine's, and a copied tree has none.

    Args:
        architecture: as `uname -m` says it, None for this machine's.
    """
    return DeviceFacts(
        architecture=architecture or platform.machine(),
        memory_bytes=memory_figures(root).get("MemTotal", 0),
        cpu_count=_cpu_count(root),
        cpu_model=_cpu_model(root),
        board=_board(root),
        compatible=_compatible(root),
        l4t=_l4t(root),
        gpu=first_gpu() if root == Path("/") else None,
    )


def memory_figures(root: Path) -> dict[str, int]:
    """Return /proc/meminfo in bytes, empty where there is none."""
    figures = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdigit():
            figures[name] = int(parts[0]) * (1024 if parts[1:] == ["kB"] else 1)
    return figures


def read_text(path: Path) -> str:
    """Return a small file without NULs and outer blanks, empty if it cannot be read (offline thermal zones)."""
    try:
        return path.read_bytes().decode("utf-8", "replace").replace("\0", "").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the integer in a sysfs file, None if there is none."""
    text = read_text(path)
    try:
        return int(text)
    except ValueError:
        return None


def _board(root: Path) -> str | None:
    return read_text(root / "proc/device-tree/model") or None


def _compatible(root: Path) -> tuple[str, ...]:
    try:
        raw = (root / "proc/device-tree/compatible").read_bytes()
    except OSError:
        return ()
    return tuple(entry for entry in raw.decode("utf-8", "replace").split("\0") if entry)


def _l4t(root: Path) -> str | None:
    found = _L4T.search(read_text(root / "etc/nv_tegra_release"))
    return f"{found['major']}.{found['minor']}" if found else None


def _cpu_count(root: Path) -> int:
    count = sum(line.startswith("processor") for line in read_text(root / "proc/cpuinfo").splitlines())
    return count or os.cpu_count() or 1


def _cpu_model(root: Path) -> str:
    for line in read_text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("model name", "hardware"):
            return value.strip()
    return ""
