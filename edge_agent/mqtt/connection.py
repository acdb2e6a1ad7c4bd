"""One MQTT v5 connection, from CONNECT to its end, for asyncio. Never reused: the next connection is a new object.

paho runs its network loop in a thread of its own (name look-up, TCP and TLS included), so nothing here ever blocks the
event loop; its callbacks only hand values over with `call_soon_threadsafe`. paho's own reconnecting and its in-memory
queue stay unused: the session decides when to come back, and the outbox holds what is not acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from edge_agent.mqtt.config import FleetConfig
from edge_agent.mqtt.network import NetworkClient
from router.base.tls import with_clock

log = structlog.get_logger("edge_agent.fleet")

EndKind = Literal["closed", "lost", "refused", "unreachable", "kicked", "taken_over"]
MAX_INBOUND_BYTES = 1024 * 1024
"""Announced to the broker, which then drops longer packets; documents over 64 KiB still arrive, to be refused aloud."""

_SESSION_TAKEN_OVER = 142
_TLS_ALERT = "_ALERT_"  # as OpenSSL names what a peer has sent
_WINDOW = 16


@dataclass(frozen=True, slots=True)
class Message:
    """One received message; `correlation` and `response_topic` as the requester set them."""

    topic: str
    payload: bytes
    retained: bool = False
    response_topic: str | None = None
    correlation: bytes | None = None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message to publish; `expiry_s` lets the broker forget it, `key` travels as a user property."""

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = False
    expiry_s: int | None = None
    correlation: bytes | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Will:
    """What the broker announces when the connection is lost."""

    topic: str
    payload: bytes
    delay_s: int


@dataclass(frozen=True, slots=True)
class End:
    """Why a connection ended."""

    kind: EndKind
    reason: str


class ConnectionEnded(Exception):
    """The connection ended before the broker acknowledged."""


class PublishRefused(Exception):
    """The broker acknowledged a message with a failure.

    Attributes:
        code: the MQTT v5 reason code, 128 or above.
    """

    def __init__(self, code: int, name: str) -> None:
        super().__init__(f"{name} ({code})")
        self.code = code


@dataclass(slots=True)
class Connection:
    """Open it once; `ended` resolves when it is over.

    Attributes:
        client_id: the session's name at the broker.
        on_message: called on the event loop for each message, in order; must not raise.
        window: how many publishes may wait for their PUBACK, known after `open`.
        max_packet_bytes: longest packet the broker takes, None for no limit, known after `open`.
    """

    config: FleetConfig
    client_id: str
    will: Will
    on_message: Callable[[Message], None]
    window: int = _WINDOW
    max_packet_bytes: int | None = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _client: NetworkClient = field(init=False)
    _ended: asyncio.Future[End] = field(init=False)
    _connected: asyncio.Future[None] = field(init=False)
    _waiting: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    _end: End | None = None
    _opened: bool = False
    _closing: bool = False

    def __post_init__(self) -> None:
        self._ended = self._loop.create_future()
        self._connected = self._loop.create_future()
        self._client = self._new_client()

    @property
    def ended(self) -> asyncio.Future[End]:
        return self._ended

    async def open(self) -> None:
        """Connect and wait for CONNACK.

        Raises:
            ConnectionEnded: it did not come up; `ended` says why.
        """
        properties = _properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = self.config.session_expiry_s
        properties.MaximumPacketSize = MAX_INBOUND_BYTES
        properties.ReceiveMaximum = 32
        self._client.connect_async(
            self.config.host, self.config.port, self.config.keepalive_s, clean_start=False, properties=properties
        )
        self._opened = True
        self._client.start()
        try:
            await asyncio.wait({self._connected}, timeout=self.config.connect_timeout_s * 2)
        except asyncio.CancelledError:
            self._abort()
            raise
        if not self._connected.done():
            self._end = End("unreachable", "the broker accepted the connection but does not answer")
            await self.close()
            raise ConnectionEnded(self._end.reason)
        self._connected.result()

    async def subscribe(self, *topics: str, of_others: bool = False) -> None:
        """Subscribe with QoS 1.

        Args:
            of_others: to what other clients publish from now on, and nothing else.

        Raises:
            ConnectionEnded: the connection ended, or the broker refused a topic.
        """
        kept = SubscribeOptions.RETAIN_DO_NOT_SEND if of_others else SubscribeOptions.RETAIN_SEND_ON_SUBSCRIBE
        options = SubscribeOptions(qos=1, noLocal=of_others, retainHandling=kept)
        code, mid = self._client.subscribe([(topic, options) for topic in topics])
        self._client.wake()
        if code != MQTTErrorCode.MQTT_ERR_SUCCESS or mid is None:
            raise ConnectionEnded(paho.error_string(code))
        try:
            await self._acknowledgement(mid)
        except PublishRefused as error:
            raise ConnectionEnded(f"the broker refused a subscription to {', '.join(topics)}: {error}") from error

    def publish(self, message: Outgoing) -> asyncio.Future[None]:
        """Send; the future resolves with the PUBACK (at once for QoS 0).

        It raises `PublishRefused` when the broker says no, and `ConnectionEnded` when the connection ends first.
        """
        properties = _properties(PacketTypes.PUBLISH)
        if message.expiry_s is not None:
            properties.MessageExpiryInterval = message.expiry_s
        if message.correlation is not None:
            properties.CorrelationData = message.correlation
        if message.key is not None:
            properties.UserProperty = ("key", message.key)
        info = self._client.publish(message.topic, message.payload, message.qos, message.retain, properties)
        self._client.wake()
        if message.qos == 0 or info.rc != MQTTErrorCode.MQTT_ERR_SUCCESS:
            done = self._loop.create_future()
            if info.rc == MQTTErrorCode.MQTT_ERR_SUCCESS:
                done.set_result(None)
            else:
                done.set_exception(ConnectionEnded(paho.error_string(info.rc)))
                done.exception()  # mark as seen: callers may drop it
            return done
        return self._acknowledgement(info.mid)

    async def close(self, grace_s: float = 1.0) -> None:
        """Send DISCONNECT (which discards the will) and wait for the end; after `grace_s` cut the connection."""
        self._closing = True
        if not self._opened:
            self._client.discard()
            self._finish(None)
        elif not self._ended.done():
            self._client.disconnect()
            self._client.wake()
            await asyncio.wait({self._ended}, timeout=grace_s)
        if not self._ended.done():
            self._abort()
            await asyncio.wait({self._ended}, timeout=grace_s)

    def _new_client(self) -> NetworkClient:
        client = NetworkClient(
            CallbackAPIVersion.VERSION2,
            client_id=self.client_id,
            protocol=paho.MQTTv5,
            reconnect_on_failure=False,
        )
        client.prepare(lambda error: self._post(self._finish, error))
        client.connect_timeout = self.config.connect_timeout_s
        client.max_inflight_messages_set(_WINDOW)
        if self.config.username is not None:
            client.username_pw_set(self.config.username, self.config.password())
        if self.config.tls is not None:
            client.tls_set_context(self.config.tls.context())
        will = _properties(PacketTypes.WILLMESSAGE)
        will.WillDelayInterval = self.will.delay_s
        client.will_set(self.will.topic, self.will.payload, qos=1, retain=True, properties=will)
        client.on_connect = self._thread_connect
        client.on_disconnect = self._thread_disconnect
        client.on_publish = self._thread_publish
        client.on_subscribe = self._thread_subscribe
        client.on_message = self._thread_message
        return client

    def _acknowledgement(self, mid: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        if self._ended.done():
            future.set_exception(ConnectionEnded(self._ended.result().reason))
            future.exception()
        else:
            self._waiting[mid] = future
        return future

    # From here to `_post`: called in paho's thread.

    def _thread_connect(
        self,
        _client: paho.Client,
        _data: Any,
        _flags: paho.ConnectFlags,
        code: ReasonCode,
        properties: Properties | None,
    ) -> None:
        window = min(_WINDOW, getattr(properties, "ReceiveMaximum", _WINDOW))
        self._post(self._on_connect, code, window, getattr(properties, "MaximumPacketSize", None))

    def _thread_disconnect(
        self, _client: paho.Client, _data: Any, flags: paho.DisconnectFlags, code: ReasonCode, _more: Properties | None
    ) -> None:
        self._post(self._on_disconnect, flags.is_disconnect_packet_from_server, code)

    def _thread_publish(
        self, _client: paho.Client, _data: Any, mid: int, code: ReasonCode, _more: Properties | None
    ) -> None:
        self._post(self._on_acknowledged, mid, code)

    def _thread_subscribe(
        self, _client: paho.Client, _data: Any, mid: int, codes: list[ReasonCode], _more: Properties | None
    ) -> None:
        worst = max(codes, key=lambda code: code.value)
        self._post(self._on_acknowledged, mid, worst)

    def _thread_message(self, _client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:
            return  # none of ours
        correlation = getattr(message.properties, "CorrelationData", None)
        received = Message(
            topic=topic,
            payload=bytes(message.payload),
            retained=message.retain,
            response_topic=getattr(message.properties, "ResponseTopic", None),
            correlation=bytes(correlation) if correlation is not None else None,
        )
        self._post(self.on_message, received)

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(call, *arguments)

    # From here on: on the event loop.

    def _on_connect(self, code: ReasonCode, window: int, max_packet_bytes: int | None) -> None:
        if code.is_failure:
            self._end = End("refused", f"the broker refused the connection: {code}")
        elif not self._connected.done():
            self.window, self.max_packet_bytes = window, max_packet_bytes
            self._connected.set_result(None)

    def _on_disconnect(self, from_broker: bool, code: ReasonCode) -> None:
        if self._end is not None or self._closing:
            return
        if from_broker and code.value == _SESSION_TAKEN_OVER:
            self._end = End("kicked", str(code))
        else:
            self._end = End("lost", f"the broker says: {code}" if from_broker else self._why_lost() or str(code))

    def _why_lost(self) -> str:
        """What the connection broke with. A broker tells a certificate that it does not take after the handshake."""
        fault, tls = self._client.fault, self.config.tls
        if _TLS_ALERT in fault and tls is not None:
            shown = tls.cert_file or "no certificate was shown to it: fleet.tls.cert_file"
            return (
                f"{fault}; the broker does not take this device's certificate ({shown}): look at its end and authority"
            )
        return fault

    def _on_acknowledged(self, mid: int, code: ReasonCode) -> None:
        future = self._waiting.pop(mid, None)
        if future is None or future.done():
            return
        if code.is_failure:
            future.set_exception(PublishRefused(code.value, str(code)))
            future.exception()
        else:
            future.set_result(None)

    def _finish(self, error: BaseException | None) -> None:
        if self._ended.done():
            return
        if self._end is None:
            kind: EndKind = "closed" if self._closing else "lost" if self._connected.done() else "unreachable"
            self._end = End(kind, with_clock(str(error)) if error is not None else "the connection was closed")
            if error is not None and not isinstance(error, OSError):
                log.error("the MQTT network thread failed", error=repr(error))
        failure = ConnectionEnded(self._end.reason)
        for future in (*self._waiting.values(), self._connected):
            if not future.done():
                future.set_exception(failure)
                future.exception()
        self._waiting.clear()
        self._client.forget_owner()
        self._ended.set_result(self._end)

    def _abort(self) -> None:
        """End paho's thread without DISCONNECT: the broker sees a lost connection."""
        self._client.abort()


def _properties(packet: int) -> Properties:
    return Properties(packet)  # type: ignore[no-untyped-call]
