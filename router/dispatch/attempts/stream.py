"""The chunks of one attempt: a task of its own reads the replica, and no reader ever waits for longer than it said."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog
from msgspec.structs import replace

from router.base.alarms import Alarms
from router.base.clock import Clock
from router.values.chunk import TokenChunk
from router.values.replica import Give, Replica, ReplicaInfo, pushes
from router.values.request import InferenceRequest

log = structlog.get_logger("router")

# Of what comes before anybody asks for it, so many chunks stay as they are; text after that is joined to pieces, of
# which there may be as many again: then the replica waits. Where nothing can be joined, it waits before.
_AHEAD_CHUNKS = 64
_PIECE_CHARS = 4096
_LET_GO_S = 5.0  # for a cancelled replica to end; one that does not is left behind


class Addressed(Protocol):
    """What was sent to a replica."""

    replica: Replica
    held_back: bool
    """The replica had to wait for its reader."""

    def opens(self) -> None:
        """The replica has it from now on."""
        ...

    @property
    def info(self) -> ReplicaInfo:
        """The replica's description."""
        ...


@dataclass(slots=True)
class Unaccounted:
    """Something sent to a replica that nobody counts as load: a request of this tier's own."""

    replica: Replica
    held_back: bool = False

    def opens(self) -> None:
        """Nobody counts it."""

    @property
    def info(self) -> ReplicaInfo:
        return self.replica.info


class Elapsed(Exception):
    """Nothing came in time. Never leaves this package."""


class AttemptStream:
    """Use as `async with`: it begins at once, and its end cancels what still runs on the replica.

    The reader waits on a future, the replica is read by a task. So a replica that ignores being cancelled can not hold
    its reader, a cancelled reader never loses its cancellation to a result, and a chunk costs no task and no timer.
    Text of a replica that `Pushes` wakes neither of them, where the reader has left word whom to give it. From `follow`
    on, chunks are counted as they come, and the end is told as it comes, wherever the reader is by then.
    """

    def __init__(self, attempt: Addressed, request: InferenceRequest, clock: Clock, alarms: Alarms) -> None:
        self._attempt = attempt
        self._request = request
        self._clock = clock
        self._alarms = alarms
        self._deadline = alarms.deadline(self._rang)
        self._chunks: deque[TokenChunk] = deque()
        self._error: Exception | None = None
        self._bug: Exception | None = None
        self._take: Give | None = None
        self._arrived: Callable[[TokenChunk], TokenChunk | None] | None = None
        self._over: Callable[[], None] | None = None
        self._due: Callable[[], None] | None = None
        self._ended = False
        self._reader: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AttemptStream:
        name = f"attempt {self._request.request_id} on {self._attempt.info.replica_id}"
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._read_replica(), name=name)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._deadline.cancel()
        self._take = None
        if self._ending is not None:
            await asyncio.shield(self._ending)
        elif not self._task.done():
            await self._end_task()
        self._arrived = self._over = self._due = None  # they hold who holds this

    @property
    def ready(self) -> bool:
        """Text, or the end with everything given back, is here already: handing it on waits for nothing."""
        for chunk in self._chunks:
            if self._task.done() if chunk.finish_reason else chunk.text or chunk.output or chunk.reasoning:
                return True
        return False

    def follow(
        self,
        arrived: Callable[[TokenChunk], TokenChunk | None],
        over: Callable[[], None],
        due: Callable[[], None],
    ) -> None:
        """From now on each chunk goes through `arrived` as it comes, those that have come already do now.

        Args:
            arrived: returns what its reader is to get, None for nothing. What it raises is raised by the reader.
            over: called once the replica has ended, whether or not anybody reads.
            due: called when the time has come that a reader waited until last, and nobody waits any more.
        """
        self._arrived, self._over, self._due = arrived, over, due
        came, self._chunks = self._chunks, deque()
        for chunk in came:
            self._put(chunk)
        if self._ended:
            self._tell_over()

    @property
    def waits_for_reader(self) -> bool:
        """As much as may be is unread, and the replica waits until the reader has come."""
        return self._room is not None

    @property
    def whole(self) -> bool:
        """The replica has ended its stream, or said the last word of it."""
        return self._task.done() or bool(self._chunks and self._chunks[-1].finish_reason is not None)

    def stop(self, freed: Callable[[], None]) -> None:
        """Cancel the work on the replica now, whether or not anybody reads: what has come can still be read.

        Args:
            freed: called when the replica has let go, or has not within bounds.
        """
        if self._task.done():
            freed()
        elif self._ending is None:
            name = f"end of attempt {self._request.request_id} on {self._attempt.info.replica_id}"
            self._ending = asyncio.create_task(self._end_task(), name=name)
            self._ending.add_done_callback(lambda _: freed())
            self._wake_reader()

    @property
    def quiet(self) -> bool:
        """Nothing has come, and it has not ended."""
        return not self._chunks and not self._ended and self._ending is None

    def news(self, due_s: float, take: Give | None = None) -> asyncio.Future[None]:
        """Return what is done when something is there, or nothing will be, or `due_s` of the tier's clock has come.

        Args:
            take: is given the text that comes until then, and may take it: the wait goes on. What it raises is raised
                by the reader.
        """
        self._reader = reader = self._loop.create_future()
        if self.quiet:
            self._take = take
            self._deadline.move(due_s)
        else:
            reader.set_result(None)
        return reader

    def wait_until(self, due_s: float) -> None:
        """Let the wait that goes on end at another time."""
        self._deadline.move(due_s)

    def pop(self) -> TokenChunk | None:
        """Return the next chunk if it is here already."""
        if self._bug is not None:
            raise self._bug
        if not self._chunks:
            return None
        if self._room is not None:
            self._make_room()
        return self._chunks.popleft()

    def take(self) -> TokenChunk:
        """Return the next chunk; raises as `next` does where it is not here."""
        chunk = self.pop()
        if chunk is not None:
            return chunk
        if self._error is not None:
            raise self._error
        if self._ended:
            raise StopAsyncIteration
        raise Elapsed

    async def next(self, due_s: float) -> TokenChunk:
        """Return the next chunk.

        Args:
            due_s: on the tier's clock; infinity for no bound.

        Raises:
            Elapsed: none came by then, or none will since the work was stopped.
            StopAsyncIteration: the replica ended its stream.
            Exception: what the replica raised, after the chunks that came before it.
        """
        await self.news(due_s)
        return self.take()

    async def _read_replica(self) -> None:
        self._attempt.opens()
        whole = False
        try:
            async with contextlib.aclosing(self._generate()) as chunks:
                async for chunk in chunks:
                    self._put(chunk)
                    if chunk.finish_reason is not None:
                        whole = True
                        break
                    while self._full:
                        self._attempt.held_back = True
                        self._room = self._loop.create_future()
                        await self._room
        except Exception as error:  # the boundary to a replica: handed to the reader, who knows what it means
            if self._chunks and self._chunks[-1].finish_reason is not None:
                log.exception("replica crashed while closing", replica=self._attempt.info.replica_id)
            self._error = error
        finally:
            self._ended = True
            if whole or self._reader is None or self._reader.done():  # a reader who waits for it first says what broke
                self._tell_over()
            self._wake_reader()

    def _put(self, chunk: TokenChunk) -> None:
        """Keep a chunk for the reader, and wake it."""
        chunks = self._chunks
        if self._arrived is None:
            chunks.append(chunk)
            self._wake_reader()
            return
        try:
            arrived = self._arrived(chunk)
        except Exception as bug:  # noqa: BLE001 - of this side, not of the replica: the reader raises it
            self._bug = bug
            self._wake_reader()
            return
        if arrived is None:
            return
        joined = _joined(chunks[-1], arrived) if len(chunks) >= _AHEAD_CHUNKS else None
        if joined is None:
            chunks.append(arrived)
        else:
            chunks[-1] = joined
        self._wake_reader()

    @property
    def _full(self) -> bool:
        """Nothing more is to be read before the reader has come."""
        chunks = self._chunks
        if len(chunks) < _AHEAD_CHUNKS:
            return False
        return self._arrived is None or len(chunks) >= 2 * _AHEAD_CHUNKS or not _joins(chunks[-1])

    def _tell_over(self) -> None:
        over, self._over = self._over, None
        if over is None:
            return
        try:
            over()
        except Exception as bug:  # noqa: BLE001 - as in `_put`
            self._bug = bug

    def _generate(self) -> AsyncGenerator[TokenChunk, None]:
        replica, request = self._attempt.replica, self._request
        pushing = pushes(replica)
        return replica.generate(request) if pushing is None else pushing.push(request, self._give)

    def _give(self, chunks: list[TokenChunk]) -> bool:
        """Give text to whom the reader named, while that waits; returns whether it was taken."""
        take, reader = self._take, self._reader
        if take is None or reader is None or reader.done():
            return False
        try:
            return take(chunks)
        except Exception as bug:  # noqa: BLE001 - of this side, not of the replica: the reader raises it
            self._bug = bug
            self._wake_reader()
            return True

    def _rang(self) -> None:
        """The time has come that a reader waited until: it hears of it, or, while it is away, who follows does."""
        if self._reader is not None and not self._reader.done():
            self._wake_reader()
        elif self._due is not None and not self._ended and self._ending is None:
            self._due()

    def _make_room(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _wake_reader(self) -> None:
        self._take = None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _end_task(self) -> None:
        """Cancel the work on the replica and wait until it has let go, within bounds."""
        names = {"replica": self._attempt.info.replica_id, "request_id": self._request.request_id}
        bell: asyncio.Future[None] = self._loop.create_future()
        alarm = self._alarms.set(
            self._clock.now_s() + _LET_GO_S, lambda: None if bell.done() else bell.set_result(None)
        )
        self._task.cancel()
        try:
            await asyncio.wait({self._task, bell}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            alarm.cancel()
        if not self._task.done():
            self._task.cancel()
            log.error("replica does not let go of a cancelled request", **names)
        elif self._error is not None and not self._task.cancelled():
            log.warning("replica crashed while closing", error=repr(self._error), **names)


def _joins(chunk: TokenChunk) -> bool:
    """Whether others can be joined to a chunk: it is no more than text."""
    return chunk.is_text and not (chunk.reasoning or chunk.logprobs or chunk.prompt_logprobs)


def _joined(last: TokenChunk, chunk: TokenChunk) -> TokenChunk | None:
    """Return two chunks of text as one, None where they stay two."""
    if len(last.text) + len(chunk.text) > _PIECE_CHARS or not (_joins(last) and _joins(chunk)):
        return None
    return replace(last, text=last.text + chunk.text, tokens=last.tokens + chunk.tokens)
