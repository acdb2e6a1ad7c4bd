"""The network below a connection: whether anything can still come over it.

A device that moves from one network to another keeps the connections of the old one, and nobody ever tells it that they
are dead. The kernel can be asked.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from typing import Any

_SILENT_S = 10  # after which the other side is asked whether it is there
_ASKED_EVERY_S = 5
_ANYWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # RFC 5737, RFC 3849: nobody has them
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


def sources_towards(host: str) -> set[str]:
    """Return the addresses that this machine would send from: to anywhere, and to a host that is given as an address.

    Nothing is sent, and no name is looked up. Empty where there is no network at all.
    """
    found = set()
    for family, anywhere in _ANYWHERE.items():
        for target in (anywhere, host) if _is_address(host, family) else (anywhere,):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asked:  # no way there
                asked.connect((target, 9))
                found.add(str(asked.getsockname()[0]))
    return found


def _is_address(host: str, family: socket.AddressFamily) -> bool:
    try:
        return ipaddress.ip_address(host).version == (4 if family == socket.AF_INET else 6)
    except ValueError:
        return False
