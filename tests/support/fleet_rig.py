"""A real mosquitto on a loopback port, a raw MQTT client to look over its shoulder, and waiting without sleeping."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

T = TypeVar("T")

CONFIG = """\
listener {port} 127.0.0.1
allow_anonymous true
persistence false
log_type error
log_type warning
max_keepalive 3600
max_inflight_messages 100
"""


class Broker:
    """One mosquitto process; the port stays the same over restarts."""

    def __init__(self, folder: Path, config: str = CONFIG) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.folder = folder
        self.config = config
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Broker:
        program = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
        assert program is not None, "mosquitto is not installed: run deploy/install-mosquitto.sh"
        path = self.folder / "mosquitto.conf"
        path.write_text(self.config.format(port=self.port, folder=self.folder))
        with (self.folder / "mosquitto.log").open("ab") as log:
            self.process = subprocess.Popen([program, "-c", str(path)], stdout=log, stderr=log)
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:  # noqa: PERF203
                assert self.process.poll() is None, (self.folder / "mosquitto.log").read_text()
                time.sleep(0.02)
            else:
                return self
        raise AssertionError("mosquitto does not listen")

    def stop(self, how: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(10)
            self.process = None

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.stop(signal.SIGKILL)


class Spy:
    """A plain paho client: sees everything, publishes anything."""

    def __init__(self, port: int, *topics: str, client_id: str = "") -> None:
        self.seen: list[tuple[str, bytes, bool]] = []
        self.properties: list[Properties | None] = []
        self.ready = threading.Event()
        self.client = paho.Client(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=paho.MQTTv5)
        self.client.on_message = self._on_message
        self.client.on_subscribe = lambda *_: self.ready.set()
        self.client.connect("127.0.0.1", port)
        self.client.subscribe([(topic, 1) for topic in (topics or ("overspill/#",))])
        self.client.loop_start()
        assert self.ready.wait(10)

    def _on_message(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        self.properties.append(message.properties)
        self.seen.append((message.topic, bytes(message.payload), message.retain))

    def publish(self, topic: str, payload: bytes | dict, *, retain: bool = False, **properties: object) -> None:
        body = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
        extra = Properties(PacketTypes.PUBLISH)
        for name, value in properties.items():
            setattr(extra, name, value)
        self.client.publish(topic, body, qos=1, retain=retain, properties=extra).wait_for_publish(10)

    def payloads(self, leaf: str) -> list[dict]:
        return [msgspec.json.decode(body) for topic, body, _ in self.seen if topic.endswith("/" + leaf) and body]

    def __enter__(self) -> Spy:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.disconnect()
        self.client.loop_stop()
        self.client.on_message = self.client.on_subscribe = None  # no cycle that keeps its sockets open


async def until(check: Callable[[], T], timeout_s: float = 15.0) -> T:
    """Return the first truthy value of `check`; fail when there is none in time."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = check()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline_s, "waited in vain"
        await asyncio.sleep(0.01)
