"""What this process itself has run out of: files that it may open. No server is to blame for that.

A server that seems unreachable for it would lose its breaker, and with it everybody whose connection is open.
"""

from __future__ import annotations

import errno
import resource
import socket

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_KEPT_FILES = 64  # for callers who come, health, databases and processes that begin


def own_shortage(error: BaseException | None) -> str:
    """Return what this process lacks, by whatever `error` it told so; empty where it is something else."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OURS:
            return f"this process can open no more connections: {error.strerror}"
        error = error.__cause__ or error.__context__
    return ""


def leaves_no_files(opened: socket.socket) -> bool:
    """Whether a socket is one of the last few files that this process may open: the system gives the lowest number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and opened.fileno() >= soft - min(_KEPT_FILES, soft // 4)
