"""paho's client with a network loop that reports its end and does not mind how many files the agent has open."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
from collections.abc import Callable

from paho.mqtt import client as paho
from paho.mqtt.enums import LogLevel, MQTTErrorCode

from router.base.path import is_here, watch_over

_IDLE_S = 1.0
"""Longest sleep of the network thread: how late the keep-alive may be, and that this machine left its network."""


class NetworkClient(paho.Client):
    """paho's client with a network thread of our own in the place of `loop_start`.

    It connects once, never reconnects, closes what it opened, and reports its end whatever happens. It waits with
    `selectors`, because paho's `select` fails for file descriptors from 1024 on, which an agent under load has.

    Attributes:
        fault: what paho logged as an error last; as the reason of an end it says no more than `Unspecified error`.
    """

    fault = ""

    def prepare(self, ended: Callable[[BaseException | None], None]) -> None:
        """Set what the network thread needs; `ended` is called in that thread when it is over."""
        self._report_end = ended
        self.on_log = self._note
        self._aborted = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        # With this callback set, paho only queues what other threads publish, instead of writing to the socket there.
        self.on_socket_register_write = lambda *_: self.wake()

    def start(self) -> None:
        """Connect and exchange packets in a thread, which never keeps the process alive."""
        threading.Thread(target=self._run, name="fleet-mqtt", daemon=True).start()

    def forget_owner(self) -> None:
        """Drop the callbacks: a client that has ended keeps nobody alive."""
        self.on_connect = self.on_disconnect = self.on_publish = self.on_subscribe = self.on_message = None
        self.on_log = None
        self._report_end = _nobody

    def discard(self) -> None:
        """Release what `prepare` made; only the thread itself calls it once started."""
        self._wake_reader.close()
        self._wake_writer.close()

    def wake(self) -> None:
        """Tell the network thread that there is something to send."""
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._wake_writer.send(b"x")

    def abort(self) -> None:
        """End the network thread, whatever it waits for; while it connects, as soon as that is over."""
        self._aborted.set()
        self.wake()

    def _note(self, _client: paho.Client, _data: object, level: int, text: str) -> None:
        if level == LogLevel.MQTT_LOG_ERR:
            self.fault = text

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self.reconnect()
            self._exchange(_IDLE_S)
        except Exception as raised:  # noqa: BLE001 - the thread's boundary: reported, never swallowed
            error = raised.with_traceback(None)
        finally:
            left = self.socket()
            if isinstance(left, socket.socket):
                left.close()
            self.discard()
            self._report_end(error)

    def _exchange(self, timeout_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            now = self.socket()
            if not isinstance(now, socket.socket):
                return
            connected: socket.socket = now
            watch_over(connected)
            local = connected.getsockname()
            selector.register(self._wake_reader, selectors.EVENT_READ)
            selector.register(connected, selectors.EVENT_READ)
            code = MQTTErrorCode.MQTT_ERR_SUCCESS
            while code == MQTTErrorCode.MQTT_ERR_SUCCESS and self.socket() is connected and not self._aborted.is_set():
                writing = selectors.EVENT_WRITE if self.want_write() else 0
                selector.modify(connected, selectors.EVENT_READ | writing)
                buffered = isinstance(connected, ssl.SSLSocket) and connected.pending() > 0
                ready = {key.fileobj: events for key, events in selector.select(0 if buffered else timeout_s)}
                if not is_here(local):
                    raise OSError("this machine has left the network that it was connected by")
                if self._wake_reader in ready:
                    self._wake_reader.recv(4096)
                events = ready.get(connected, 0)
                if events & selectors.EVENT_READ or buffered:
                    code = self.loop_read()
                if code == MQTTErrorCode.MQTT_ERR_SUCCESS and events & selectors.EVENT_WRITE:
                    code = self.loop_write()
                if code == MQTTErrorCode.MQTT_ERR_SUCCESS:
                    code = self.loop_misc()


def _nobody(_: BaseException | None) -> None:
    """Whoever owned the client has been told already."""
