"""An operator's connection to a fleet: read devices, change what is desired of one and learn the outcome, ask, watch.

Two operators at once: MQTT has no compare-and-swap, so `propose` reads the retained document, publishes the next
version and watches what comes back. Of two documents with one version the device obeys the first that reaches it and
drops the other as a conflict; the digest in `reported` tells each operator which of them that was.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from cloud_tier.fleet.broker import BrokerAddress, BrokerConnection, BrokerError, Message, Request
from cloud_tier.fleet.survey import Survey
from cloud_tier.fleet.view import DeviceView, Outcome, Proposal, draft
from router.fleetwire.documents import BadDocument, Command, DesiredConfig, Response, decode_as, encode
from router.fleetwire.topics import Address, Leaf, parse_topic, topic_filter

_SETTLE_S = 0.25
"""Retained messages may trail SUBACK by this much (mosquitto sends them at once, clustered brokers a little later)."""
_A_FEW = 16
_DRAINED_S = 0.05
"""More than a few messages of one kind come in one go: after a pause this long the next kind is asked for."""
_KEPT: tuple[Leaf, ...] = ("desired", "reported", "status")
_WATCHED: tuple[Leaf, ...] = (*_KEPT, "telemetry")
_RECONNECT_S = (1.0, 30.0)
_TOPICS_A_SUBSCRIPTION = 100
_LARGE = 500
"""A broker may queue only so many retained messages for one subscriber (mosquitto by default about 1,000), and drops
the rest without a word: from this many on, they are counted twice."""


class NoAnswer(BrokerError):
    """The device did not answer a command in time."""


@dataclass(frozen=True, slots=True)
class Event:
    """One message of the fleet."""

    address: Address
    leaf: Leaf
    payload: bytes
    retained: bool


@dataclass(slots=True)
class FleetOperator:
    """Lifetime: `async with`. One connection to one fleet."""

    broker: BrokerAddress
    fleet: str = "default"
    settle_s: float = _SETTLE_S
    _connection: BrokerConnection | None = None
    _listeners: list[Callable[[Message], None]] = field(default_factory=list)

    async def __aenter__(self) -> FleetOperator:
        """Connect.

        Raises:
            BrokerError: no broker, or it refuses.
            ConfigError: a certificate cannot be used.
        """
        self._connection = await BrokerConnection(self.broker, self._on_message).__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            await self._connection.__aexit__()
            self._connection = None

    async def view(self, device: str) -> DeviceView:
        """Read what is retained about a device.

        Raises:
            BrokerError: the broker refuses or went away.
        """
        async with self.survey([device]) as survey:
            return survey.view(device)

    async def propose(
        self,
        device: str,
        edits: Mapping[str, Any],
        *,
        replace: bool = False,
        issued_by: str = "",
        begins: Callable[[Proposal], None] = lambda _: None,
    ) -> Proposal:
        """Merge edits into what is desired and publish the next version, unless nothing would change.

        Args:
            edits: a tree as `edits.read_edits` makes it; None takes an override away.
            replace: begin from no overrides at all.
            begins: told of the document before it is published: a device may have it before the broker says so.

        Raises:
            ConfigError: the document would break the schema.
            BrokerError: the broker refuses or went away.
        """
        proposal = draft(await self.view(device), edits, replace=replace, issued_by=issued_by)
        begins(proposal)
        await self.publish(proposal)
        return proposal

    async def publish(self, proposal: Proposal) -> None:
        """Make a document the one that is desired, unless it is already.

        Raises:
            BrokerError: the broker refuses or went away.
        """
        if proposal.fresh:
            topic = proposal.view.address.topic("desired")
            await self._open().publish(topic, encode(proposal.desired), retain=True)

    async def forget(self, view: DeviceView) -> None:
        """Clear every message that the broker keeps about a device, the document that waits for it first.

        Raises:
            BrokerError: the broker refuses or went away.
        """
        for leaf in _KEPT:
            await self._open().publish(view.address.topic(leaf), b"", retain=True)

    @asynccontextmanager
    async def survey(self, devices: Sequence[str] | None = None) -> AsyncGenerator[Survey, None]:
        """Read many devices, all of the fleet if none are named; the survey stays up to date while it is open.

        Raises:
            BrokerError: the broker refuses, went away, or keeps more messages than it is willing to send at once.
            ConfigError: a name is not valid.
        """
        survey = Survey(self.fleet, self._open().lost, devices)
        self._listeners.append(survey.take)
        try:
            if devices is not None:
                await self._read_named(survey, devices)
            else:
                await self._read_all(survey)
            yield survey
        finally:
            self._listeners.remove(survey.take)

    async def _read_named(self, survey: Survey, devices: Sequence[str]) -> None:
        topics = [Address(self.fleet, device).topic(leaf) for device in devices for leaf in _KEPT]
        for begin in range(0, len(topics), _TOPICS_A_SUBSCRIPTION):
            await self._open().subscribe(*topics[begin : begin + _TOPICS_A_SUBSCRIPTION])
        if topics:  # a round trip more: what was retained is on this side of its answer
            await self._open().subscribe(topics[-1], retained=False)
        if not survey.has_all_of(_KEPT):  # something may trail, or there is nothing to come
            await survey.settled(self.settle_s)

    async def _read_all(self, survey: Survey) -> None:
        """Read the whole fleet: once, and what is kept of many devices a second time in another way, to count it."""
        topics = {leaf: topic_filter(self.fleet, leaf) for leaf in _KEPT}
        for leaf, topic in topics.items():  # one after the other: each may fill what the broker queues for a subscriber
            await self._open().subscribe(topic)
            if survey.read(leaf) >= _A_FEW:
                await survey.settled(_DRAINED_S)
        await survey.settled(self.settle_s)
        for leaf, topic in topics.items():
            if survey.read(leaf) >= _LARGE:
                await self._count_again(survey, leaf, topic)

    async def _count_again(self, survey: Survey, leaf: Leaf, topic: str) -> None:
        read = survey.read(leaf)
        await self._open().subscribe(topic, qos=0)  # queued in another way, so cut off at another point
        await survey.settled(self.settle_s)
        if survey.read(leaf) > read:
            raise BrokerError(
                f"the broker keeps `{leaf}` of more devices than the {read} it sent: it drops what it cannot queue for "
                "one subscriber; raise its limit (mosquitto: max_queued_messages and max_queued_bytes, docs/fleet.md)"
            )
        await self._open().subscribe(topic, retained=False)  # what comes from now on is acknowledged again

    async def outcome(self, device: str, desired: DesiredConfig, timeout_s: float) -> Outcome:
        """Wait until the device says what became of a document.

        Raises:
            BrokerError: the connection was lost.
        """
        async with self.survey([device]) as survey:
            return await survey.outcome(device, desired, timeout_s)

    async def ask(self, device: str, command: str, timeout_s: float = 5.0) -> Response:
        """Send a command and wait for the answer.

        Raises:
            NoAnswer: none came in time, or nobody could understand it.
            BrokerError: the broker refuses or went away.
        """
        address = Address(self.fleet, device)
        correlation = secrets.token_bytes(16)
        deadline_s = time.monotonic() + timeout_s
        response_topic = address.topic("response")
        with self._listen() as inbox:
            await self._open().subscribe(response_topic)
            request = Request(response_topic, correlation, expiry_s=max(1, int(timeout_s)))
            await self._open().publish(address.topic("command"), encode(Command(command=command)), request=request)
            while True:
                message = await self._next(inbox, deadline_s - time.monotonic())
                if message is None:
                    raise NoAnswer(f"device {device} did not answer `{command}` within {timeout_s:g} s")
                if message.topic == response_topic and message.correlation == correlation:
                    try:
                        return decode_as(message.payload, Response)
                    except BadDocument as error:
                        raise NoAnswer(f"device {device} answered `{command}` with garbage: {error}") from error

    async def watch(self, device: str | None = None) -> AsyncGenerator[Event, None]:
        """Yield what is retained, then everything as it comes, over as many connections as it takes."""
        wait_s = _RECONNECT_S[0]
        while True:
            try:
                with self._listen() as inbox:
                    if device is not None:
                        topics = [Address(self.fleet, device).topic(leaf) for leaf in _WATCHED]
                    else:
                        topics = [topic_filter(self.fleet, leaf) for leaf in _WATCHED]
                    await self._open().subscribe(*topics)
                    wait_s = _RECONNECT_S[0]
                    while True:
                        message = await self._next(inbox, None)
                        parsed = parse_topic(message.topic) if message is not None else None
                        if message is not None and parsed is not None:
                            yield Event(*parsed, message.payload, message.retained)
            except BrokerError:  # noqa: PERF203 - a lost connection, not a hot loop
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _RECONNECT_S[1])
                with suppress(BrokerError):
                    await self.__aexit__()
                    await self.__aenter__()

    def _open(self) -> BrokerConnection:
        if self._connection is None:
            raise BrokerError("not connected to the broker")
        return self._connection

    def _on_message(self, message: Message) -> None:
        for listener in self._listeners:
            listener(message)

    @contextmanager
    def _listen(self) -> Generator[asyncio.Queue[Message], None, None]:
        inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._listeners.append(inbox.put_nowait)
        try:
            yield inbox
        finally:
            self._listeners.remove(inbox.put_nowait)

    async def _next(self, inbox: asyncio.Queue[Message], timeout_s: float | None) -> Message | None:
        """Return the next message, None after the time is over.

        Raises:
            BrokerError: the connection was lost meanwhile.
        """
        getting = asyncio.ensure_future(inbox.get())
        lost = self._open().lost
        either: set[asyncio.Future[Any]] = {getting, lost}
        limit_s = None if timeout_s is None else max(0.0, timeout_s)
        try:
            await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
        if lost.done():
            raise BrokerError(f"the connection to the broker was lost: {lost.result()}")
        return None
