"""A connection that ends well: its peer may finish sending, and reads the answer that told it why."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from typing import Any

_AGREE_S = 1.0
_LINGER_S = 2.0  # and at most this much is then read and dropped:
_LINGER_BYTES = 64 * 1024 * 1024
_UNREAD_S = 30.0  # that a peer may take nothing of what is still to be sent
_NO_LINGER = struct.pack("ii", 1, 0)


def _no() -> bool:
    return False


class LingeringTransport:
    """A connection whose `close` first lets the peer finish sending, for a moment, and then read the answer.

    A kernel that closes a connection with unread input resets it, and the peer never sees the 413 that said why.
    Everything else is the transport's own.

    Args:
        unread: whether there is such input.
        cut_off: whether an answer breaks off here whose reader would take the end of the connection for its own.
    """

    def __init__(
        self, transport: asyncio.Transport, unread: Callable[[], bool], cut_off: Callable[[], bool] = _no
    ) -> None:
        self._transport = transport
        self.write = transport.write
        self._unread = unread
        self._cut_off = cut_off
        self._left_bytes = _LINGER_BYTES
        self.lingers = False

    def let_go(self) -> None:
        """The connection is lost: there is nobody left to ask."""
        self._unread = self._cut_off = _no

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def has_unread(self) -> bool:
        """Whether something of the peer's has arrived that nobody has read yet."""
        try:
            return any(fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4)))
        except OSError:
            return False  # it is closed

    def close(self) -> None:
        if self._cut_off() and not self._transport.is_closing():
            self._reset()
        elif self._unread():
            self.linger()
        else:
            self._close()

    def _close(self) -> None:
        """Close when what was written is sent; of a peer that reads nothing that would be never."""
        self._transport.close()
        self._await_reader(self._transport.get_write_buffer_size())

    def _await_reader(self, unsent_bytes: int) -> None:
        if unsent_bytes:
            asyncio.get_running_loop().call_later(_UNREAD_S, self._look_at_reader, unsent_bytes)

    def _look_at_reader(self, before_bytes: int) -> None:
        unsent_bytes = self._transport.get_write_buffer_size()
        if unsent_bytes == before_bytes:
            self._transport.abort()
        else:
            self._await_reader(unsent_bytes)

    def _reset(self) -> None:
        """End the connection with an error."""
        raw = self._transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()

    def close_now(self) -> None:
        """Close as soon as what was written is sent; over TLS, whose peer is asked to agree, within a second."""
        self._close()
        if not self._transport.can_write_eof():
            asyncio.get_running_loop().call_later(_AGREE_S, self._transport.abort)

    def linger(self) -> None:
        if self.is_closing():
            return
        self.lingers = True
        half_closes = self._transport.can_write_eof()  # TLS does not: its peer knows from `connection: close`
        if half_closes:
            self._transport.write_eof()
        self._transport.resume_reading()
        close = self._transport.abort if half_closes else self._transport.close
        asyncio.get_running_loop().call_later(_LINGER_S, close)

    def discard(self, data: bytes) -> None:
        """Drop what still comes; whoever sends for ever is cut off."""
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            self._transport.abort()
