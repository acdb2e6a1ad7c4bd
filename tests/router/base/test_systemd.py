"""What systemd hears: states, and a sign of life while the event loop turns."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from router.base import systemd


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_a_state_is_one_datagram(manager: socket.socket) -> None:
    systemd.notify(systemd.READY)
    assert manager.recv(64) == b"READY=1"


def test_a_manager_that_is_gone_harms_nobody(tmp_path: Path) -> None:
    systemd.notify(systemd.READY, {})
    systemd.notify(systemd.READY, {"NOTIFY_SOCKET": str(tmp_path / "none")})
    systemd.notify(systemd.READY, {"NOTIFY_SOCKET": "@nobody-binds-this"})


async def test_the_watchdog_hears_of_a_loop_that_turns(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    task = asyncio.create_task(systemd.watch())
    assert [await asyncio.to_thread(manager.recv, 64) for _ in range(3)] == [b"WATCHDOG=1"] * 3
    task.cancel()


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_for_whom_it_names(environ: dict[str, str], interval_s: float | None) -> None:
    assert systemd.watchdog_interval_s(environ) == interval_s
