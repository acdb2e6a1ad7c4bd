"""Programs of other makers, each in a virtual environment of its own that is made where it is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".overspill"
_INSTALL_LIMIT_S = 900.0


def installed(name: str, requirements: Sequence[str], command: str) -> Path:
    """Return a command of a virtual environment, installed once.

    Args:
        name: of the environment, a folder of `.overspill`.

    Raises:
        RuntimeError: pip could not install it; says what was run.
    """
    venv = FOLDER / name
    found = venv / "bin" / command
    if found.exists():
        return found
    print(f"installing {', '.join(requirements)} into {venv} (once) …", file=sys.stderr, flush=True)
    for argv in (
        [sys.executable, "-m", "venv", str(venv)],
        [str(venv / "bin" / "pip"), "install", "--quiet", *requirements],
    ):
        try:
            code = subprocess.run(argv, timeout=_INSTALL_LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"`{' '.join(argv)}` took longer than {_INSTALL_LIMIT_S:.0f} s") from None
        if code:
            raise RuntimeError(f"`{' '.join(argv)}` ended with {code}")
    return found
