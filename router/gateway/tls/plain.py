"""Plain HTTP on a port that speaks TLS: its clients read what is wrong, instead of an end without a word."""

from __future__ import annotations

import asyncio
import socket
import uuid

_BODY = (
    b'{"error":{"message":"plain HTTP was sent to a port that speaks TLS: use https://","type":"invalid_request_error",'
    b'"param":null,"code":"tls_required"}}'
)
_HEAD = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
    b"x-request-id: %s\r\n\r\n"
)
_PIECE_BYTES = 65_536


async def is_plain(loop: asyncio.AbstractEventLoop, accepted: socket.socket) -> bool:
    """Wait for the first byte, and leave it where it is: methods of HTTP begin with letters, TLS with none.

    Raises:
        OSError: the connection broke.
    """
    come = asyncio.Event()
    loop.add_reader(accepted, come.set)
    try:
        await come.wait()
    finally:
        loop.remove_reader(accepted)
    return accepted.recv(1, socket.MSG_PEEK).isalpha()


async def refuse(loop: asyncio.AbstractEventLoop, accepted: socket.socket) -> None:
    """Answer with 400, and read on until the client has done so too: unread input would reset its connection.

    Raises:
        OSError: the connection broke.
    """
    await loop.sock_sendall(accepted, _HEAD % (len(_BODY), uuid.uuid4().hex.encode()) + _BODY)
    accepted.shutdown(socket.SHUT_WR)
    while await loop.sock_recv(accepted, _PIECE_BYTES):
        pass
