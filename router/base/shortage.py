"""What this process itself has run out of: files that it may open. No server is to blame for that.

A server that seems unreachable for it would lose its breaker, and with it everybody whose connection is open.
"""

from __future__ import annotations

import errno
import resource
from typing import Protocol

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LEAST_SHARE = 4  # of a very low limit, no more than this part is kept


class Opened(Protocol):
    """A socket."""

    def fileno(self) -> int:
        """Return its number."""
        ...


def own_shortage(error: BaseException | None) -> str:
    """Return what this process lacks, by whatever `error` it told so; empty where it is something else."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OURS:
            return f"this process can open no more connections: {error.strerror}"
        error = error.__cause__ or error.__context__
    return ""


def is_among_last(opened: Opened, kept: int) -> bool:
    """Whether a socket is among the last files that this process may open: the system gives the lowest number.

    Args:
        kept: so many files are for others.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and opened.fileno() >= soft - min(kept, soft // _LEAST_SHARE)
