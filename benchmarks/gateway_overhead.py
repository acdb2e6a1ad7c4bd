"""What the edge costs as a pass-through: throughput, and its own processor time a request and a streamed token.

python -m benchmarks.gateway_overhead [--json FILE] [--against-rev REV | --against PATH] [--rounds N] [--seconds S]

The real agent, started by its command in a process of its own without local models, in front of the real gateway with
an engine that answers at once, in another process. Only the agent's processor time is counted. With `--against` a
second agent of another checkout stands beside it, in front of the same upstream, and the two are measured by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from router.base import logs
from router.base.clock import MonotonicClock
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.telemetry import Telemetry
from router.gateway.app import create_app
from router.gateway.deps import GatewayDeps
from router.gateway.listener import ConnectionLimits, Listener, bind
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import FinishReason, InferenceRequest, Prompt, PromptSize, TokenChunk
from router.values.settings import RouterSettings

HERE = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m"
CONCURRENCY = (1, 16, 64)
JSON_TOKENS, STREAM_TOKENS = 1, 32
START_S = 60.0
WARM_UP_S = 0.5


class InstantEngine:
    """A replica that has its tokens ready, and hands out one in every turn of its event loop."""

    link = None

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self.info = ReplicaInfo(
            replica_id="cloud/instant",
            endpoint="local",
            tier="cloud",
            remote=False,
            family=MODEL,
            variant=f"{MODEL}-instant",
            rung=0,
            quality=1.0,
            context_tokens=8192,
            prior=SpeedPrior(100_000.0, 10_000.0, 0.0),
        )

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(self.info, available=True, slots=1024)

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        for _ in range((request.sampling.max_tokens or 1) - 1):
            yield TokenChunk(" word", 1)
            await asyncio.sleep(self._token_s)
        yield TokenChunk(" end", 1, finish_reason=FinishReason.LENGTH, prompt_tokens=request.prompt_tokens)


class FixedCounter:
    """A tokenizer that costs nothing."""

    def count(self, model: str, prompt: Prompt) -> PromptSize:  # noqa: ARG002
        return PromptSize(40)


async def serve_upstream(port: int, token_s: float) -> None:
    """Be the upstream tier, until the process is ended."""
    clock, telemetry, replica = MonotonicClock(), Telemetry(), InstantEngine(token_s)
    async with Dispatcher([replica], RouterSettings(), clock=clock, telemetry=telemetry) as dispatcher:
        deps = GatewayDeps(
            dispatcher=dispatcher,
            prompts=FixedCounter(),
            tier="cloud",
            telemetry=telemetry,
            clock=clock,
            models=lambda: [replica.info],
        )
        listener = Listener(create_app(deps), ConnectionLimits())
        async with listener.running(bind("127.0.0.1", port, "benchmark")) as serving:
            await serving


@dataclass
class Agent:
    """One running agent of one checkout."""

    label: str
    checkout: Path
    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


@dataclass
class Sample:
    """What one interval of load showed."""

    requests: int
    seconds: float
    cpu_s: float


@dataclass
class Load:
    """A given number of callers that each send the next request as soon as the last answer is whole."""

    port: int
    callers: int
    stream: bool
    ends_s: float = 0.0
    answered: int = 0
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        tokens = STREAM_TOKENS if self.stream else JSON_TOKENS
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "stream": self.stream,
            "max_tokens": tokens,
        }
        content = json.dumps(body).encode()
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(content), content)
        )
        self.words = tokens - 1

    async def run(self, seconds: float) -> None:
        self.ends_s = time.perf_counter() + seconds
        loop = asyncio.get_running_loop()
        callers = [
            (await loop.create_connection(lambda: _Caller(self), "127.0.0.1", self.port))[1]
            for _ in range(self.callers)
        ]
        await asyncio.gather(*(caller.done for caller in callers))
        if self.failures:
            raise SystemExit(f"{len(self.failures)} requests failed, the first: {self.failures[0]}")


class _Caller(asyncio.Protocol):
    """One connection. Any answer but a whole one of the right length is a failure."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._got = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not self._is_whole():
            return
        words = self._got.count(b" word")
        if not self._got.startswith(b"HTTP/1.1 200") or words != self._load.words or b" end" not in self._got:
            self._load.failures.append(self._got[:300].decode("latin-1"))
            self._transport.close()
            return
        self._load.answered += 1
        self._got.clear()
        if time.perf_counter() < self._load.ends_s:
            self._transport.write(self._load.request)
        else:
            self._transport.close()

    def _is_whole(self) -> bool:
        if self._load.stream and self._got.startswith(b"HTTP/1.1 200"):
            return self._got.endswith(b"\r\n0\r\n\r\n")
        head, found, body = bytes(self._got).partition(b"\r\n\r\n")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        return bool(found) and len(body) >= int(length.partition(b":")[2])

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None or self._got:
            self._load.failures.append(f"the connection broke: {error}")
        if not self.done.done():
            self.done.set_result(None)


async def measure(agent: Agent, callers: int, seconds: float, *, stream: bool) -> Sample:
    """Load one agent for a while."""
    load = Load(agent.port, callers, stream)
    cpu_s, began_s = agent.cpu_s(), time.perf_counter()
    await load.run(seconds)
    return Sample(load.answered, time.perf_counter() - began_s, agent.cpu_s() - cpu_s)


def compare(agents: list[Agent], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measure every agent by turns; one row an agent, kind of answer and number of callers."""
    samples: dict[tuple[str, bool, int], list[Sample]] = {}
    for agent in agents:
        for stream in (False, True):
            uvloop.run(measure(agent, 8, WARM_UP_S, stream=stream))
    for _ in range(rounds):
        for stream in (False, True):
            for callers in CONCURRENCY:
                for agent in agents:
                    sample = uvloop.run(measure(agent, callers, seconds, stream=stream))
                    samples.setdefault((agent.label, stream, callers), []).append(sample)
    rows = [_row(*key, found) for key, found in samples.items()]
    for row in rows:
        if row["answer"] == "stream":
            plain = next(
                r for r in rows if (r["version"], r["callers"], r["answer"]) == (row["version"], row["callers"], "json")
            )
            more_ms = row["cpu_ms_a_request"] - plain["cpu_ms_a_request"]
            row["cpu_us_a_token"] = round(more_ms * 1e3 / (STREAM_TOKENS - JSON_TOKENS), 1)
    return rows


def _row(version: str, stream: bool, callers: int, samples: list[Sample]) -> dict[str, Any]:
    rate = statistics.median(sample.requests / sample.seconds for sample in samples)
    return {
        "version": version,
        "answer": "stream" if stream else "json",
        "callers": callers,
        "requests_per_s": round(rate, 1),
        "tokens_per_s": round(rate * (STREAM_TOKENS if stream else JSON_TOKENS)),
        "cpu_ms_a_request": round(statistics.median(s.cpu_s / s.requests for s in samples) * 1e3, 3),
        "cpu_us_a_token": None,
    }


def summarise(rows: list[dict[str, Any]], label: str, other: str | None) -> dict[str, Any]:
    """Say how throughput holds from one caller to many, and what is left of the other version's processor time."""
    found: dict[str, Any] = {}
    by_key = {(row["version"], row["answer"], row["callers"]): row for row in rows}
    for answer in ("json", "stream"):
        rates = [by_key[label, answer, callers]["requests_per_s"] for callers in CONCURRENCY]
        found[f"{answer}_throughput_from_1_to_{CONCURRENCY[-1]}"] = round(rates[-1] / rates[0], 2)
        costs = [by_key[label, answer, callers]["cpu_ms_a_request"] for callers in CONCURRENCY]
        found[f"{answer}_requests_a_cpu_second_from_1_to_{CONCURRENCY[-1]}"] = round(costs[0] / costs[-1], 2)
    for answer, figure in (("json", "cpu_ms_a_request"), ("stream", "cpu_us_a_token")) if other else ():
        mine = statistics.mean(by_key[label, answer, callers][figure] for callers in CONCURRENCY)
        theirs = statistics.mean(by_key[other, answer, callers][figure] for callers in CONCURRENCY)
        found[f"{figure}_share"] = round(mine / theirs, 2)
    return found


@contextlib.contextmanager
def child(command: list[str], checkout: Path, port: int, ready: str) -> Iterator[psutil.Process]:
    """Run a process of a checkout until the block ends; enters it once `ready` answers with 200."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=output, stderr=output)
        try:
            ends_s = time.monotonic() + START_S
            while not _answers(port, ready):
                if process.poll() is not None or time.monotonic() > ends_s:
                    output.seek(0)
                    raise SystemExit(f"{' '.join(command)} did not start:\n{output.read().decode()[-4000:]}")
                time.sleep(0.1)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as reply:
            return reply.status == 200 and (path != "/v1/models" or MODEL.encode() in reply.read())
    except OSError:
        return False


def agent_command(folder: Path, label: str, port: int, upstream_port: int) -> list[str]:
    config = folder / f"{label}.toml"
    config.write_text(
        f'[agent]\nlog_format = "json"\n[gateway]\nport = {port}\n[models]\nvariants = []\npreload = []\n'
        f'[upstream]\nurl = "http://127.0.0.1:{upstream_port}"\n'
    )
    return [sys.executable, "overspill.py", "edge", "run", "--config", str(config)]


@contextlib.contextmanager
def other_checkout(revision: str | None, path: Path | None) -> Iterator[Path | None]:
    """The checkout to compare with: a folder, or a revision put into a temporary work tree."""
    if revision is None:
        yield path.resolve() if path is not None else None
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "checkout"
        subprocess.run(
            ["git", "-C", str(HERE), "worktree", "add", "--detach", str(tree), revision],
            check=True,
            capture_output=True,
        )
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", str(HERE), "worktree", "remove", "--force", str(tree)], check=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def show(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    columns = ("version", "answer", "callers", "requests_per_s", "tokens_per_s", "cpu_ms_a_request", "cpu_us_a_token")
    print("".join(f"{column:>18}" for column in columns))
    for row in sorted(rows, key=lambda r: (r["answer"], r["callers"], r["version"])):
        print("".join(f"{'' if row[column] is None else row[column]:>18}" for column in columns))
    for name, value in summary.items():
        print(f"{name}: {value}")


def main() -> None:
    """Print the table, and write the JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against-rev", help="a revision of this repository to compare with")
    parser.add_argument("--against", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of load in each round, for each row")
    parser.add_argument("--token-ms", type=float, default=0.0, help="pause of the engine before each further token")
    parser.add_argument("--serve-upstream", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_upstream:
        logs.configure("info", "json", fd=os.open(os.devnull, os.O_WRONLY))
        uvloop.run(serve_upstream(arguments.serve_upstream, arguments.token_ms / 1e3))
        return
    upstream_port = free_port()
    upstream = [sys.executable, "-m", "benchmarks.gateway_overhead", "--serve-upstream", str(upstream_port)]
    upstream += ["--token-ms", str(arguments.token_ms)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkout = stack.enter_context(other_checkout(arguments.against_rev, arguments.against))
        stack.enter_context(child(upstream, HERE, upstream_port, "/health/ready"))
        other = (arguments.against_rev or "other") if checkout is not None else None
        agents = []
        for label, tree in (("this", HERE), (other, checkout)):
            if label is not None and tree is not None:
                port = free_port()
                command = agent_command(folder, label, port, upstream_port)
                agents.append(Agent(label, tree, port, stack.enter_context(child(command, tree, port, "/v1/models"))))
        rows = compare(agents, arguments.rounds, arguments.seconds)
    summary = summarise(rows, "this", other)
    show(rows, summary)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rows": rows, "summary": summary}, indent=2) + "\n")


if __name__ == "__main__":
    main()
