"""A client on a real socket that reads when it is told to, and sockets that hold little of what it does not read."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx


class SlowClient:
    """Sends one request, and reads nothing of the answer until `read`. Use as `async with`: its end hangs up."""

    def __init__(self, url: str, path: str, body: dict[str, object]) -> None:
        self._address = ("127.0.0.1", httpx.URL(url).port)
        text = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-request-id: slow\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        self._request = head.encode() + text

    async def __aenter__(self) -> SlowClient:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, self._address)
        await loop.sock_sendall(self._socket, self._request)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    async def read(self) -> bytes:
        """Read all that is sent, up to the end of the connection."""
        received = bytearray()
        while data := await asyncio.get_running_loop().sock_recv(self._socket, 65536):
            received += data
        return bytes(received)


def narrow(listening: socket.socket) -> None:
    """Let the sockets that are accepted from now on hold little of what their client does not read."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
