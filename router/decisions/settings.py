"""The `[decisions]` table of either tier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from router.base.errors import ConfigError
from router.base.host import on_read_only_disk


class DecisionFileSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where every ended request leaves one JSON line. It is read at start; no document of the fleet may set a path.

    Attributes:
        path: the file that is written, e.g. `/var/log/overspill/decisions.jsonl`; empty: none is.
        max_mbytes: at this size (MB of 1,000,000 bytes) it becomes `path.1`, and what was `path.1` becomes `path.2`.
        files: how many are kept, the one that is written included.
    """

    path: str = ""
    max_mbytes: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 64
    files: Annotated[int, msgspec.Meta(ge=2, le=1_000)] = 4


def describe(settings: DecisionFileSettings) -> str:
    """Say where decisions would be kept, or that their disk is read-only now; writes nothing.

    Raises:
        ConfigError: the folder is missing, or this user may not write there.
    """
    if not settings.path:
        return "not kept on disk"
    path = Path(settings.path).expanduser()
    target = path if path.exists() else path.parent
    if not path.is_dir() and on_read_only_disk(path):
        return f"{path}: its disk is read-only now, and nothing is written until it is not"
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise ConfigError(
            f"decisions.path: cannot write {path}: it is a folder, its folder is missing, or this user may not write "
            "there; name another file, or make the folder",
            param="decisions.path",
        )
    return f"{path}, {settings.files} files of {settings.max_mbytes} MB"
