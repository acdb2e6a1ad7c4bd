"""What the kernel says of the network below a connection."""

from __future__ import annotations

import socket

import pytest

from router.base.path import is_here, sources_towards, watch_over


@pytest.mark.parametrize(
    ("address", "here"),
    [
        (("127.0.0.1", 80), True),
        (("192.0.2.1", 80), False),  # RFC 5737: nobody has it
        (("::1", 80, 0, 0), socket.has_ipv6),
        (("2001:db8::1", 80, 0, 0), False),  # RFC 3849
    ],
)
def test_whether_this_machine_has_an_address(address: tuple, here: bool) -> None:
    assert is_here(address) is here


def test_the_kernel_ends_what_nobody_acknowledges() -> None:
    with socket.socket() as sock:
        watch_over(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_from_which_addresses_a_host_is_reached() -> None:
    assert "127.0.0.1" in sources_towards("127.0.0.1")
    assert sources_towards("a name that nobody looks up") <= sources_towards("127.0.0.1")
