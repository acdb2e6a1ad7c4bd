"""Pieces of answers are written at the end of a turn of the loop, each connection's in its order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from router.gateway.exchange import Exchange
from router.gateway.outbox import Outbox


@dataclass
class Transport:
    """Notes what is written, in one list for all connections."""

    name: str
    written: list[tuple[str, bytes]]
    closing: bool = False

    def write(self, piece: bytes) -> None:
        self.written.append((self.name, piece))

    def is_closing(self) -> bool:
        return self.closing


class Flow:
    write_paused = False


@dataclass
class Cycle:
    """What an exchange needs of uvicorn's."""

    transport: Transport
    flow: Flow = field(default_factory=Flow)
    scope: dict[str, Any] = field(default_factory=lambda: {"method": "POST"})
    default_headers: tuple[tuple[bytes, bytes], ...] = ()
    disconnected: bool = False
    response_started: bool = False
    response_complete: bool = False
    waiting_for_100_continue: bool = False
    keep_alive: bool = True
    message_event: asyncio.Event = field(default_factory=asyncio.Event)

    def on_response(self) -> None:
        """Its connection hears of its end."""


class Watched:
    def watch(self, gone: Any) -> None: ...

    def unwatch(self, gone: Any) -> None: ...


class Streams:
    """Answers that have begun, and what was written of them since."""

    def __init__(self) -> None:
        self.written: list[tuple[str, bytes]] = []
        self._outbox = Outbox()

    async def begin(self, name: str) -> tuple[Exchange, Cycle]:
        cycle = Cycle(Transport(name, self.written))
        exchange = Exchange(Watched(), cycle, self._outbox, plain=False)  # type: ignore[arg-type]
        await exchange.send({"type": "http.response.start", "status": 200, "headers": []})
        await exchange.send({"type": "http.response.body", "body": b"first", "more_body": True})
        self.written.clear()
        return exchange, cycle


async def test_pieces_of_one_turn_are_written_at_its_end_in_their_order() -> None:
    streams = Streams()
    (one, _), (other, _) = await streams.begin("one"), await streams.begin("other")
    one.write(b"a")
    other.write(b"b")
    one.write(b"c")
    assert streams.written == []
    await asyncio.sleep(0)
    assert streams.written == [("one", b"1\r\na\r\n1\r\nc\r\n"), ("other", b"1\r\nb\r\n")]
    other.write(b"d")
    await asyncio.sleep(0)
    assert streams.written[2:] == [("other", b"1\r\nd\r\n")]


async def test_the_end_of_an_answer_comes_behind_what_waits() -> None:
    streams = Streams()
    one, _ = await streams.begin("one")
    one.write(b"a")
    await one.send({"type": "http.response.body", "body": b"z"})
    assert b"".join(piece for _, piece in streams.written) == b"1\r\na\r\n1\r\nz\r\n0\r\n\r\n"
    await asyncio.sleep(0)
    assert len(streams.written) == 2


async def test_much_does_not_wait_so_that_the_client_is_seen_not_to_read() -> None:
    streams = Streams()
    one, _ = await streams.begin("one")
    one.write(b"x" * 70_000)
    assert len(streams.written) == 1


@pytest.mark.parametrize("how", ["gone", "closing"])
async def test_nothing_is_written_to_who_has_left_meanwhile(how: str) -> None:
    streams = Streams()
    (one, cycle), (other, _) = await streams.begin("one"), await streams.begin("other")
    one.write(b"a")
    other.write(b"b")
    if how == "gone":
        cycle.disconnected = True
    else:
        cycle.transport.closing = True
    await asyncio.sleep(0)
    assert streams.written == [("other", b"1\r\nb\r\n")]
