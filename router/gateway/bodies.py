"""Request bodies: read within bounds of size and time, and of the memory that all of them together may take."""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.types import Receive

from router.base.errors import BodyShed
from router.base.timers import Interrupted, Interruptible
from router.gateway.deps import GatewayDeps, GatewayLimits
from router.gateway.errors import BodyTimeout, BodyTooLarge
from router.wire.headers import whole_number

SMALL_BODY_BYTES = 64 * 1024
"""Of each body so much has its room with the place of its request: chats go on while large documents have to wait."""


class ClientGone(Exception):
    """The client closed the connection before its request was complete. Nobody is left to answer."""


class BodyRoom:
    """The memory of a tier for bodies, beyond the small part that each has anyway.

    Attributes:
        most_of_one_bytes: that one of several callers may take, whose bodies may come slowly: a body of another fits.
        by_owner: what each of them has taken.
    """

    def __init__(self, limits: GatewayLimits) -> None:
        self.limit_bytes = max(limits.max_bodies_bytes, limits.max_body_bytes)
        self.most_of_one_bytes = max(self.limit_bytes - limits.max_body_bytes, limits.max_body_bytes)
        self.held_bytes = 0
        self.by_owner: Counter[str] = Counter()
        self.retry_after_s = limits.retry_after_s


class BodyShare:
    """What one request has taken of it.

    Args:
        owner: whose it is; empty where nobody tells callers apart.
    """

    __slots__ = ("_held_bytes", "_owner", "_room")

    def __init__(self, room: BodyRoom, owner: str = "") -> None:
        self._room = room
        self._owner = owner
        self._held_bytes = 0

    def grow(self, body_bytes: int) -> None:
        """Take what a body of so many bytes needs.

        Raises:
            BodyShed: other bodies take the room.
        """
        room = self._room
        more = body_bytes - SMALL_BODY_BYTES - self._held_bytes
        if more <= 0:
            return
        if room.held_bytes + more > room.limit_bytes:
            raise BodyShed(
                f"{room.held_bytes} of the {room.limit_bytes} bytes that this tier has for large request bodies are "
                "taken: send this one again later",
                retry_after_s=room.retry_after_s,
            )
        mine = room.by_owner[self._owner]
        if self._owner and mine + more > room.most_of_one_bytes:
            raise BodyShed(
                f"large request bodies of yours take {mine} bytes here, and may take {room.most_of_one_bytes}: send "
                "this one again later",
                retry_after_s=room.retry_after_s,
            )
        room.held_bytes += more
        room.by_owner[self._owner] += more
        self._held_bytes += more

    def release(self) -> None:
        """Give all of it back; most bodies are small, and have taken nothing."""
        if not self._held_bytes:
            return
        self._room.held_bytes -= self._held_bytes
        self._room.by_owner -= Counter({self._owner: self._held_bytes})  # keeps nobody who has nothing
        self._held_bytes = 0


def checked(body: bytes, limits: GatewayLimits, share: BodyShare) -> bytes:
    """Return a body that came with its head, once it has its room.

    Raises:
        BodyTooLarge: it is larger than the limit.
        BodyShed: bodies of others leave no room for it.
    """
    _check(len(body), limits, share)
    return body


async def read_body(receive: Receive, headers: dict[str, str], deps: GatewayDeps, share: BodyShare) -> bytes:
    """Read the whole body.

    Raises:
        BodyTooLarge: it is, or says it is, larger than the limit.
        BodyTimeout: it takes longer than the limit.
        BodyShed: bodies of others leave no room for it.
        ClientGone: the connection closed first.
    """
    limits = deps.limits
    length = headers.get("content-length", "0")
    if length.isdigit() and whole_number(length, limits.max_body_bytes) is None:
        raise _too_large(limits.max_body_bytes)
    timer: asyncio.TimerHandle | None = None
    try:
        with Interruptible() as block:
            timer = asyncio.get_running_loop().call_later(limits.body_timeout_s, block.interrupt)
            return await _read(receive, limits, share)
    except Interrupted:
        raise BodyTimeout(
            f"the request body did not arrive within {limits.body_timeout_s:g} s: send it faster, or a shorter one"
        ) from None
    finally:
        if timer is not None:
            timer.cancel()


async def _read(receive: Receive, limits: GatewayLimits, share: BodyShare) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        size += len(piece)
        _check(size, limits, share)
        if not message.get("more_body", False):
            return b"".join([*pieces, piece]) if pieces else piece  # the usual case: one message, no copy
        pieces.append(piece)


def _check(size: int, limits: GatewayLimits, share: BodyShare) -> None:
    if size > limits.max_body_bytes:
        raise _too_large(limits.max_body_bytes)
    share.grow(size)


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the request body is larger than the {limit_bytes} bytes that this tier reads: send a shorter prompt"
    )
