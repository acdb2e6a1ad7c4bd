"""How long a TCP handshake to an upstream takes: one round trip, without what the upstream does in between."""

from __future__ import annotations

from typing import Any

from router.base.clock import Clock


class HandshakeTrace:
    """Measures the TCP handshake of a new connection, which is one round trip.

    Attributes:
        handshake_s: None on a connection that was open already.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = 0.0
        self.handshake_s: float | None = None

    async def __call__(self, event: str, info: dict[str, Any]) -> None:  # noqa: ARG002
        if event == "connection.connect_tcp.started":
            self._began_s = self._clock.now_s()
        elif event == "connection.connect_tcp.complete":
            self.handshake_s = self._clock.now_s() - self._began_s
