"""Answers `command` messages: `ping` and `status`, for `overspill fleet get --live`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from edge_agent.mqtt.connection import Message, Outgoing
from router.fleetwire.documents import BadDocument, Reported, Response, Snapshot, decode_command, encode, utc_now
from router.fleetwire.topics import Address

log = structlog.get_logger("edge_agent.fleet")

_MAX_CORRELATION_BYTES = 64
_ANSWER_EXPIRY_S = 30


class Dropped:
    """Tells of commands that were dropped: of the first, second, fourth, … for each reason. A flood fills no log."""

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()

    def __call__(self, why: str) -> None:
        """Count one."""
        self._times[why] += 1
        times = self._times[why]
        if times & (times - 1) == 0:
            log.warning("a command was dropped", why=why, times=times)


@dataclass(frozen=True, slots=True)
class Responder:
    """Turns a command into its answer.

    Attributes:
        dropped: to be called with the reason for each command that gets none.
    """

    address: Address
    reported: Callable[[], Awaitable[Reported]]
    snapshot: Callable[[], Awaitable[Snapshot]]
    dropped: Dropped = field(default_factory=Dropped)

    async def answer(self, message: Message, birth: int) -> Outgoing | None:
        """Return what to send; None where no answer may be sent.

        Answers go to this device's own `response` topic only: a requester must not make the device publish elsewhere.
        """
        topic = self.address.topic("response")
        correlation = message.correlation
        if message.response_topic != topic or not correlation or len(correlation) > _MAX_CORRELATION_BYTES:
            self.dropped(f"it has no correlation of at most 64 bytes, or another response topic than {topic}")
            return None
        if message.retained:
            self.dropped("it was retained, and could be any number of days old")
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
