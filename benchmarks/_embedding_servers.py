"""Servers of one encoder, with batches of at most so many inputs: an agent, or a cloud tier with torch."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_START_S = 60


@dataclass(frozen=True)
class Server:
    """One that runs, with the processes that it has begun."""

    process: psutil.Process
    port: int

    @property
    def cpu_s(self) -> float:
        """What it has taken of the CPU, all its processes together."""
        times = [one.cpu_times() for one in (self.process, *self.process.children(recursive=True))]
        return float(sum(one.user + one.system for one in times))


@contextlib.contextmanager
def agent(variant: str, max_size: int, folder: Path) -> Iterator[Server]:
    """Start an agent that serves `variant` in batches of at most `max_size`."""
    settings = {
        "OVERSPILL_EDGE__GATEWAY__PORT": "0",
        "OVERSPILL_EDGE__AGENT__LOG_FORMAT": "json",
        "OVERSPILL_EDGE__AGENT__CACHE_DIR": str(folder / "cache"),
        "OVERSPILL_EDGE__MODELS__VARIANTS": json.dumps([variant]),
        "OVERSPILL_EDGE__MODELS__PRELOAD": json.dumps([variant]),
        "OVERSPILL_EDGE__MODELS__INTRA_OP_THREADS": "1",
        "OVERSPILL_EDGE__MODELS__BATCHING__MAX_SIZE": str(max_size),
    }
    with _started(("edge", "run"), settings, folder / f"agent-{max_size}.log") as server:
        yield server


@contextlib.contextmanager
def cloud(variant: str, max_size: int, folder: Path) -> Iterator[Server]:
    """Start a cloud tier that serves `variant` in batches of at most `max_size`, on one thread of the CPU."""
    config = folder / f"cloud-{max_size}.toml"
    config.write_text(
        '[server]\nport = 0\nlog_format = "json"\n\n'
        f'[[models]]\nvariant = "{variant}"\ndevice = "cpu"\nthreads = 1\nbatching = {{ max_size = {max_size} }}\n',
        encoding="utf-8",
    )
    with _started(("cloud", "serve", "--config", str(config)), {}, folder / f"cloud-{max_size}.log") as server:
        yield server


@contextlib.contextmanager
def _started(words: Sequence[str], settings: Mapping[str, str], log: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "overspill", *words]
    with (
        log.open("w") as told,
        subprocess.Popen(command, stdout=told, stderr=told, env=os.environ | settings) as process,
    ):
        try:
            yield Server(psutil.Process(process.pid), _port(process, log))
        finally:
            process.terminate()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    for _ in range(10 * _START_S):
        for line in log.read_text(encoding="utf-8").splitlines():
            if '"serving"' in line:
                said: dict[str, Any] = json.loads(line)
                return int(said["port"] if "port" in said else said["url"].rpartition(":")[2])
        if process.poll() is not None:
            raise SystemExit(f"the server ended: {log.read_text(encoding='utf-8')[-2000:]}")
        time.sleep(0.1)
    raise SystemExit(f"the server did not start within {_START_S} s")
