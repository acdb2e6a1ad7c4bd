"""The device's side of the fleet: one task that stays connected, and a few that speak and listen while it is.

`async with FleetSession(...)` returns at once, broker or not: the last good configuration is in force again, and the
session connects in the background, for as long as it takes. Nothing that the broker or an operator sends can end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from edge_agent.fleet.commands import Responder
from edge_agent.fleet.configurator import ApplyDesired, Configurator, Standing
from edge_agent.fleet.description import Describe, SelfDescription, TakeSnapshot
from edge_agent.fleet.state import StateDir
from edge_agent.fleet.takeover import Overwritten, TakeoverGuard
from edge_agent.fleet.tasks import first, keep_going
from edge_agent.mqtt.backoff import Backoff
from edge_agent.mqtt.config import FleetConfig
from edge_agent.mqtt.connection import Connection, ConnectionEnded, End, Message, Outgoing, PublishRefused, Will
from edge_agent.mqtt.ways import Ways
from edge_agent.outbox.outbox import Outbox, OutboxStats, Row
from edge_agent.outbox.sender import OutboxSender
from router.base import timers
from router.base.clock import Clock, MonotonicClock
from router.base.errors import ConfigError
from router.fleetwire.documents import BadDocument, Status, Telemetry, decode_as, encode, utc_now

log = structlog.get_logger("edge_agent.fleet")

_DESIRED_BACKLOG = 16
_COMMAND_BACKLOG = 64
_GOODBYE_S = 2.0
_RESTART_S = 1.0
_REPORT_AGAIN_S = 3600.0  # not every broker tells a device that its retained `reported` was cleared


class _NameTaken(Exception):
    """Another agent holds this device's name at the broker."""


class FleetSession:
    """Lifetime: `async with`. All methods are for the event loop it was entered on."""

    def __init__(
        self,
        config: FleetConfig,
        *,
        apply: ApplyDesired,
        describe: Describe,
        telemetry: TakeSnapshot,
        ready: Callable[[], Awaitable[None]] | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            apply: puts a desired document into force as a whole, or raises `ConfigError` and changes nothing.
            describe: content of `reported`; called after each change and on each connection.
            telemetry: a snapshot of load and health; called every `telemetry_interval_s`.
            ready: awaited once, when the stored overrides are in force and before the broker is asked for newer ones.

        Raises:
            ConfigError: the device has no valid name.
        """
        self.config = config
        self.address = config.address()
        self.connected = False
        self._ready = ready
        self._clock: Clock = clock or MonotonicClock()
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not secrets
        self._life = uuid.uuid4().hex
        self._birth = 0
        self._takeover_guard = TakeoverGuard(self._life)
        self._overwritten = Overwritten(self._announce_again)
        self._replaced = Overwritten(self._report_soon, "a report of somebody else was overwritten")
        self._reported = b""
        self._watches_report = True
        self._samples = 0
        self._reports = 0
        self._state = StateDir(config.state_path())
        outbox = Outbox(config.state_path() / "outbox.db", config.outbox_max_rows, config.outbox_max_bytes)
        self._sender = OutboxSender(outbox)
        self._configurator = Configurator(apply, self._state, config.apply_timeout_s, self.report)
        self._description = SelfDescription(describe, telemetry, lambda: self._configurator.standing)
        self._responder = Responder(
            self.address, lambda: self._description.reported(self._birth), self._description.snapshot
        )
        self._backoff = Backoff(config.reconnect_min_s, config.reconnect_max_s, config.takeover_min_s, self._rng)
        self._ways = Ways(config.host)
        self._connection: Connection | None = None
        self._desired: deque[bytes] = deque(maxlen=_DESIRED_BACKLOG)
        self._desired_came = asyncio.Event()
        self._commands: asyncio.Queue[Message] = asyncio.Queue(_COMMAND_BACKLOG)
        self._closing = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._started_s = 0.0
        self._report_again_s = 0.0

    async def __aenter__(self) -> FleetSession:
        """Restore the last good configuration and begin to connect; does nothing at all when not enabled.

        Raises:
            ConfigError: the state folder cannot be used, or a password or certificate cannot be read.
            Exception: whatever `ready` raises.
        """
        if not self.config.enabled:
            return self
        self.config.password()
        if self.config.tls is not None:
            self.config.tls.context()
        self._started_s = self._clock.now_s()
        self._state.open()
        try:
            await self._sender.open()
            await self._configurator.restore()
            if self._ready is not None:
                await self._ready()
        except BaseException:
            await self._sender.close()
            self._state.close()
            raise
        for name, work in (
            ("connect", self._stay_connected),
            ("desired", self._obey),
            ("save", self._configurator.keep_saving),
            ("commands", self._answer),
            ("telemetry", self._sample),
        ):
            self._tasks.append(asyncio.create_task(keep_going(work, name), name=f"fleet-{name}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Say goodbye if there is anyone to say it to, and stop. Takes at most a few seconds, broker or not."""
        if not self._tasks:
            return
        self._closing.set()
        self._overwritten.close()
        self._replaced.close()
        connect, *others = self._tasks
        await timers.end(*others)
        await asyncio.wait({connect}, timeout=3 * _GOODBYE_S)
        await timers.end(connect)
        self._tasks.clear()
        await self._sender.close()
        self._state.close()

    @property
    def standing(self) -> Standing:
        """What became of the document handled last, and the version in force."""
        return self._configurator.standing

    @property
    def notices(self) -> tuple[str, ...]:
        """What an operator should know: privacy that is held, and what a restart would lose."""
        standing = self.standing
        return tuple(notice for notice in (standing.privacy_held, standing.volatile) if notice)

    @property
    def outbox(self) -> OutboxStats:
        """What waits for the broker."""
        return self._sender.stats

    async def report(self) -> None:
        """Publish `reported` anew: call it when the effective configuration or the models changed."""
        if not self.config.enabled:
            return
        self._reports += 1
        self._report_again_s = self._clock.now_s() + _REPORT_AGAIN_S
        self._reported = encode(await self._description.reported(self._birth))
        row = Row(
            key=f"reported:{self._life}:{self._reports}",
            kind="state",
            topic=self.address.topic("reported"),
            payload=self._reported,
            retain=True,
            slot="reported",
        )
        await self._sender.put(row)

    # One connection after the other.

    async def _stay_connected(self) -> None:
        while not self._closing.is_set():
            began_s = self._clock.now_s()
            self._ways.note()
            end = await self._one_connection()
            if self._closing.is_set():
                return
            wait_s = self._backoff.next_s(end, self._clock.now_s() - began_s)
            if end.kind == "taken_over":
                log.error(
                    "another client uses this device's name at the broker; staying away",
                    address=str(self.address),
                    reason=end.reason,
                    retry_s=round(wait_s, 1),
                )
            else:
                log.warning("no broker", reason=end.reason, kind=end.kind, retry_s=round(wait_s, 1))
            await self._stay_away(wait_s, end)

    async def _stay_away(self, wait_s: float, end: End) -> None:
        """Wait; a new network is tried at once, but not where another client has our name."""
        closing = asyncio.create_task(self._closing.wait(), name="fleet-closing")
        try:
            if end.kind in {"kicked", "taken_over"}:
                await asyncio.wait({closing}, timeout=wait_s)
                return
            await timers.within(wait_s, self._ways.another(), closing)
            self._backoff.forget_failures()
            log.info("a new network: the broker is tried at once")
        except asyncio.TimeoutError:
            return
        finally:
            await timers.end(closing)

    async def _one_connection(self) -> End:
        self._birth = await asyncio.to_thread(self._state.next_birth)
        will = Will(self.address.topic("status"), encode(self._status("offline", "will")), self.config.will_delay_s)
        try:
            connection = Connection(self.config, f"overspill/{self.address}", will, self._on_message)
        except ConfigError as error:  # a password or certificate that was there at the start
            return End("refused", error.message)
        closing = asyncio.create_task(self._closing.wait(), name="fleet-closing")
        sending: asyncio.Task[None] | None = None
        end: End | None = None
        try:
            await first(self._greet(connection), closing)
            if not self._closing.is_set():
                self.connected = True
                log.info("connected to the broker", host=self.config.host, port=self.config.port, birth=self._birth)
                sending = asyncio.create_task(self._carry(connection), name="fleet-sender")
                over: set[asyncio.Future[Any]] = {connection.ended, closing, sending}
                await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        except _NameTaken as taken:
            end = End("taken_over", str(taken))
        except ConnectionEnded as error:
            end = End("refused", str(error)) if not connection.ended.done() else None
        finally:
            self._connection, self.connected = None, False
            for task in (closing, sending):
                if task is not None:
                    task.cancel()
            await self._part(connection)
        return end or (connection.ended.result() if connection.ended.done() else End("lost", "given up"))

    async def _greet(self, connection: Connection) -> None:
        """Connect, see who had our name, listen, announce the birth, and say what is in force."""
        self._takeover_guard.begin()
        await connection.open()
        await connection.subscribe(self.address.topic("status"))
        # Its acknowledgement comes after the status retained under the subscription before.
        await connection.subscribe(self.address.topic("desired"), self.address.topic("command"))
        await self._watch_report(connection)
        if self._takeover_guard.must_yield():
            raise _NameTaken("another agent was born under this name")
        try:
            await self._announce(connection, "online", "birth")
        except PublishRefused as error:
            raise ConnectionEnded(f"the broker refused the birth: {error}") from error
        self._takeover_guard.announced = True
        self._connection = connection
        await self.report()

    async def _watch_report(self, connection: Connection) -> None:
        """Hear of reports in our place, where the broker lets a device read its own: not every access list does."""
        if not self._watches_report:
            return
        try:
            await connection.subscribe(self.address.topic("reported"), of_others=True)
        except ConnectionEnded:  # some brokers end the connection of who asks for what it may not read
            self._watches_report = False
            if connection.ended.done():
                raise

    async def _part(self, connection: Connection) -> None:
        """Publish `offline` before DISCONNECT when leaving by our own will; the last will is then discarded."""
        if self._closing.is_set() and not connection.ended.done():
            with contextlib.suppress(asyncio.TimeoutError, ConnectionEnded, PublishRefused):
                await timers.within(_GOODBYE_S, self._announce(connection, "offline", "goodbye"))
        await connection.close()

    async def _announce(self, connection: Connection, state: Any, reason: str) -> None:
        payload = encode(self._status(state, reason))
        await connection.publish(Outgoing(self.address.topic("status"), payload, retain=True))

    def _status(self, state: Any, reason: str) -> Status:
        return Status(state=state, birth=self._birth, session=self._life, reason=reason, at=utc_now())

    # What comes in.

    def _on_message(self, message: Message) -> None:
        if message.topic == self.address.topic("desired"):
            self._desired.append(message.payload)  # the oldest leaves: newer versions count
            self._desired_came.set()
        elif message.topic == self.address.topic("command"):
            try:
                self._commands.put_nowait(message)
            except asyncio.QueueFull:
                self._responder.dropped("too many came at once")
        elif message.topic == self.address.topic("status"):
            self._check_status(message.payload)
        elif message.topic == self.address.topic("reported"):
            self._check_report(message.payload)

    def _check_report(self, payload: bytes) -> None:
        if payload != self._reported:  # bridged brokers may give ours back
            self._replaced.note()

    def _report_soon(self) -> None:
        self._report_again_s = 0.0

    def _check_status(self, payload: bytes) -> None:
        """Before our birth: see who had the name. After it: a will that comes late hides us, so speak up again."""
        try:
            status = decode_as(payload, Status) if payload else None
        except BadDocument:
            status = None
        if self._connection is None:
            self._takeover_guard.note(status)
            return
        ours = status is not None and (status.birth, status.session) == (self._birth, self._life)
        if status is not None and ours and status.state == "online":
            return
        if not payload:  # who cleared it has cleared `reported` too, as `overspill fleet forget` does
            self._report_soon()
        self._overwritten.note(status)

    def _announce_again(self) -> None:
        if self._connection is not None:
            payload = encode(self._status("online", "birth"))
            self._connection.publish(Outgoing(self.address.topic("status"), payload, retain=True))

    async def _obey(self) -> None:
        while True:
            await self._desired_came.wait()
            self._desired_came.clear()
            while self._desired:
                await self._obey_one(self._desired.popleft())

    async def _obey_one(self, payload: bytes) -> None:
        """Obey; what fails unexpectedly is tried once more, then reported, and the document after it has its turn."""
        for attempt in (self._configurator.obey, self._configurator.obey, self._configurator.give_up):
            try:
                return await attempt(payload)
            except Exception:  # noqa: PERF203 - three times at most
                log.exception("a desired document could not be dealt with")
                await asyncio.sleep(_RESTART_S)
        return None

    async def _answer(self) -> None:
        while True:
            message = await self._commands.get()
            answer = await self._responder.answer(message, self._birth)
            if answer is not None and self._connection is not None:
                self._connection.publish(answer)

    # What goes out.

    async def _carry(self, connection: Connection) -> None:
        try:
            await self._sender.run(connection)
        except Exception:
            log.exception("the outbox failed; the connection begins anew")  # its end is the task's end, see the caller

    async def _sample(self) -> None:
        while True:
            await self._clock.sleep(self.config.telemetry_interval_s * self._rng.uniform(0.8, 1.2))
            stats = self._sender.stats
            self._samples += 1
            sample = Telemetry(
                key=f"{self._life}:{self._samples}",
                at=utc_now(),
                uptime_s=round(self._clock.now_s() - self._started_s, 3),
                birth=self._birth,
                snapshot=await self._description.snapshot(),
                outbox_pending=stats.pending,
                outbox_dropped=stats.dropped,
            )
            topic = self.address.topic("telemetry")
            if self.config.telemetry_qos == 1:
                await self._sender.put(Row(sample.key, "telemetry", topic, encode(sample)))
            elif self._connection is not None:
                self._connection.publish(Outgoing(topic, encode(sample), qos=0, key=sample.key))
            if self._clock.now_s() >= self._report_again_s:
                await self.report()
