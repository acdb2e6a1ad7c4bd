"""Accepting TLS: every connection has its place in the table, and a bound on its time, from before its handshake.

The event loop's own TLS server would show a connection only after its handshake: strangers who never end theirs would
hold as many as the system allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import ssl
from collections.abc import Callable

import structlog

from router.base.shortage import is_among_last
from router.base.timers import end
from router.gateway.accept import accept
from router.gateway.connection import KEPT_FILES
from router.gateway.connection_table import ConnectionTable, Peer
from router.gateway.tls.certificates import ServerCertificates
from router.gateway.tls.plain import is_plain, refuse

log = structlog.get_logger("router.gateway")

_LEAST_S = 0.001
_SAID_S = 60.0
"""How long one line in the log stands for all certificates that are refused for the same reason."""

MakeProtocol = Callable[[str], asyncio.Protocol]


class TlsAcceptor:
    """Accepts connections on a socket, and hands each to a protocol when it is secure.

    Args:
        handshake_s: a handshake that takes longer ends its connection.
        protocol: makes one for a connection, given the digest of its client's certificate, empty where it sent none.
    """

    def __init__(
        self, table: ConnectionTable, certificates: ServerCertificates, handshake_s: float, protocol: MakeProtocol
    ) -> None:
        self._table = table
        self._certificates = certificates
        self._handshake_s = handshake_s
        self._protocol = protocol
        self._handshakes: set[asyncio.Task[None]] = set()
        self._said_s: dict[str, float] = {}  # when which reason was told; OpenSSL has a few dozen

    async def run(self, bound: socket.socket) -> None:
        """Accept on a bound socket that does not block, until cancelled; handshakes under way end then."""
        try:
            await accept(bound, self._begin)
        finally:
            await end(*self._handshakes)

    def _begin(self, accepted: socket.socket, address: object) -> None:
        loop = asyncio.get_running_loop()
        client = (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
        handshake = _Handshake(client)
        if not self._table.opened(handshake, crowded=is_among_last(accepted, KEPT_FILES)):
            accepted.close()  # to say why would take the handshake that there is no room for
            return
        handshake.task = task = loop.create_task(self._secure(loop, accepted, handshake), name="tls handshake")
        self._handshakes.add(task)
        task.add_done_callback(lambda _: self._ended(task, handshake, accepted))

    def _ended(self, task: asyncio.Task[None], handshake: _Handshake, accepted: socket.socket) -> None:
        """Let go of a connection that did not become secure, and be it that its task was ended before it began."""
        self._handshakes.discard(task)
        self._table.lost(handshake)
        if not handshake.done:
            accepted.close()

    async def _secure(self, loop: asyncio.AbstractEventLoop, accepted: socket.socket, handshake: _Handshake) -> None:
        # ssl.SSLError is an OSError: no client of ours, or one that left.
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            ends_s = loop.time() + self._handshake_s
            patience = loop.call_at(ends_s, handshake.make_room)
            try:
                if await is_plain(loop, accepted):
                    await refuse(loop, accepted)
                    return
            finally:
                patience.cancel()
            try:
                await loop.connect_accepted_socket(
                    lambda: _Secured(self._protocol, lambda: self._secured(handshake)),
                    accepted,
                    ssl=self._certificates.context,
                    ssl_handshake_timeout=max(ends_s - loop.time(), _LEAST_S),
                )
            except ssl.SSLCertVerificationError as error:
                self._tell(error.verify_message, handshake.client, loop.time())

    def _tell(self, why: str, client: Peer, now_s: float) -> None:
        """Say why a client's certificate was refused: an expired list or authority refuses all of them."""
        if now_s - self._said_s.get(why, -_SAID_S) >= _SAID_S:
            self._said_s[why] = now_s
            log.warning("client certificate refused", why=why, client=client[0] if client else None)

    def _secured(self, handshake: _Handshake) -> None:
        handshake.done = True
        self._table.lost(handshake)


class _Handshake:
    """A connection in the table until it is secure.

    Attributes:
        done: it is; its socket is its protocol's.
    """

    def __init__(self, client: Peer) -> None:
        self.client = client
        self.task: asyncio.Task[None] | None = None
        self.done = False

    def make_room(self) -> None:
        """Close: the table needs room for another connection."""
        if self.task is not None:
            self.task.cancel()


class _Secured(asyncio.Protocol):
    """Learns that a handshake is done, and gives the connection to the protocol that it is for."""

    def __init__(self, make: MakeProtocol, done: Callable[[], None]) -> None:
        self._make = make
        self._done = done

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a server makes no other
        self._done()
        shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        protocol = self._make(hashlib.sha256(shown).hexdigest() if shown else "")
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
