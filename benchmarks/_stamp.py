"""What stands beside a figure: the machine, the day and the commit."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = f"{models[0]}, {len(models)} cores" if models else cpu
    return {"cpu": cpu, "system": platform.platform(), "python": platform.python_version()}


def commit() -> str:
    """Return the commit that is measured, with a `+` where other files than results differ from it; else nothing."""
    here = Path(__file__).resolve().parent
    head = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=here, capture_output=True, check=False)
    if head.returncode:
        return ""
    others = ["--", ":/", ":(exclude,top)benchmarks/results", ":(exclude,top)docs/compatibility.md"]
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", *others], cwd=here, check=False).returncode
    return head.stdout.decode().strip() + ("+" if changed else "")


def today() -> str:
    """Return the date, as UTC has it."""
    return datetime.now(timezone.utc).date().isoformat()
