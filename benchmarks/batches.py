"""A batch beside online traffic, and a tier that is killed in the middle of it: what each costs the other.

    python -m benchmarks batches -- [--lines 10000] [--turns 4] [--turn-s 30] [--engine stub real]

With a cloud tier in a process of its own:

1. **Beside**: online requests come in bursts (Poisson within a burst, exponential bursts and silences), by turns with
   and without a batch in progress; the same arrivals in each pair of turns. Told is the time to the first token as the
   client sees it, and how many lines were answered meanwhile.
2. **In the slack**: a batch beside Poisson arrivals that would keep one request running for none, three and seven
   tenths of the time. Told is how many lines a second are answered.
3. **Killed**: a batch, the tier killed with SIGKILL after a third and after two thirds of its lines. Told is how often
   each line stands in the output, and how often it was computed.

The engine is a stub that answers at once, in a process of its own, or SmolLM2 on this machine (with fewer lines). Exits
with 1 where a line is missing or answered twice, p95 is more than 1.2 times as long beside a batch, or an engine that
holds lines up answers less than a third of an idle one's at load 0.3.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks._batch_tier import REAL, Kind, Tier, chat
from benchmarks._stub_engine import MODEL
from examples.demo.processes import Child, free_port

MOST_SLOWDOWN = 1.2
LOADS = (0.0, 0.3, 0.7)
SOME_LOAD, LEAST_SHARE = 0.3, 1 / 3  # of the lines a second of an idle tier, there
SERVICE_PROBES = 7
Measured = tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]


def arrivals(kind: Kind, turn_s: float, seed: int) -> list[float]:
    """Return when online requests come in a turn: bursts of some seconds, and silences."""
    draw, found = random.Random(seed), []  # noqa: S311 - arrivals, no secrets
    at_s = draw.uniform(0.0, 2.0)
    while at_s < turn_s:
        burst_ends_s = at_s + draw.expovariate(1 / 4.0)
        while at_s < min(burst_ends_s, turn_s):
            found.append(at_s)
            at_s += draw.expovariate(kind.rate)
        at_s += draw.expovariate(1 / 4.0)
    return found


async def _ask(http: aiohttp.ClientSession, tier: Tier, text: str) -> float:
    """Return the seconds to the first text, as the client sees it."""
    body = {**chat(tier.kind, text), "stream": True}
    began_s, first_s = time.perf_counter(), None
    async with http.post(f"{tier.url}/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if first_s is None and b'"content":"' in line and b'"content":""' not in line:
                first_s = time.perf_counter()
    if first_s is None:
        raise RuntimeError("an answer without text")
    return first_s - began_s


async def turn(
    http: aiohttp.ClientSession, tier: Tier, turn_s: float, arrivals_s: Sequence[float], tag: str
) -> list[float]:
    """One turn of online traffic; returns the times to the first token."""
    began_s, tasks = time.monotonic(), []
    for number, at_s in enumerate(arrivals_s):
        await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
        tasks.append(asyncio.create_task(_ask(http, tier, f"online {tag} {number} asks for something")))
    found = await asyncio.gather(*tasks)
    await asyncio.sleep(max(0.0, began_s + turn_s - time.monotonic()))
    return list(found)


async def beside(http: aiohttp.ClientSession, tier: Tier, pairs: int, turn_s: float) -> list[dict[str, Any]]:
    """Online traffic by turns with a batch and without."""
    seen: dict[bool, list[float]] = {False: [], True: []}
    lines = 0
    await turn(
        http, tier, turn_s / 2, arrivals(tier.kind, turn_s / 2, 0), "warm-up"
    )  # nobody is measured on a tier that has just started
    for pair in range(1, pairs + 1):
        for batch in (False, True) if pair % 2 else (True, False):
            batch_id = await tier.submit(http, tier.kind.filler, f"filler{pair}") if batch else ""
            if batch:
                await tier.wait(http, batch_id, 1)
            seen[batch] += await turn(http, tier, turn_s, arrivals(tier.kind, turn_s, pair), f"{pair}")
            if batch:
                lines += (await tier.cancel(http, batch_id))["request_counts"]["completed"]
            side = "with" if batch else "without"
            print(f"  {tier.kind.name} pair {pair} {side} a batch: {_ms(seen[batch])}", flush=True)
    return [
        {
            "engine": tier.kind.name,
            "batch": batch,
            "requests": len(times),
            "ttft_p50_ms": round(_quantile(times, 0.5) * 1e3, 2),
            "ttft_p95_ms": round(_quantile(times, 0.95) * 1e3, 2),
            "seconds": pairs * turn_s,
            "lines_answered": lines if batch else 0,
        }
        for batch, times in seen.items()
    ]


async def in_slack(http: aiohttp.ClientSession, tier: Tier, turn_s: float) -> list[dict[str, Any]]:
    """Lines beside more and more online traffic."""
    took, rows = [], []
    for number in range(SERVICE_PROBES):
        began_s = time.perf_counter()
        await _ask(http, tier, f"alone {number}")
        took.append(time.perf_counter() - began_s)
    service_s = statistics.median(took)
    for load in LOADS:
        batch_id = await tier.submit(http, tier.kind.filler, f"slack{load}")
        before = (await tier.wait(http, batch_id, 1))["request_counts"]["completed"]
        began_s = time.perf_counter()
        times = await turn(http, tier, turn_s, steady(load / service_s, turn_s), f"load {load}")
        lasted_s = time.perf_counter() - began_s
        done = (await tier.batch(http, batch_id))["request_counts"]["completed"] - before
        await tier.cancel(http, batch_id)
        rows.append(
            {
                "engine": tier.kind.name,
                "load": load,
                "requests": len(times),
                "ttft_p95_ms": round(_quantile(times, 0.95) * 1e3, 2) if len(times) > 1 else None,
                "lines_per_s": round(done / lasted_s, 2),
            }
        )
        print(f"  {tier.kind.name} at load {load}: {rows[-1]['lines_per_s']} lines/s", flush=True)
    return rows


def steady(rate: float, turn_s: float) -> list[float]:
    """Return Poisson arrivals of so many a second."""
    draw, found, at_s = random.Random(1), [], 0.0  # noqa: S311 - arrivals, no secrets
    while rate and (at_s := at_s + draw.expovariate(rate)) < turn_s:
        found.append(at_s)
    return found


async def killed(http: aiohttp.ClientSession, tier: Tier, asked: str) -> dict[str, Any]:
    """A batch, and two kills of the tier in the middle of it."""
    lines, began_s = tier.kind.lines, time.monotonic()
    batch_id = await tier.submit(http, lines, "kept")
    at = []
    for share in (lines // 3, 2 * lines // 3):
        batch = await tier.wait(http, batch_id, share)
        tier.child.kill()
        at.append(batch["request_counts"]["completed"])
        print(f"  {tier.kind.name}: killed after {at[-1]} of {lines} lines", flush=True)
        await tier.start(http)
    batch = await tier.wait(http, batch_id, None)
    async with http.get(f"{tier.url}/v1/files/{batch['output_file_id']}/content") as reply:
        answers = [json.loads(line) for line in (await reply.text()).splitlines()]
    times = Counter(answer["custom_id"] for answer in answers)
    computed = await _computed(http, asked)
    return {
        "engine": tier.kind.name,
        "lines": lines,
        "killed_after": at,
        "status": batch["status"],
        "answered_once": sum(count == 1 for count in times.values()),
        "answered_more_than_once": sum(count > 1 for count in times.values()),
        "missing": sum(f"kept-{number}" not in times for number in range(lines)),
        "wrong": sum(not _belongs(tier, answer) for answer in answers) if asked else None,
        "computed": computed,
        "seconds": round(time.monotonic() - began_s, 1),
    }


async def _computed(http: aiohttp.ClientSession, asked: str) -> int | None:
    """How many answers to lines the stub has computed to their end; None where nobody counts them."""
    if not asked:
        return None
    async with http.get(asked) as reply:
        counts: dict[str, int] = await reply.json()
        return sum(count for text, count in counts.items() if text.startswith("kept"))


def _belongs(tier: Tier, answer: dict[str, Any]) -> bool:
    """Whether an answer of the stub is that to its own line."""
    number = int(answer["custom_id"].rpartition("-")[2])
    said = answer["response"]["body"]["choices"][0]["message"]["content"]
    return bool(said == tier.line(number, "kept")["body"]["messages"][0]["content"])


@contextlib.asynccontextmanager
async def engine(kind: Kind, folder: Path) -> AsyncIterator[str]:
    """The stub's URL while it runs; empty for an engine of the tier's own."""
    if kind.model != MODEL:
        yield ""
        return
    port = free_port()
    child = Child("stub", [sys.executable, "-m", "benchmarks._stub_engine", str(port)], folder / "stub.log")
    child.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        child.kill()


async def measure(kind: Kind, pairs: int, turn_s: float) -> Measured:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timeout = aiohttp.ClientTimeout(total=600)
        async with engine(kind, folder) as stub_url, aiohttp.ClientSession(timeout=timeout) as http:
            tier = Tier(folder, kind, stub_url)
            try:
                await tier.start(http)
                rows = await beside(http, tier, pairs, turn_s)
                slack = await in_slack(http, tier, turn_s)
                return rows, slack, await killed(http, tier, f"{stub_url}/asked" if stub_url else "")
            finally:
                tier.child.kill()


def _share(slack: Sequence[dict[str, Any]]) -> float:
    """Return the lines a second beside some load, in those of an idle tier."""
    rate = {row["load"]: row["lines_per_s"] for row in slack}
    return float(rate[SOME_LOAD] / max(rate[0.0], 1e-9))


def _quantile(times: Sequence[float], share: float) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[round(share * 100) - 1]


def _ms(times: Sequence[float]) -> str:
    return f"p50 {_quantile(times, 0.5) * 1e3:.1f} ms, p95 {_quantile(times, 0.95) * 1e3:.1f} ms of {len(times)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lines", type=int, default=10_000, help="of the batch on the stub")
    parser.add_argument("--real-lines", type=int, default=60, help="of the batch on SmolLM2")
    parser.add_argument("--turns", type=int, default=4, help="pairs of turns")
    parser.add_argument("--turn-s", type=float, default=30.0)
    parser.add_argument("--engine", nargs="+", choices=("stub", "real"), default=["stub", "real"])
    options = parser.parse_args()
    kinds = {
        "stub": Kind("stub", MODEL, options.lines, 12_000, 5.0, 64),
        "real": Kind("SmolLM2-135M", REAL, options.real_lines, 2_000, 0.8, 16, holds_up=True),
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # the tier of a run that is ended goes with it
    rows, slack, kills, ratios, enough = [], [], [], {}, True
    for name in options.engine:
        print(f"{kinds[name].name}:", flush=True)
        beside_rows, slack_rows, kill = asyncio.run(measure(kinds[name], options.turns, options.turn_s))
        without, with_batch = beside_rows
        ratios[kinds[name].name] = round(with_batch["ttft_p95_ms"] / without["ttft_p95_ms"], 3)
        rows += beside_rows
        slack += slack_rows
        kills.append(kill)
        enough = enough and (not kinds[name].holds_up or _share(slack_rows) >= LEAST_SHARE)
    print(f"\n{'engine':14}{'batch':>7}{'online':>8}{'p50 ms':>9}{'p95 ms':>9}{'lines':>8}{'p95 / without':>15}")
    for row in rows:
        ratio = f"{ratios[row['engine']]:.2f}" if row["batch"] else ""
        shown = f"{row['engine']:14}{'yes' if row['batch'] else 'no':>7}{row['requests']:>8}{row['ttft_p50_ms']:>9.1f}"
        print(f"{shown}{row['ttft_p95_ms']:>9.1f}{row['lines_answered']:>8}{ratio:>15}")
    for row in slack:
        print(f"{row['engine']}: {row['lines_per_s']} lines/s at load {row['load']} ({row['requests']} online)")
    for kill in kills:
        print(
            f"{kill['engine']}: {kill['lines']} lines, killed after {' and '.join(map(str, kill['killed_after']))}: "
            f"{kill['answered_once']} answered once, {kill['answered_more_than_once']} more than once, "
            f"{kill['missing']} missing, {kill['computed']} computed, in {kill['seconds']} s"
        )
    if options.json:
        options.json.write_text(
            json.dumps({"online": rows, "p95_ratio": ratios, "slack": slack, "killed": kills}, indent=1)
        )
    sound = all(k["answered_once"] == k["lines"] and not k["wrong"] for k in kills)
    return 0 if sound and enough and all(ratio <= MOST_SLOWDOWN for ratio in ratios.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
