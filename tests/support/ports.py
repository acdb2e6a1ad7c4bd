"""Loopback TCP ports: one that was free a moment ago, one that refuses every connection, one that is taken."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


def unused_port() -> int:
    """A loopback port that was free a moment ago, for a server that is told its port before it binds it."""
    with refused_port() as port:
        return port


@contextlib.contextmanager
def refused_port() -> Iterator[int]:
    """A loopback port that is bound and does not listen: nobody else gets it, and every connection is refused."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        yield nobody.getsockname()[1]


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """A loopback port that another server listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def accepts(port: int) -> bool:
    """Whether somebody listens on this loopback port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
