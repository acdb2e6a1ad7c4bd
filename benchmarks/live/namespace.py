"""A network namespace for one tier, joined to this machine by a pair of interfaces whose rates follow a trace.

Linux, as root, with `ip` and `tc`: tbf shapes each direction where it is sent. The addresses are of
198.18.0.0/15, which is kept for benchmarks (RFC 2544). What a killed run has left is removed by the next one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from benchmarks.live.relay import LinkShape

HERE, THERE = "198.18.77.1", "198.18.77.2"
STEP_S = 0.5
_PREFIX = "overspill-"
_LEAST_BPS = 2_000
"""tbf has no rate of 0: an outage lets this pass, a packet in 6 s."""
_BURST_BYTES = 3_100
_QUEUE_BYTES = 96_000
_COMMAND_LIMIT_S = 10


def possible() -> str:
    """Say why namespaces cannot be made here; empty where they can."""
    if not sys.platform.startswith("linux"):
        return f"no network namespaces on {sys.platform}"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (package iproute2)"
    probe = f"{_PREFIX}{os.getpid()}-p"
    made = _tried("ip", "netns", "add", probe)
    if made:
        return made
    try:
        return _tried("ip", "netns", "exec", probe, "tc", "qdisc", "add", "dev", "lo", "root", *_tbf(1_000_000))
    finally:
        _tried("ip", "netns", "del", probe)


class Namespace:
    """Use as `async with`: one namespace, up and joined; `shape` makes its link follow a trace."""

    def __init__(self) -> None:
        self.name = f"{_PREFIX}{os.getpid()}"
        self._here, self._there = f"ov{os.getpid()}h"[-15:], f"ov{os.getpid()}t"[-15:]

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command that is to run in it."""
        return ("ip", "netns", "exec", self.name)

    async def __aenter__(self) -> Namespace:
        remove_stale()
        try:
            _do("ip", "netns", "add", self.name)
            _do("ip", "link", "add", self._here, "type", "veth", "peer", "name", self._there, "netns", self.name)
            _do("ip", "addr", "add", f"{HERE}/30", "dev", self._here)
            _do("ip", "link", "set", self._here, "up")
            _do("ip", "-n", self.name, "addr", "add", f"{THERE}/30", "dev", self._there)
            for device in ("lo", self._there):
                _do("ip", "-n", self.name, "link", "set", device, "up")
            _do("tc", "qdisc", "add", "dev", self._here, "root", *_tbf(1_000_000_000))
            _do("tc", "-n", self.name, "qdisc", "add", "dev", self._there, "root", *_tbf(1_000_000_000))
        except BaseException:
            self._remove()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    async def follow(self, shape: LinkShape) -> None:
        """Set both rates every `STEP_S` to what the trace carries in it; ends only when it is cancelled."""
        loop = asyncio.get_running_loop()
        began_s, step = loop.time(), 0
        while True:
            up_bps, down_bps = rates_bps(shape, step * STEP_S)
            await _done("tc", "qdisc", "change", "dev", self._here, "root", *_tbf(up_bps))
            await _done("tc", "-n", self.name, "qdisc", "change", "dev", self._there, "root", *_tbf(down_bps))
            step += 1
            await asyncio.sleep(max(0.0, began_s + step * STEP_S - loop.time()))

    def full_rate(self) -> None:
        """Let everything pass at once, between two measurements."""
        _do("tc", "qdisc", "change", "dev", self._here, "root", *_tbf(1_000_000_000))
        _do("tc", "-n", self.name, "qdisc", "change", "dev", self._there, "root", *_tbf(1_000_000_000))

    def _remove(self) -> None:
        _tried("ip", "link", "del", self._here)
        _tried("ip", "netns", "del", self.name)


def rates_bps(shape: LinkShape, from_s: float) -> tuple[int, int]:
    """Return the mean rates, up and down, over the step that begins at `from_s`; never 0."""
    both = (way.bits_until(from_s + STEP_S) - way.bits_until(from_s) for way in (shape.up, shape.down))
    up_bps, down_bps = (max(_LEAST_BPS, round(bits / STEP_S)) for bits in both)
    return up_bps, down_bps


def remove_stale() -> None:
    """Remove namespaces of processes that are gone."""
    folder = Path("/run/netns")
    for path in folder.glob(f"{_PREFIX}[0-9]*") if folder.is_dir() else ():
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            _tried("ip", "netns", "del", path.name)


def _tbf(rate_bps: int) -> tuple[str, ...]:
    burst_bytes = max(_BURST_BYTES, rate_bps // 8 // 250)  # a timer tick of 4 ms at that rate
    return ("tbf", "rate", f"{rate_bps}bit", "burst", str(burst_bytes), "limit", str(_QUEUE_BYTES + burst_bytes))


def _do(*argv: str) -> None:
    """Raises RuntimeError: the command failed; says what it said."""
    why = _tried(*argv)
    if why:
        raise RuntimeError(why)


def _tried(*argv: str) -> str:
    """Run a command; return why it failed, or nothing."""
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=False)
    return f"`{' '.join(argv)}`: {ran.stderr.strip() or ran.returncode}" if ran.returncode else ""


async def _done(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
    try:
        _, said = await asyncio.wait_for(process.communicate(), _COMMAND_LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"`{' '.join(argv)}`: {said.decode().strip()}")
