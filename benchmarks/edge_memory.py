"""What an edge agent holds in memory, from an idle process to 30 answers: a table, and JSON with --json FILE.

Each row is measured in a daemon process of its own, started as a user would start it, and read with psutil.

    python -m benchmarks edge_memory
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

LIMIT_IDLE_MB, LIMIT_ANSWERED_MB = 150, 350
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LONG_PROMPT = [{"role": "user", "content": "Summarise this: " + "The quick brown fox jumps over the lazy dog. " * 120}]


@dataclass(frozen=True)
class Row:
    """One reading, in megabytes (10^6): resident, its anonymous and its file-backed part, and the peak so far."""

    state: str
    rss_mb: float
    anonymous_mb: float
    file_mb: float
    peak_mb: float


def reading(pid: int, state: str) -> Row:
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        if ":" in line
    )

    def mb(name: str) -> float:
        return round(int(status[name].split()[0]) * 1024 / 1e6, 1)

    rss_mb = round(psutil.Process(pid).memory_info().rss / 1e6, 1)
    return Row(state, rss_mb, mb("RssAnon"), mb("RssFile"), mb("VmHWM"))


class Daemon:
    """`overspill edge run` as a child process. Use as a context."""

    def __init__(self, variants: list[str], preload: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._variants, self._preload = variants, preload

    def __enter__(self) -> Daemon:
        env = {
            **os.environ,
            "OVERSPILL_EDGE__MODELS__VARIANTS": json.dumps(self._variants),
            "OVERSPILL_EDGE__MODELS__PRELOAD": json.dumps(self._preload),
            "OVERSPILL_EDGE__AGENT__LOG_LEVEL": "warning",
        }
        command = [sys.executable, "-m", "overspill", "edge", "run", "--port", str(self.port)]
        self.process = subprocess.Popen(command, env=env)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        try:
            # An agent that could answer nothing is not ready.
            self._wait("/health/ready" if self._variants else "/health/live")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self, page: str) -> None:
        for _ in range(600):
            if self.process.poll() is not None:
                raise RuntimeError(f"the agent ended with {self.process.returncode}")
            try:
                if self.client.get(page).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"the agent did not say 200 on {page} within 60 s")

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(30)

    def ask(self, messages: list[dict[str, str]], model: str, max_tokens: int = 32) -> str:
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
        reply = self.client.post("/v1/chat/completions", json=body)
        reply.raise_for_status()
        return str(reply.json()["choices"][0]["message"]["content"])

    def row(self, state: str, settle_s: float = 1.0) -> Row:
        time.sleep(settle_s)  # an idle model gives its buffers back after half a second
        return reading(self.process.pid, state)


def measure() -> list[Row]:
    rows = []
    with Daemon([], []) as daemon:
        rows.append(daemon.row("idle, without a model"))
    both = ["smollm2-135m-int8", "smollm2-135m-pruned-int8"]
    with Daemon(both[:1], both[:1]) as daemon:
        rows.append(daemon.row("INT8 loaded"))
        assert "Paris" in daemon.ask(QUESTION, both[0])
        rows.append(daemon.row("INT8, one answer given"))
        daemon.ask(LONG_PROMPT, both[0])
        rows.append(daemon.row("INT8, after a prompt of 1,200 tokens"))
        for _ in range(28):
            daemon.ask(QUESTION, both[0])
        rows.append(daemon.row("INT8, after 30 answers"))
    with Daemon(both, both[:1]) as daemon:
        for variant in both:
            daemon.ask(QUESTION, variant)
        rows.append(daemon.row("both rungs loaded, one answer each"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    target = parser.parse_args().json
    rows = measure()
    print(f"{'state':<40}{'RSS MB':>9}{'anonymous':>11}{'file':>8}{'peak':>8}")
    for row in rows:
        print(f"{row.state:<40}{row.rss_mb:>9}{row.anonymous_mb:>11}{row.file_mb:>8}{row.peak_mb:>8}")
    kept = rows[0].rss_mb <= LIMIT_IDLE_MB and rows[2].rss_mb <= LIMIT_ANSWERED_MB
    print(f"limits: idle <= {LIMIT_IDLE_MB} MB, one answer <= {LIMIT_ANSWERED_MB} MB: {'kept' if kept else 'BROKEN'}")
    if target:
        target.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
