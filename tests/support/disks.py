"""Disks of their own for tests: small ones that fill up, and ones that turn read-only as a failing card does."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Disk:
    """A file system in memory, mounted at `folder`."""

    folder: Path

    def fill(self) -> Path:
        """Take every byte that is left; returns the file to remove."""
        filler = self.folder / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        return filler

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.folder)], check=True)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Disk]:
    """Mount a disk of so many bytes (such as `4m`); a test that may not is skipped."""
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True, check=False).returncode != 0:
        pytest.skip("a disk of its own is mounted by root alone")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
