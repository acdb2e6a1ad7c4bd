"""A real mosquitto on a loopback port, and a raw MQTT client that sees and publishes anything."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import msgspec
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.support.ports import accepts, unused_port
from tests.support.waiting import until_true

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
        self.port = unused_port()
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
        until_true(self._listens)
        return self

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "mosquitto.log").read_text()
        return accepts(self.port)

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
