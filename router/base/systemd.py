"""Word to the service manager that started this process, in the protocol of sd_notify(3); elsewhere nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping

READY = "READY=1"
STOPPING = "STOPPING=1"
_ALIVE = "WATCHDOG=1"


def notify(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send one state line, if a unit with `Type=notify` started us. Never waits, never fails."""
    address = environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.setblocking(False)
        manager.sendto(state.encode(), address)


def watchdog_interval_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return how often to speak: twice in the unit's `WatchdogSec`; None if it has none, or means another process."""
    usec = environ.get("WATCHDOG_USEC", "")
    owner = environ.get("WATCHDOG_PID", "")
    if not usec.isascii() or not usec.isdigit() or int(usec) == 0 or owner not in {"", str(os.getpid())}:
        return None
    return int(usec) / 2e6


async def watch() -> None:
    """Say that the event loop turns for as long as it does, so that a frozen process is restarted."""
    interval_s = watchdog_interval_s()
    while interval_s is not None:
        notify(_ALIVE)
        await asyncio.sleep(interval_s)
