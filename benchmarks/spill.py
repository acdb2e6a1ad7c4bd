"""Real servers of other makers behind one edge: a trace of real arrivals, each server killed on the way.

    python -m benchmarks spill -- --server NAME COMMAND --server NAME COMMAND [--minutes 20] [--rate 1]

Each COMMAND starts a server of SmolLM2 under the model name `smollm2-135m` on the loopback port `{port}`:

    --server llama "llama-server -m smollm2.gguf --alias smollm2-135m --port {port} --parallel 4 --metrics"
    --server vllm "vllm serve smollm2 --served-model-name smollm2-135m --port {port}"

Requests are the Azure conversation trace of 2023, scaled to the rate; their lengths are imposed, so that an answer
which lost or doubled a token on the way shows. One server after the other is killed with SIGKILL while it answers, and
started again at once. A request is lost if it fails or its answer is shorter or longer than asked for, refused if it is
told to come back, and hung if nothing ends it within five minutes. Exits with 1 where any is lost or hung.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks._stamp import commit, machine
from benchmarks.live.client import Seen, Target, ask_one
from benchmarks.live.workload import Ask, Promises, Scale, asks_of, rows_of
from examples.demo.processes import Child, free_port, overspill
from router.upstream.servers.exported_load import read_load

FAMILY = "smollm2-135m"
HUNG_S = 300.0
START_S = 600.0
FAILOVERS = ("mid_stream", "before_first_token")
CONFIG = """\
[agent]
log_format = "json"

[gateway]
port = {port}

[models]
variants = []
preload = []

[router]
ttft_slo_ms = 60000.0
max_wait_ms = 110000.0
max_queue = 1000
"""
BACKEND = """
[[backends]]
name = "{name}"
urls = ["{url}"]

[[backends.models]]
served = "{family}"
variant = "{family}-{name}"
family = "{family}"
quality = 1.0
slots = {slots}
"""


@dataclass
class Server:
    """One server, and how often it was killed."""

    name: str
    command: str
    folder: Path
    kills: int = 0

    def __post_init__(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        argv = shlex.split(self.command.replace("{port}", str(port)))
        self.child = Child(self.name, argv, self.folder / f"{self.name}.log")

    async def ready(self) -> None:
        await self.child.wait_ready(f"{self.url}/health", START_S)


@contextlib.asynccontextmanager
async def started(servers: Sequence[Server], folder: Path, slots: int) -> AsyncIterator[str]:
    """Start the servers and an edge in front of them; yields its URL once it sends to all of them."""
    port = free_port()
    url, config = f"http://127.0.0.1:{port}", folder / "edge.toml"
    entries = [BACKEND.format(name=server.name, url=server.url, family=FAMILY, slots=slots) for server in servers]
    config.write_text(CONFIG.format(port=port) + "".join(entries))
    edge = Child("edge", overspill("edge", "run", "--config", str(config)), folder / "edge.log")
    children = [*(server.child for server in servers), edge]
    try:
        for child in children:
            child.start()
        await asyncio.gather(*(server.ready() for server in servers))
        await edge.wait_ready(f"{url}/health/ready", START_S)
        async with aiohttp.ClientSession() as session:
            ends_s = time.monotonic() + START_S
            while len(await _models(session, url)) < len(servers):
                if time.monotonic() > ends_s:
                    sys.exit(f"the edge did not find all servers; {edge.log_tail()}")
                await asyncio.sleep(0.5)
        yield url
    finally:
        for child in reversed(children):
            await child.stop(grace_s=10.0)


async def _models(session: aiohttp.ClientSession, url: str) -> list[str]:
    async with session.get(f"{url}/v1/models") as reply:
        listed = [str(card["id"]) for card in (await reply.json())["data"]]
    return [name for name in listed if name.startswith(f"{FAMILY}-")]


async def replay(url: str, asks: Sequence[Ask], servers: Sequence[Server]) -> list[Seen]:
    """Send every request when it is due; kill each server once in every part of the trace."""
    timeout = aiohttp.ClientTimeout(total=HUNG_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        began_s = time.monotonic()

        async def one(ask: Ask) -> Seen:
            await asyncio.sleep(began_s + ask.arrival_s - time.monotonic())
            return await ask_one(session, Target("edge", url), ask)

        killer = asyncio.create_task(_kill_in_turn(session, servers, asks[-1].arrival_s))
        try:
            return list(await asyncio.gather(*(one(ask) for ask in asks)))
        finally:
            killer.cancel()
            await asyncio.gather(killer, return_exceptions=True)


async def _kill_in_turn(session: aiohttp.ClientSession, servers: Sequence[Server], span_s: float) -> None:
    """Kill each server twice, evenly spread, each time while it answers, and start it again at once."""
    pause_s = span_s / (2 * len(servers) + 1)
    for number in range(2 * len(servers)):
        server = servers[number % len(servers)]
        await asyncio.sleep(pause_s)
        while not await _answers(session, server):  # noqa: ASYNC110 - of another process, there is no event
            await asyncio.sleep(0.1)
        print(f"kill -9 {server.name}", flush=True)
        server.child.kill()
        server.kills += 1
        server.child.start()
        await server.ready()
        print(f"{server.name} is back", flush=True)


async def _answers(session: aiohttp.ClientSession, server: Server) -> bool:
    async with session.get(f"{server.url}/metrics") as reply:
        return bool(read_load(await reply.text()).running)


async def _failovers(url: str) -> dict[str, int]:
    """Count the attempts that were continued, or begun again, elsewhere."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as reply:
        page = await reply.text()
    lines = [line for line in page.splitlines() if line.startswith("overspill_failovers_total{")]
    return {when: round(sum(float(x.rpartition(" ")[2]) for x in lines if f'"{when}"' in x)) for when in FAILOVERS}


def fate(seen: Seen) -> str:
    """Say what became of a request."""
    if seen.status in {429, 503}:
        return "refused"
    if "Timeout" in seen.error:
        return "hung"
    wanted = seen.ask.body["max_tokens"]
    return "completed" if seen.finish == "length" and seen.tokens == wanted and not seen.error else "lost"


def summary(asks: Sequence[Ask], seen: Sequence[Seen], servers: Sequence[Server]) -> dict[str, Any]:
    fates = Counter(map(fate, seen))
    first_s = sorted(one.first_s for one in seen if one.first_s is not None)
    return {
        "requests": len(asks),
        "minutes": round(asks[-1].arrival_s / 60, 2),
        **{name: fates[name] for name in ("completed", "refused", "lost", "hung")},
        "answer_tokens": sum(one.tokens for one in seen),
        "ttft_p50_s": round(statistics.median(first_s), 3) if first_s else None,
        "ttft_p99_s": round(first_s[int(0.99 * (len(first_s) - 1))], 3) if first_s else None,
        "servers": [
            {
                "server": server.name,
                "killed": server.kills,
                "began": sum(one.variant == f"{FAMILY}-{server.name}" for one in seen),
            }
            for server in servers
        ],
        "errors": sorted({one.error for one in seen if fate(one) in {"lost", "hung"}})[:10],
    }


def asks_for(minutes: float, rate_rps: float, seed: int) -> list[Ask]:
    """Return the trace's requests without any promise; every answer has as many tokens as it asks for."""
    rows = rows_of("azure-conv", max(2, round(minutes * 60 * rate_rps)), seed, Scale(rate_rps=rate_rps))
    asks = asks_of(rows, seed, "spill", Promises())
    return [
        replace(
            ask,
            headers={},
            body={
                "prompt": ask.body["prompt"],
                "max_tokens": ask.answer_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
        for ask in asks
    ]


async def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    servers = [Server(name, command, folder) for name, command in given.server]
    asks = asks_for(given.minutes, given.rate, given.seed)
    async with started(servers, folder, given.slots) as url:
        print(f"{len(asks)} requests in {asks[-1].arrival_s / 60:.1f} minutes", flush=True)
        seen = await replay(url, asks, servers)
        found = summary(asks, seen, servers)
        return {
            **found,
            "failovers": await _failovers(url),
            "rate_rps": given.rate,
            "slots": given.slots,
            "seed": given.seed,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"))
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=1.0, help="mean requests a second")
    parser.add_argument("--slots", type=int, default=2, help="of each server; few, so that the quicker one needs help")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if len(given.server) < 2:
        parser.error("name at least two servers, so that one is left while the other is killed")
    measured = commit()
    with tempfile.TemporaryDirectory(prefix="spill-") as folder:
        found = asyncio.run(measure(given, Path(folder)))
    for name, value in found.items():
        print(f"{name:>16}  {value}")
    if given.json is not None:
        stamped = {"machine": machine(), "commit": measured, **found}
        given.json.write_text(json.dumps(stamped, indent=1) + "\n")
    return int(bool(found["lost"] or found["hung"]))


if __name__ == "__main__":
    sys.exit(main())
