"""Which Overspill this process runs: its version, and whether interpreted or compiled by mypyc (`setup.py`)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Where the packages of this copy are."""
_MANIFEST = Path("router/base/compiled.json")


@dataclass(frozen=True, slots=True)
class Build:
    """How the router runs.

    Attributes:
        compiled: with mypyc.
        changed: sources that are not what was compiled; they do not run.
    """

    compiled: bool
    changed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`compiled`, `interpreted`, or `outdated`: compiled from other sources than stand there."""
        if self.changed:
            return "outdated"
        return "compiled" if self.compiled else "interpreted"


def user_agent() -> str:
    """Return what a tier calls itself towards the servers that it asks: some turn away who has no name."""
    return f"overspill/{metadata.version('overspill')}"


def build_of(root: Path = ROOT) -> Build:
    """Return how the router below `root` runs under this Python; what was compiled for another one is not used."""
    try:
        manifest = json.loads((root / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Build(compiled=False)
    if manifest["suffix"] not in EXTENSION_SUFFIXES:
        return Build(compiled=False)
    changed = [path for path, digest in manifest["sources"].items() if _digest(root / path) != digest]
    return Build(compiled=True, changed=tuple(changed))


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""
