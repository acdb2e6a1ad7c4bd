"""Child processes with a log file each, that end with their owner, however often it is told to hurry."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx


class StackError(RuntimeError):
    """A part of the stack did not come up; the message names it, its log and the log's last lines."""


def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def overspill(*arguments: str) -> list[str]:
    """The command line of the `overspill` that belongs to this interpreter."""
    return [sys.executable, "-m", "overspill", *arguments]


class Child:
    """One process in a session of its own, so that it and its children end together."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self.env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise StackError(f"{self.name} was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        if self.running:
            self.kill()  # never two of one
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.argv, stdout=log, stderr=subprocess.STDOUT, env=self.env, start_new_session=True
            )

    def kill(self) -> None:
        """SIGKILL to the process and all its children: power loss."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    async def stop(self, grace_s: float = 20.0) -> int | None:
        """SIGTERM, wait for a clean end, SIGKILL to what is left. Returns the exit code."""
        if self._process is None:
            return None
        try:
            if self.running:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self._process.wait, grace_s)
        finally:
            self.kill()
        return self._process.returncode

    async def wait_ready(self, url: str, timeout_s: float) -> None:
        """Poll a health URL until it answers 200.

        Raises:
            StackError: the process ended, or it is not ready in time.
        """
        deadline_s = time.monotonic() + timeout_s
        async with httpx.AsyncClient() as client:
            while time.monotonic() < deadline_s:
                if not self.running:
                    raise StackError(f"{self.name} ended with {self.exit_code}; {self.log_tail()}")
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(url, timeout=2)).status_code == 200:
                        return
                await asyncio.sleep(0.1)
        raise StackError(f"{self.name} was not ready after {timeout_s:.0f} s; {self.log_tail()}")

    async def wait_port(self, port: int, timeout_s: float = 10.0) -> None:
        """Wait until a TCP port of the process accepts connections."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and self.running:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            await asyncio.sleep(0.05)
        raise StackError(f"{self.name} does not listen on port {port}; {self.log_tail()}")

    def log_tail(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace").splitlines()[-lines:] if self.log.exists() else []
        return f"log {self.log}:\n  " + "\n  ".join(text or ["(empty)"])


def find_mosquitto() -> str:
    """Path of the broker.

    Raises:
        StackError: it is not installed; names the remedy.
    """
    found = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None:
        raise StackError("mosquitto is not installed; run deploy/install-mosquitto.sh")
    return found
