"""The network below a connection: whether anything can still come over it.

A device that moves from one network to another keeps the connections of the old one, and nobody ever tells it that they
are dead. The kernel can be asked.
"""

from __future__ import annotations

import errno
import socket
from typing import Any

_SILENT_S = 10  # after which the other side is asked whether it is there
_ASKED_EVERY_S = 5
_UNHEARD_S = 30  # in which it acknowledged nothing: the connection is lost


def watch_over(sock: socket.socket) -> None:
    """Have the kernel end a connection on which the other side acknowledged nothing for half a minute.

    What goes on meanwhile is not its business: a server may compute for as long as it likes. Where a system knows an
    option by no name, it goes by its own times.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {
        "TCP_KEEPIDLE": _SILENT_S,
        "TCP_KEEPINTVL": _ASKED_EVERY_S,
        "TCP_KEEPCNT": (_UNHEARD_S - _SILENT_S) // _ASKED_EVERY_S,
        "TCP_USER_TIMEOUT": _UNHEARD_S * 1000,
    }
    for name, value in times.items():
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def is_here(local: tuple[Any, ...]) -> bool:
    """Return whether this machine still has the address of a socket, as `getsockname` gives it (IPv4 or IPv6)."""
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        try:
            asked.bind((local[0], 0, *local[2:]))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True
