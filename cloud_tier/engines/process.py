"""A server of another maker as a process of ours: in a group of its own, its output in our log, its end for certain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from router.base.timers import end

_LAUNCH = Path(__file__).with_name("launch.py")
_READ_BYTES = 1 << 16
_MAX_LINE_CHARS = 2000
_KEPT_LINES = 40
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINE_END = re.compile(rb"[\r\n]+")
_FAULT = re.compile(
    r"^\W*(?:\([^()]*\)\s*)?(?:ERROR\b.*?\]\s*)?(?P<fault>(?:[\w. ]+: )?error:.*|[\w.]+(?:Error|Exception): .*)"
)


class ServerProcess:
    """One run of a command. `start` it, and `end` it always.

    Args:
        on_line: called with each line that it writes, without colours.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        self._command = command
        self._environment = environment
        self._on_line = on_line
        self._process: subprocess.Popen[bytes] | None = None
        self._exit: asyncio.Future[int] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._pipe: asyncio.ReadTransport | None = None
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        if self._process is None:
            raise RuntimeError("the process is not started")
        return self._process.pid

    @property
    def fault(self) -> str:
        """The last line that names an error, empty where none does: what it may have ended of."""
        faults = [found.group("fault") for line in self._last if (found := _FAULT.match(line))]
        return faults[-1][:_MAX_LINE_CHARS] if faults else ""

    async def start(self) -> None:
        """Start it in a session of its own: a Ctrl-C at our terminal is for us to pass on.

        Raises:
            OSError: there are no processes or files left.
        """
        loop = asyncio.get_running_loop()
        read_fd, write_fd = os.pipe()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(os.close, read_fd)
            try:
                process = subprocess.Popen(  # noqa: ASYNC220 - returns once it is started
                    [sys.executable, "-I", "-S", str(_LAUNCH), str(os.getpid()), *self._command],
                    env=dict(self._environment),
                    stdin=subprocess.DEVNULL,
                    stdout=write_fd,
                    stderr=write_fd,
                    start_new_session=True,
                )
            finally:
                os.close(write_fd)
            on_failure.pop_all()
        self._process = process
        self._exit = exited = loop.create_future()

        def tell(status: int) -> None:
            if not exited.done():
                exited.set_result(status)

        def wait() -> None:
            status = process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(tell, status)

        threading.Thread(target=wait, name=f"process {process.pid}", daemon=True).start()
        reader = asyncio.StreamReader()
        self._pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", 0)
        )
        self._reading = asyncio.create_task(self._read(reader), name=f"output of {process.pid}")

    async def ended(self) -> str:
        """Wait until it has ended, and say how: of which signal, or with which status and error."""
        if self._exit is None:
            raise RuntimeError("the process is not started")
        status = await asyncio.shield(self._exit)
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        fault = f": {self.fault}" if self.fault else ""
        return f"exit status {status}{fault}"

    async def end(self, grace_s: float = 0.0) -> None:
        """Ask it to end, wait for `grace_s` at most, then kill what is left of its group; reads all of its output."""
        if self._process is None or self._exit is None:
            return
        if grace_s > 0 and not self._exit.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            await asyncio.wait({self._exit}, timeout=grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.shield(self._exit)
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=1.0)
            await end(self._reading)
        if self._pipe is not None:
            self._pipe.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        rest = b""
        while data := await reader.read(_READ_BYTES):
            *lines, rest = _LINE_END.split(rest + data)
            for line in lines:
                self._tell(line)
            if len(rest) > _READ_BYTES:
                self._tell(rest)
                rest = b""
        self._tell(rest)

    def _tell(self, line: bytes) -> None:
        text = _ANSI.sub("", line.decode("utf-8", "replace")).rstrip()[:_MAX_LINE_CHARS]
        if text:
            self._last.append(text)
            self._on_line(text)
