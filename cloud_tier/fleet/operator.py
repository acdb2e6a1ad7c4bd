"""An operator's view of a fleet: read a device, change what is desired of it and learn the outcome, ask, watch.

Two operators at once: MQTT has no compare-and-swap, so `propose` reads the retained document, publishes the next
version and watches what comes back. Of two documents with one version the device obeys the first that reaches it and
drops the other as a conflict; the digest in `reported` tells each operator which of them that was.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import secrets
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from cloud_tier.fleet.broker import BrokerAddress, BrokerConnection, BrokerError, Message, Request
from router.errors import ConfigError
from router.wire.fleet import (
    MAX_VERSION,
    Address,
    BadDocument,
    Command,
    DesiredConfig,
    DesiredRefused,
    Leaf,
    Reported,
    Response,
    Status,
    decode_as,
    decode_desired,
    digest_of,
    encode,
    newest_status,
    parse_topic,
    topic_filter,
)
from router.wire.overrides import edit

_SETTLE_S = 0.25
"""Retained messages may trail SUBACK by this much (mosquitto sends them at once, clustered brokers a little later)."""
_WATCHED: tuple[Leaf, ...] = ("desired", "reported", "status", "telemetry")
_RECONNECT_S = (1.0, 30.0)


@dataclass(slots=True)
class DeviceView:
    """What the broker keeps about one device.

    Attributes:
        desired_error: why the retained desired document cannot be read, empty if it can.
    """

    address: Address
    desired: DesiredConfig | None = None
    desired_error: str = ""
    reported: Reported | None = None
    status: Status | None = None

    def take(self, leaf: Leaf, payload: bytes) -> None:
        """Fold one message in; an unreadable `reported` or `status` is left out."""
        if leaf == "desired":
            self.desired, self.desired_error = None, ""
            try:
                self.desired = decode_desired(payload) if payload else None
            except DesiredRefused as error:
                self.desired_error = error.message
        with suppress(BadDocument):
            if leaf == "reported":
                self.reported = decode_as(payload, Reported) if payload else None
            elif leaf == "status":
                self.status = newest_status(self.status, decode_as(payload, Status)) if payload else None

    @property
    def online(self) -> bool:
        return self.status is not None and self.status.state == "online"

    @property
    def highest_version(self) -> int:
        """The highest version anyone is known to have used."""
        said = [self.desired.version if self.desired else 0]
        if self.reported is not None:
            said += [self.reported.version or 0, self.reported.applied_version or 0]
        return max(said)

    @property
    def base(self) -> dict[str, Any]:
        """The overrides a change begins from: those desired, unless the device refused them; then those in force."""
        reported = self.reported
        if reported is not None and reported.state == "refused":
            desired_version = self.desired.version if self.desired is not None else 0
            if reported.version is None or reported.version >= desired_version:
                return dict(reported.overrides)
        return self.desired.overrides if self.desired is not None else {}


OutcomeKind = Literal["applied", "refused", "conflict", "superseded", "timeout"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a desired document; `reason` is for people."""

    kind: OutcomeKind
    reason: str = ""
    key: str = ""
    reported: Reported | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A document, and whether it was published or was desired already."""

    desired: DesiredConfig
    published: bool
    view: DeviceView


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
    _listeners: list[asyncio.Queue[Message]] = field(default_factory=list)

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
        address = Address(self.fleet, device)
        view = DeviceView(address)
        with self._listen() as inbox:
            await self._follow(address)
            await asyncio.sleep(self.settle_s)
            while not inbox.empty():
                _fold(view, inbox.get_nowait())
        return view

    async def propose(
        self, device: str, edits: Mapping[str, Any], *, replace: bool = False, issued_by: str = ""
    ) -> Proposal:
        """Merge edits into what is desired and publish the next version, unless nothing would change.

        Args:
            edits: a tree as `edits.read_edits` makes it; None takes an override away.
            replace: begin from no overrides at all.

        Raises:
            ConfigError: the document would break the schema.
            BrokerError: the broker refuses or went away.
        """
        view = await self.view(device)
        overrides = edit({} if replace else view.base, edits)
        current = view.desired
        if current is not None and current.overrides == overrides and not _worth_repeating(view):
            return Proposal(current, published=False, view=view)
        if view.highest_version >= MAX_VERSION:
            raise ConfigError(f"device {device}: version {MAX_VERSION} is used up; remove the device's state_dir")
        desired = DesiredConfig(
            version=view.highest_version + 1,
            issued_at=dt.datetime.now(dt.timezone.utc),
            issued_by=issued_by[:128],
            **overrides,
        )
        payload = encode(desired)
        desired = decode_desired(payload)  # what the device will read, checked as strictly as it will
        await self._open().publish(view.address.topic("desired"), payload, retain=True)
        return Proposal(desired, published=True, view=view)

    async def outcome(self, device: str, desired: DesiredConfig, timeout_s: float) -> Outcome:
        """Wait until the device says what became of a document.

        Raises:
            BrokerError: the connection was lost.
        """
        address = Address(self.fleet, device)
        view = DeviceView(address)
        deadline_s = time.monotonic() + timeout_s
        with self._listen() as inbox:
            await self._follow(address)
            while True:
                message = await self._next(inbox, deadline_s - time.monotonic())
                if message is None:
                    return Outcome("timeout", _absence(view, desired, timeout_s), reported=view.reported)
                if _fold(view, message) == "reported" and view.reported is not None:
                    outcome = judge(desired, view.reported)
                    if outcome is not None:
                        return outcome

    async def ask(self, device: str, command: str, timeout_s: float = 5.0) -> Response:
        """Send a command and wait for the answer.

        Raises:
            BrokerError: no answer in time, or the connection was lost.
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
                    raise BrokerError(f"device {device} did not answer `{command}` within {timeout_s:g} s")
                if message.topic == response_topic and message.correlation == correlation:
                    try:
                        return decode_as(message.payload, Response)
                    except BadDocument as error:
                        raise BrokerError(f"device {device} answered `{command}` with garbage: {error}") from error

    async def watch(self, device: str | None = None) -> AsyncGenerator[Event, None]:
        """Yield what is retained, then everything as it comes, over as many connections as it takes."""
        wait_s = _RECONNECT_S[0]
        while True:
            try:
                with self._listen() as inbox:
                    if device is not None:
                        await self._follow(Address(self.fleet, device), _WATCHED)
                    else:
                        await self._open().subscribe(*(topic_filter(self.fleet, leaf) for leaf in _WATCHED))
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
        for inbox in self._listeners:
            inbox.put_nowait(message)

    @contextmanager
    def _listen(self) -> Generator[asyncio.Queue[Message], None, None]:
        inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._listeners.append(inbox)
        try:
            yield inbox
        finally:
            self._listeners.remove(inbox)

    async def _follow(self, address: Address, leaves: tuple[Leaf, ...] = ("desired", "reported", "status")) -> None:
        await self._open().subscribe(*(address.topic(leaf) for leaf in leaves))
        # A second round trip: what was retained under the first subscription is on this side of its answer.
        await self._open().subscribe(address.topic("response"))

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


def judge(desired: DesiredConfig, reported: Reported) -> Outcome | None:
    """Return what a report says about a document; None if it does not settle the matter yet."""
    digest = digest_of(desired)
    if reported.applied_digest == digest:
        return Outcome("applied", reported=reported)
    if reported.digest == digest:
        if reported.state != "refused":
            return None
        lost = reported.applied_version == desired.version
        return Outcome("conflict" if lost else "refused", reported.reason, reported.key, reported)
    if reported.version == desired.version:
        reason = f"another operator published version {desired.version} at the same time, and it came first"
        return Outcome("conflict", reason, reported=reported)
    newest = max(reported.version or 0, reported.applied_version or 0)
    if newest > desired.version:
        return Outcome("superseded", f"the device is already at version {newest}", reported=reported)
    return None


def _worth_repeating(view: DeviceView) -> bool:
    """Whether publishing the same overrides as a new version can change anything."""
    reported, desired = view.reported, view.desired
    if reported is None or desired is None:
        return False
    return reported.state == "refused" or view.highest_version > desired.version


def _fold(view: DeviceView, message: Message) -> Leaf | None:
    parsed = parse_topic(message.topic)
    if parsed is None or parsed[0] != view.address:
        return None
    view.take(parsed[1], message.payload)
    return parsed[1]


def _absence(view: DeviceView, desired: DesiredConfig, timeout_s: float) -> str:
    waited = f"no word about version {desired.version} within {timeout_s:g} s"
    if view.status is None:
        return f"{waited}: no device of this name has ever connected; the document waits for it at the broker"
    if not view.online:
        return f"{waited}: the device is offline since {view.status.at}; it will read the document when it is back"
    if view.reported is not None and view.reported.state == "applying":
        return f"{waited}: the device is still applying it"
    return f"{waited}, although the device is online"
