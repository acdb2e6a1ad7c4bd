"""A file that this process has open, and whether it still stands under its name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Change = Literal["", "deleted", "replaced", "emptied"]


class HeldFile:
    """It goes on taking what is written after it was deleted, and all of that ends with the process.

    Args:
        path: where it stands now.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = self._identity()

    def change(self) -> Change:
        """Return what somebody did to it, empty where nobody did anything."""
        try:
            if self._identity() != self._known:
                return "replaced"
            return "" if self._path.stat().st_size else "emptied"
        except (FileNotFoundError, NotADirectoryError):
            return "deleted"

    def _identity(self) -> tuple[int, int]:
        found = self._path.stat()
        return found.st_dev, found.st_ino
