"""The folder of a tier's jobs: of one process at a time, and with a name by which a database knows it again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import uuid
from pathlib import Path
from typing import IO

from router.base.errors import ConfigError

_FAILING_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})


def locked(folder: Path) -> IO[str]:
    """Take a folder for this process alone; closing the file gives it back.

    Raises:
        ConfigError: it cannot be made or written, or another process has it.
        OSError: its disk is full, read-only or failing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / "lock").open("w", encoding="ascii")
    except OSError as error:
        if error.errno in _FAILING_DISK:
            raise
        raise unusable(folder, error.strerror or "") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(
            f"jobs.dir: another process uses {folder}: give each tier a folder of its own", param="jobs.dir"
        ) from None
    with contextlib.suppress(OSError):  # on a full disk it is a lock all the same
        os.write(lock.fileno(), str(os.getpid()).encode())
    return lock


def unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"jobs.dir: cannot write {folder}: {why}; name a folder that this user may write", param="jobs.dir"
    )


def place_of(folder: Path) -> str:
    """Return the name of a folder of files, which is made up once and kept in it.

    Raises:
        OSError: it cannot be read or written.
    """
    path = folder / "place"
    if not path.exists():
        new = path.with_name("place.new")
        new.write_text(uuid.uuid4().hex, encoding="ascii")
        new.replace(path)
    return path.read_text(encoding="ascii").strip()
