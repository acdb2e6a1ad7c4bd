"""Whether a place can be written to, as a check may ask: nothing is made, and nothing changes."""

from __future__ import annotations

import os
from pathlib import Path

from router.base.host import on_read_only_disk


def file_fault(path: Path) -> str:
    """Return why no file can be kept at a path, empty where one can; a disk that is read-only now is no reason."""
    if path.is_dir():
        return f"{path} is a folder"
    if not path.parent.is_dir():
        return f"{path.parent} is no folder"
    if not on_read_only_disk(path) and not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"this user may not write {path}"
    return ""


def folder_fault(path: Path) -> str:
    """Return why there can be no folder at a path, with those around it, as above."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        return f"{there} is no folder"
    if not on_read_only_disk(there / path.name) and not os.access(there, os.W_OK | os.X_OK):
        return f"this user may not write {there}"
    return ""
