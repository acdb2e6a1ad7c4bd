"""A process that may open hardly any more files."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def few_files(left: int) -> Iterator[None]:
    """Let this process open so many more files, counted from the lowest number that is free, and no others.

    Args:
        left: below 0, so many of those that are open now cannot be opened again once they are closed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
