"""The embedded engine under random load for a long time: does its memory stay, and does every request end?

    python -m benchmarks engine_soak -- [--minutes N] [--dtype int8]

SmolLM2-135M in the engine's own process. Callers come and go at random: prompts of 8 to 1,200 tokens, some of which
begin alike, answers of 1 to 200, some given up in their middle, of three priorities, so that sequences are preempted.
The memory of the process is read every five seconds; the first quarter of the time, in which caches fill, does not
count. Fails if the memory leaves ±5 % of its median, if a request fails, or if a KV block is not free at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.live.running import run
from cloud_tier.engine.protocol import EngineConfig, EngineRequest
from cloud_tier.engine.torch_engine import TorchEngine
from models.store.store import ModelStore
from router.base.clock import MonotonicClock
from router.values.sampling import SamplingParams

FAMILY = "smollm2-135m"
VOCAB = 49_000
CALLERS = 24
FLAT = 0.05
SETTLING_SHARE = 0.25


@dataclass
class Seen:
    """What happened: how requests ended, tokens of answers, memory of the engine's process over time in bytes."""

    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    memory_bytes: list[tuple[float, int]] = field(default_factory=list)


async def caller(engine: TorchEngine, number: int, until_s: float, seen: Seen) -> None:
    chance = random.Random(number)  # noqa: S311 (a benchmark's load)
    while time.monotonic() < until_s:
        begin = [3 + chance.randrange(4)] * chance.choice((0, 0, 64, 200))
        ids = begin + [chance.randrange(VOCAB) for _ in range(chance.choice((8, 40, 150, 150, 400, 1000)))]
        leave = chance.randint(1, 100) if chance.random() < 0.1 else None
        request = EngineRequest(
            f"soak-{number}",
            tuple(ids),
            SamplingParams(temperature=chance.choice((0.0, 0.8)), ignore_eos=True),
            chance.randint(1, 200),
            priority=chance.choice((-1, 0, 0, 0, 1)),
            arrival_s=time.monotonic(),
        )
        got = 0
        try:
            async with contextlib.aclosing(engine.generate(request)) as stream:
                async for chunk in stream:
                    got += len(chunk.token_ids)
                    if leave is not None and got >= leave:
                        break
            seen.ends["given up" if leave is not None and got >= leave else "whole"] += 1
        except Exception as error:  # noqa: BLE001 (counted, and told at the end)
            seen.ends[f"{type(error).__name__}: {error}"[:120]] += 1
        seen.tokens += got
        if chance.random() < 0.2:
            await asyncio.sleep(chance.random())


async def watch(engine: TorchEngine, began_s: float, until_s: float, seen: Seen) -> None:
    info = engine.info
    if info is None:
        raise RuntimeError("the engine is not ready")
    process = psutil.Process(info.pids[0])
    while time.monotonic() < until_s:
        seen.memory_bytes.append((time.monotonic() - began_s, process.memory_info().rss))
        await asyncio.sleep(5.0)


async def soak(minutes: float, dtype: str) -> dict[str, object]:
    config = EngineConfig(
        weights=str(ModelStore().source_path(FAMILY)),
        dtype=dtype,  # type: ignore[arg-type]
        max_running=16,
        kv_cache_tokens=8192,
    )
    engine, seen = TorchEngine(config, MonotonicClock()), Seen()
    await engine.start()
    try:
        began_s = time.monotonic()
        until_s = began_s + 60 * minutes
        await asyncio.gather(
            watch(engine, began_s, until_s, seen), *(caller(engine, n, until_s, seen) for n in range(CALLERS))
        )
        await asyncio.sleep(2.0)
        load = engine.load()
    finally:
        await engine.stop()
    settled = [rss for at_s, rss in seen.memory_bytes if at_s >= SETTLING_SHARE * 60 * minutes]
    middle = statistics.median(settled)
    return {
        "dtype": dtype,
        "minutes": minutes,
        "callers": CALLERS,
        "ends": dict(seen.ends),
        "tokens": seen.tokens,
        "restarts": engine.restarts,
        "preemptions": load.preemptions,
        "kv_blocks_lost": load.kv_blocks_total - load.kv_blocks_free,
        "memory_median_mbytes": round(middle / 1e6, 1),
        "memory_spread_pct": [round(100 * (edge / middle - 1), 2) for edge in (min(settled), max(settled))],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--dtype", default="int8")
    wanted = parser.parse_args()
    found = run(soak(wanted.minutes, wanted.dtype), 60 * wanted.minutes + 600)
    for name, value in found.items():
        print(f"{name:22} {value}")
    if wanted.json:
        wanted.json.write_text(json.dumps(found, indent=1) + "\n")
    spread = found["memory_spread_pct"]
    assert isinstance(spread, list)
    ends = found["ends"]
    assert isinstance(ends, dict)
    bad = [
        text
        for text, is_bad in (
            (f"memory left ±{FLAT:.0%}", max(map(abs, spread)) > 100 * FLAT),
            ("requests failed", bool(set(ends) - {"whole", "given up"})),
            ("KV blocks were lost", found["kv_blocks_lost"] != 0),
            ("the engine was restarted", found["restarts"] != 0),
        )
        if is_bad
    ]
    print("; ".join(bad) or "flat")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
