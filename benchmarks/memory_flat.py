"""Whether a tier's memory stays flat however many requests it has served: the real dispatcher, on a virtual clock.

    python -m benchmarks memory_flat -- [--requests N]

Twice as many requests come as four replicas can serve, from ever new callers, in ever new sessions, some for models
that nobody serves; some fail, some are cancelled. Every table that learns from them is bounded and fills within the
first fifth; from there on the resident memory of the process must not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import structlog

from benchmarks.long_queue import rung_of_two
from router.base.errors import OverspillError, ReplicaBroken
from router.dispatch.dispatcher import Dispatcher
from router.simulation.loop import LoopClock, VirtualLoop, run_virtually
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import TextPrompt
from router.values.replica import ReplicaSnapshot
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import Fairness, RouterSettings

SLOTS = 4
TOKEN_S = 0.01
CHUNK_TOKENS = 20
SAMPLES = 50
SETTLED = 0.2  # of the requests: by then every bounded table is full
GROWTH = 0.05  # of the memory at that time, that counts as none


class Engine:
    """A rung that answers in chunks; one answer in two hundred breaks off."""

    link = None

    def __init__(self, index: int, chance: random.Random) -> None:
        self.info = rung_of_two(index, 1.0 / TOKEN_S)
        self._chance = chance
        self._running = 0

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(self.info, True, SLOTS, running=self._running)

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:  # noqa: ARG002
        self._running += 1
        try:
            for _ in range(self._chance.randint(1, 5)):
                await asyncio.sleep(CHUNK_TOKENS * TOKEN_S)
                yield TokenChunk("x", CHUNK_TOKENS)
            if self._chance.random() < 0.005:
                raise ReplicaBroken("the stream ended early")
            yield TokenChunk("x", finish_reason=FinishReason.STOP)
        finally:
            self._running -= 1


def request(index: int, now_s: float, chance: random.Random) -> InferenceRequest:
    return InferenceRequest(
        request_id=f"request-{index}",
        model=f"unknown-{index}" if index % 100 == 0 else "family",
        prompt=TextPrompt("x"),
        sampling=SamplingParams(stop=(f"stop-{index}",) if index % 50 == 0 else ()),
        objective=Objective(
            deadline_s=chance.choice((None, 2.0, 5.0)), priority=chance.randint(-1, 1), session=f"session-{index // 3}"
        ),
        prompt_tokens=int(chance.lognormvariate(5.0, 1.0)),
        accepted_at_s=now_s,
        caller=f"caller-{index // 5}",
    )


async def ask(dispatcher: Dispatcher, asked: InferenceRequest, outcomes: Counter[str]) -> None:
    """Be one caller; one in fifty leaves after its first text."""
    outcome = "answered"
    try:
        answer = await dispatcher.start(asked)
        async with contextlib.aclosing(answer.chunks) as chunks:
            async for _ in chunks:
                if hash(asked.request_id) % 50 == 0:
                    outcome = "left"
                    break
    except OverspillError as error:
        outcome = error.code
    outcomes[outcome] += 1


async def serve(loop: VirtualLoop, requests: int) -> dict[str, Any]:
    """Serve so many requests; sample the memory on the way."""
    chance, outcomes, samples = random.Random(0), Counter[str](), []  # noqa: S311 - a workload, no secret
    settings = RouterSettings(fairness=Fairness(callers=4.0, oldest_first=0.1))
    mean_gap_s = 3.0 * CHUNK_TOKENS * TOKEN_S / (2 * SLOTS) / 2.0  # twice what two devices can do
    began = time.perf_counter()
    async with Dispatcher([Engine(i, chance) for i in range(4)], settings, clock=LoopClock(loop)) as dispatcher:
        tasks: set[asyncio.Task[None]] = set()
        for index in range(requests):
            task = loop.create_task(ask(dispatcher, request(index, loop.time(), chance), outcomes))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(chance.expovariate(1.0 / mean_gap_s))
            if (index + 1) % (requests // SAMPLES) == 0:
                gc.collect()
                samples.append({"requests": index + 1, "rss_mib": round(rss_mib(), 1)})
                print(
                    f"{index + 1:>9} {samples[-1]['rss_mib']:>8} MiB {time.perf_counter() - began:>8.0f} s", flush=True
                )
        await asyncio.gather(*tasks)
    settled = samples[int(SETTLED * len(samples)) - 1]["rss_mib"]
    growth = samples[-1]["rss_mib"] / settled - 1.0
    return {
        "requests": requests,
        "settled_rss_mib": settled,
        "last_rss_mib": samples[-1]["rss_mib"],
        "growth": round(growth, 4),
        "flat": growth <= GROWTH,
        "outcomes": dict(outcomes),
        "samples": samples,
    }


def rss_mib() -> float:
    """Resident memory of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main() -> int:
    """Print the samples and the growth, and write the JSON where asked to; fails where memory grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    row = run_virtually(lambda loop: serve(loop, arguments.requests))
    print({name: value for name, value in row.items() if name != "samples"})
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(row, indent=1) + "\n")
    return 0 if row["flat"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
