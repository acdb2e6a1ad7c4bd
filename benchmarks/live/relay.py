"""A TCP relay that behaves as a mobile link: delay, jitter, cuts, and where nobody else shapes it, bandwidth.

Order is kept within a connection, as TCP keeps it. During a cut nothing passes and nothing breaks: what was sent comes
after it, as with a radio that is out of reach for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass
from types import TracebackType

from router.simulation.network import Bandwidth

_READ_BYTES = 16_384


@dataclass(frozen=True)
class LinkShape:
    """A link over time.

    Attributes:
        name: what to call it in results.
        up, down: bandwidth in each direction.
        rtt_s: round trip of the least packet, half of it each way.
        jitter: standard deviation of the log of a piece's delay.
        cuts_s: (from, to) in seconds from the beginning.
        source: where the figures come from.
    """

    name: str
    up: Bandwidth
    down: Bandwidth
    rtt_s: float = 0.06
    jitter: float = 0.2
    cuts_s: tuple[tuple[float, float], ...] = ()
    source: str = ""


class Passage:
    """When a piece of data that enters one direction of the link has left it; pure but for the dice.

    Args:
        bandwidth: None where somebody else shapes it.
    """

    def __init__(self, shape: LinkShape, bandwidth: Bandwidth | None, seed: int) -> None:
        self._shape = shape
        self._bandwidth = bandwidth
        self._dice = random.Random(seed)  # noqa: S311
        self._free_s = 0.0

    def leaves_s(self, now_s: float, size_bytes: int) -> float:
        """Return when a piece that enters at `now_s` is out, in seconds from the link's beginning."""
        begins_s = now_s
        for from_s, to_s in self._shape.cuts_s:
            if from_s <= begins_s < to_s:
                begins_s = to_s
        if self._bandwidth is not None:
            self._free_s = self._bandwidth.end_s(max(begins_s, self._free_s), 8.0 * size_bytes)
            begins_s = self._free_s
        delay_s = self._shape.rtt_s / 2 * self._dice.lognormvariate(0.0, self._shape.jitter)
        return begins_s + delay_s


class Relay:
    """Use as `async with`: listens on a free loopback port and passes connections on; `follow` sets the link.

    Args:
        shape_bandwidth: take the bandwidth from the shape too, for want of a kernel that does it.
    """

    def __init__(self, host: str, port: int, *, shape_bandwidth: bool) -> None:
        self._to = (host, port)
        self._shape_bandwidth = shape_bandwidth
        self._ways: tuple[Passage, Passage] | None = None
        self._server: asyncio.Server | None = None
        self._began_s = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def follow(self, shape: LinkShape | None) -> None:
        """Be that link from now on, from its beginning; None passes everything on at once."""
        self._began_s = time.monotonic()
        if shape is None:
            self._ways = None
            return
        up, down = (shape.up, shape.down) if self._shape_bandwidth else (None, None)
        self._ways = Passage(shape, up, 1), Passage(shape, down, 2)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            there_reader, there_writer = await asyncio.wait_for(asyncio.open_connection(*self._to), 30)
        except (OSError, asyncio.TimeoutError):
            writer.close()
            return
        ways = [
            asyncio.ensure_future(self._pass(reader, there_writer, 0)),
            asyncio.ensure_future(self._pass(there_reader, writer, 1)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:  # a side that is gone is gone for the other one too: both tiers close whole connections
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for side in (writer, there_writer):
                with contextlib.suppress(OSError):
                    side.close()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: int) -> None:
        """Read as it comes and write as it leaves: what is under way does not hold up what follows."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1024)
        writing = asyncio.ensure_future(_write(pieces, sink))
        out_s = 0.0
        try:
            while data := await source.read(_READ_BYTES):
                out_s = max(self._leaves_s(way, len(data)), out_s)
                await pieces.put((out_s, data))
            await pieces.put((out_s, b""))
            await writing
        except OSError:
            return
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def _leaves_s(self, way: int, size_bytes: int) -> float:
        """Return when a piece is out, by the system's monotonic clock."""
        now_s = time.monotonic()
        if self._ways is None:
            return now_s
        return self._began_s + self._ways[way].leaves_s(now_s - self._began_s, size_bytes)


async def _write(pieces: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
    while True:
        due_s, data = await pieces.get()
        wait_s = due_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        if not data:
            return
        sink.write(data)
        await sink.drain()
