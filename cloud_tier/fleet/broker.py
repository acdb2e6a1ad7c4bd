"""An operator's MQTT v5 connection for asyncio: paho in its own thread, values handed to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from router.base.errors import ConfigError, OverspillError
from router.base.timers import within
from router.base.tls import client_context

MAX_INBOUND_BYTES = 1024 * 1024
"""Announced to the broker, which then drops longer messages: no device fills the memory of who reads all of them."""
_ADDRESS = re.compile(
    r"(?:(?P<scheme>mqtts?)://)?(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^:/\[\]]+))(?::(?P<port>\d+))?/?"
)


class BrokerError(OverspillError):
    """The broker cannot be reached, refuses this operator, or went away."""

    status = 502
    code = "broker_error"


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where the broker is and how to log in.

    Attributes:
        tls: verified TLS; implied by any of the files.
        ca_file: authority of the broker's certificate, the system's store if None.
        cert_file, key_file: the operator's own certificate.
    """

    host: str = "127.0.0.1"
    port: int = 1883
    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    connect_timeout_s: float = 10.0

    @property
    def encrypted(self) -> bool:
        return bool(self.tls or self.ca_file or self.cert_file or self.key_file)

    def context(self) -> ssl.SSLContext | None:
        """Build the TLS context, None for a plain connection.

        Raises:
            ConfigError: a file is missing, holds something else, or lacks its other half.
        """
        if not self.encrypted:
            return None
        return client_context(self.ca_file, self.cert_file, self.key_file)


def parse_broker(text: str, *, tls: bool = False) -> tuple[str, int, bool]:
    """Take `host`, `host:port`, `[v6]:port`, `mqtt://…` or `mqtts://…` apart: host, port, TLS.

    Raises:
        ConfigError: it is none of these.
    """
    match = _ADDRESS.fullmatch(text.strip())
    port = int(match["port"]) if match and match["port"] else 0
    if match is None or port > 65535:
        raise ConfigError(f"broker {text!r} is no address; write host, host:port or mqtts://host:port", param="broker")
    secure = tls or match["scheme"] == "mqtts"
    return match["v6"] or match["host"], port or (8883 if secure else 1883), secure


@dataclass(frozen=True, slots=True)
class Message:
    """One received message."""

    topic: str
    payload: bytes
    retained: bool
    correlation: bytes | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What makes a publish a request: where to answer, under which correlation, and until when it is worth it."""

    response_topic: str
    correlation: bytes
    expiry_s: int


class BrokerConnection:
    """Lifetime: `async with`. One connection; when it is lost, `lost` resolves and a new object has to be made."""

    def __init__(self, address: BrokerAddress, on_message: Callable[[Message], None]) -> None:
        self.address = address
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._client: paho.Client | None = self._new_client()

    async def __aenter__(self) -> BrokerConnection:
        """Connect.

        Raises:
            BrokerError: no broker, or it refuses.
        """
        where = f"{self.address.host}:{self.address.port}"
        connecting = asyncio.create_task(asyncio.to_thread(self._connect), name="fleet-operator-connect")
        try:
            await within(3 * self.address.connect_timeout_s, connecting)
            self._paho().loop_start()
            await within(self.address.connect_timeout_s, self._connected)
        except asyncio.TimeoutError as error:  # before OSError, whose subclass it is from Python 3.11 on
            await self._leave()
            raise BrokerError(f"the broker at {where} does not answer") from error
        except (OSError, ValueError) as error:
            await self._leave()
            said = f"cannot connect to the broker at {where}: {error or type(error).__name__}"
            raise BrokerError(f"{said}{self._hint(error)}") from error
        except BrokerError:
            await self._leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._paho().disconnect()
        await self._leave()

    async def subscribe(self, *topics: str, qos: int = 1, retained: bool = True) -> None:
        """Subscribe and wait for the broker's word; `retained`: what the broker keeps is to be sent, too.

        Raises:
            BrokerError: refused, or the connection was lost.
        """
        options = SubscribeOptions(qos=qos, retainHandling=0 if retained else 2)
        code, mid = self._paho().subscribe([(topic, options) for topic in topics])
        await self._acknowledged(code, mid, f"subscribe to {', '.join(topics)}")

    async def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, request: Request | None = None
    ) -> None:
        """Publish with QoS 1 and wait for PUBACK.

        Raises:
            BrokerError: refused, or the connection was lost.
        """
        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        if request is not None:
            properties.ResponseTopic = request.response_topic
            properties.CorrelationData = request.correlation
            properties.MessageExpiryInterval = request.expiry_s
        info = self._paho().publish(topic, payload, qos=1, retain=retain, properties=properties)
        await self._acknowledged(info.rc, info.mid, f"publish to {topic}")

    async def _acknowledged(self, code: int, mid: int | None, what: str) -> None:
        if code != MQTTErrorCode.MQTT_ERR_SUCCESS or mid is None or self.lost.done():
            raise BrokerError(f"cannot {what}: the connection to the broker is lost")
        future = self._waiting[mid] = self._loop.create_future()
        try:
            await within(self.address.connect_timeout_s, future)
        except asyncio.TimeoutError as error:
            raise BrokerError(f"cannot {what}: the broker does not answer") from error
        except BrokerError as error:
            raise BrokerError(f"cannot {what}: {error.message}") from error
        finally:
            self._waiting.pop(mid, None)

    def _paho(self) -> paho.Client:
        if self._client is None:
            raise BrokerError("the connection to the broker is closed")
        return self._client

    def _new_client(self) -> paho.Client:
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=f"overspill-operator-{uuid.uuid4().hex[:16]}",
            protocol=paho.MQTTv5,
            reconnect_on_failure=False,
        )
        client.connect_timeout = self.address.connect_timeout_s
        if self.address.username is not None:
            client.username_pw_set(self.address.username, self.address.password)
        context = self.address.context()
        if context is not None:
            client.tls_set_context(context)
        client.on_connect = self._thread_connect
        client.on_disconnect = self._thread_disconnect
        client.on_publish = self._thread_publish
        client.on_subscribe = self._thread_subscribe
        client.on_message = self._thread_message
        return client

    def _hint(self, error: Exception | None = None) -> str:
        """Say what is most likely wrong when the broker breaks off before its first word."""
        host, port = self.address.host, self.address.port
        if isinstance(error, (ConnectionRefusedError, socket.gaierror)):
            return "; is it running, and is this its address? --broker or $OVERSPILL_FLEET_BROKER names another"
        if not self.address.encrypted:
            broke_off = error is None or isinstance(error, ConnectionResetError)
            return f"; if it speaks TLS there, write mqtts://{host}:{port}" if broke_off else ""
        if error is None:
            return "" if self.address.cert_file else "; it may ask for a certificate of yours: --cert and --key"
        plain = isinstance(error, (ssl.SSLError, ConnectionResetError)) and not isinstance(error, ssl.CertificateError)
        return (
            f"; if it speaks no TLS there, write mqtt://{host}:{port} and leave the certificates out" if plain else ""
        )

    def _connect(self) -> None:
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.MaximumPacketSize = MAX_INBOUND_BYTES
        self._paho().connect(
            self.address.host, self.address.port, keepalive=30, clean_start=True, properties=properties
        )

    async def _leave(self) -> None:
        client, self._client = self._client, None  # the last reference: paho closes its sockets when it goes
        if client is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(client.loop_stop), 5)
            client.on_connect = client.on_disconnect = client.on_publish = None
            client.on_subscribe = client.on_message = None
        if not self.lost.done():
            self.lost.set_result("closed")

    # Called in paho's thread.

    def _thread_connect(self, _client: Any, _data: Any, _flags: Any, code: ReasonCode, _more: Any) -> None:
        self._post(self._on_connect, code)

    def _thread_disconnect(self, _client: Any, _data: Any, _flags: Any, code: ReasonCode, _more: Any) -> None:
        self._post(self._on_lost, str(code))

    def _thread_publish(self, _client: Any, _data: Any, mid: int, code: ReasonCode, _more: Any) -> None:
        self._post(self._on_acknowledged, mid, code)

    def _thread_subscribe(self, _client: Any, _data: Any, mid: int, codes: list[ReasonCode], _more: Any) -> None:
        self._post(self._on_acknowledged, mid, max(codes, key=lambda code: code.value))

    def _thread_message(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        with contextlib.suppress(UnicodeDecodeError):
            correlation = getattr(message.properties, "CorrelationData", None)
            received = Message(
                message.topic, bytes(message.payload), message.retain, bytes(correlation) if correlation else None
            )
            self._post(self._on_message, received)

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    # On the event loop.

    def _on_connect(self, code: ReasonCode) -> None:
        if self._connected.done():
            return
        if code.is_failure:
            where = f"{self.address.host}:{self.address.port}"
            self._connected.set_exception(BrokerError(f"the broker at {where} refuses this operator: {code}"))
        else:
            self._connected.set_result(None)

    def _on_lost(self, reason: str) -> None:
        if self._connected.done():
            error = BrokerError(f"the connection to the broker was lost: {reason}")
        else:
            where = f"{self.address.host}:{self.address.port}"
            error = BrokerError(f"the broker at {where} closed the connection without a word ({reason}){self._hint()}")
        for future in (self._connected, *self._waiting.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()
        if not self.lost.done():
            self.lost.set_result(reason)

    def _on_acknowledged(self, mid: int, code: ReasonCode) -> None:
        future = self._waiting.get(mid)
        if future is None or future.done():
            return
        if code.is_failure:
            future.set_exception(BrokerError(f"the broker says: {code}"))
        else:
            future.set_result(None)
