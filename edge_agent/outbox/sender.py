"""Carries outbox rows to the broker: a window of publishes in flight, and a row leaves only after its PUBACK."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import structlog

from edge_agent.mqtt.connection import Connection, ConnectionEnded, Outgoing, PublishRefused
from edge_agent.outbox.outbox import Outbox, OutboxStats, Row

log = structlog.get_logger("edge_agent.fleet")

R = TypeVar("R")

_HOPELESS = frozenset({0x87, 0x90, 0x95, 0x99})
"""Not authorised, topic name invalid, packet too large, payload format invalid: sending again changes nothing."""
_RESEND_AFTER_S = 15.0
_HEADER_BYTES = 256


@dataclass(slots=True)
class OutboxSender:
    """Owns the outbox's thread.

    Attributes:
        stats: what waited after the last change.
        refused: telemetry rows dropped because the broker would never take them.
    """

    outbox: Outbox
    stats: OutboxStats = field(default_factory=OutboxStats)
    refused: int = 0
    _disk: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix="fleet-outbox")
    )
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _in_flight: dict[str, Row] = field(default_factory=dict)
    _settled: list[Row] = field(default_factory=list)

    async def open(self) -> None:
        self.stats = await self._on_disk(partial(_then_count, self.outbox, self.outbox.open))

    async def close(self) -> None:
        await self._on_disk(self.outbox.close)
        self._disk.shutdown(wait=False)

    async def put(self, row: Row) -> None:
        self.stats = await self._on_disk(partial(_then_count, self.outbox, partial(self.outbox.put, row)))
        self._wake.set()

    async def run(self, connection: Connection) -> None:
        """Send until the connection ends or the task is cancelled. Rows in flight then are sent again next time."""
        self._in_flight.clear()
        self._settled.clear()
        while not connection.ended.done():
            self._wake.clear()
            room = connection.window - len(self._in_flight)
            if room > 0:
                taken = tuple(self._in_flight)
                for row in await self._on_disk(partial(self.outbox.pending, room, taken)):
                    self._send(connection, row)
            await self._wake.wait()
            settled, self._settled = self._settled, []
            if settled:
                self.stats = await self._on_disk(partial(_then_count, self.outbox, partial(self.outbox.ack, settled)))
                for row in settled:
                    self._in_flight.pop(row.key, None)

    def _send(self, connection: Connection, row: Row) -> None:
        self._in_flight[row.key] = row
        limit = connection.max_packet_bytes
        if limit is not None and len(row.payload) + len(row.topic) + _HEADER_BYTES > limit:
            self._refused(row, PublishRefused(0x95, "Packet too large"))
            return
        sent = connection.publish(Outgoing(row.topic, row.payload, retain=row.retain, key=row.key))
        sent.add_done_callback(lambda future: self._answered(row, future))

    def _answered(self, row: Row, answer: asyncio.Future[None]) -> None:
        error = None if answer.cancelled() else answer.exception()
        if isinstance(error, PublishRefused):
            self._refused(row, error)
        elif isinstance(error, ConnectionEnded) or answer.cancelled():
            self._wake.set()
        else:
            self._settled.append(row)
            self._wake.set()

    def _refused(self, row: Row, error: PublishRefused) -> None:
        if row.kind == "telemetry" and error.code in _HOPELESS:
            if self.refused == 0:
                log.error("the broker refuses telemetry; such rows are dropped", topic=row.topic, reason=str(error))
            self.refused += 1
            self._settled.append(row)
            self._wake.set()
            return
        log.warning("the broker refused a message; it stays and is sent again", topic=row.topic, reason=str(error))
        asyncio.get_running_loop().call_later(_RESEND_AFTER_S, self._release, row)

    def _release(self, row: Row) -> None:
        self._in_flight.pop(row.key, None)
        self._wake.set()

    async def _on_disk(self, call: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._disk, call)


def _then_count(outbox: Outbox, change: Callable[[], object]) -> OutboxStats:
    change()
    return outbox.stats()
