"""Answers `command` messages: `ping` and `status`, for `overspill fleet get --live`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from edge_agent.mqtt.connection import Message, Outgoing
from router.fleetwire.documents import BadDocument, Reported, Response, Snapshot, decode_command, encode, utc_now
from router.fleetwire.topics import Address

log = structlog.get_logger("edge_agent.fleet")

_MAX_CORRELATION_BYTES = 64
_ANSWER_EXPIRY_S = 30


@dataclass(frozen=True, slots=True)
class Responder:
    """Turns a command into its answer."""

    address: Address
    reported: Callable[[], Awaitable[Reported]]
    snapshot: Callable[[], Awaitable[Snapshot]]

    async def answer(self, message: Message, birth: int) -> Outgoing | None:
        """Return what to send; None where no answer may be sent.

        Answers go to this device's own `response` topic only: a requester must not make the device publish elsewhere.
        """
        topic = self.address.topic("response")
        correlation = message.correlation
        if message.response_topic != topic or not correlation or len(correlation) > _MAX_CORRELATION_BYTES:
            log.warning("a command without a usable response topic or correlation was dropped", response_topic=topic)
            return None
        if message.retained:
            log.warning("a retained command was dropped: it could be any number of days old")
            return None
        response = await self._respond(message.payload, birth)
        return Outgoing(topic, encode(response), expiry_s=_ANSWER_EXPIRY_S, correlation=correlation)

    async def _respond(self, payload: bytes, birth: int) -> Response:
        try:
            command = decode_command(payload).command
        except BadDocument as error:
            return Response(command="", error=error.message, birth=birth, at=utc_now())
        if command == "ping":
            return Response(command=command, birth=birth, at=utc_now())
        if command == "status":
            reported, snapshot = await self.reported(), await self.snapshot()
            return Response(command=command, birth=birth, at=utc_now(), reported=reported, snapshot=snapshot)
        return Response(
            command=command,
            error=f"unknown command {command!r}; known: ping, status",
            birth=birth,
            at=utc_now(),
        )
