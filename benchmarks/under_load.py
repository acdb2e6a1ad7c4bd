"""What becomes of requests as the load rises: answered in full here or in the cloud, degraded, or refused.

    python -m benchmarks under_load          # the JSON and its picture, in benchmarks/results/
    python -m benchmarks under_load -- [--rates R …] [--step-s S] [--tensor-parallel N]

A real edge agent (INT8 and pruned INT8 on ONNX Runtime) and a real cloud tier (float engines on torch) as processes of
their own, asked over HTTP through the `openai` client. Requests arrive at random times (Poisson, given how many come;
seeded), at one rate for `--step-s` seconds; between two rates the tiers run empty. Each asks for 24, 48 or 96 tokens,
is made to generate all of them, and wants the first within `TTFT_SLO_MS` and the last within `DEADLINE_MS`. Before the
first rate as many callers as there are slots, who want the same and promise themselves nothing, tell how many tokens a
second both tiers write at most: of a step that asks for more, somebody has to go without, whoever decides. The picture
is drawn beside the JSON where matplotlib is installed (extra `dev`). Both tiers and this load generator share the
machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import openai
import psutil

from benchmarks._stamp import machine
from examples.demo.scenes import SHORT
from examples.demo.stack import Stack, StackOptions, fastest_dtype
from examples.demo.traffic import Ask, Reply, send
from router.values.settings import RouterSettings

RATES_PER_S = (0.5, 1.0, 1.5, 2.0, 3.0, 4.5, 6.5, 9.0)
ANSWER_TOKENS = (24, 48, 96)
TTFT_SLO_MS = 1_500
DEADLINE_MS = 8_000
SEED = 20261121
REST_S = 1.5
SLOTS = 12  # 4 of the device, 8 of the cloud: examples/demo/stack.py
FULL_S = 20.0

# What became of a request, with its colour in the picture.
FATES = {
    "device": ("in full, on the device", "#2a7f62"),
    "cloud": ("in full, in the cloud", "#3b7fb5"),
    "device_degraded": ("smaller or shorter, on the device", "#9ccfb8"),
    "cloud_degraded": ("smaller or shorter, in the cloud", "#a9cbe6"),
    "refused": ("refused, told when to come back", "#c4c8cc"),
    "failed": ("failed", "#c0392b"),
}


def fate_of(reply: Reply) -> str:
    """Name what became of a request, a key of `FATES`."""
    if not reply.served:
        return "refused" if reply.refused_properly else "failed"
    tier = "device" if reply.tier == "edge" else "cloud"
    whole = reply.outcome == "completed" and reply.completion_tokens >= reply.ask.max_tokens
    return tier if whole else f"{tier}_degraded"


@dataclass
class Timed:
    """A reply, and when its last text came, in milliseconds from its start; the event that closes it comes later."""

    reply: Reply
    last_text_ms: float = 0.0
    chars: int = 0

    @property
    def kept(self) -> bool:
        """Whether first and last token came in time. A whole and a degraded answer count alike; a refusal does not."""
        ttft_ms = self.reply.ttft_ms
        return self.reply.served and ttft_ms is not None and ttft_ms <= TTFT_SLO_MS and self.last_text_ms <= DEADLINE_MS


def asks_of(rate_per_s: float, step_s: float) -> list[tuple[float, Ask]]:
    """Return when to send what: seconds from the beginning, ascending; as many as the rate says."""
    dice = random.Random(f"{SEED} {rate_per_s}")  # noqa: S311
    headers = {"x-overspill-ttft-slo-ms": str(TTFT_SLO_MS), "x-overspill-deadline-ms": str(DEADLINE_MS)}
    arrivals_s = sorted(dice.uniform(0.0, step_s) for _ in range(round(rate_per_s * step_s)))
    lengths = [ANSWER_TOKENS[number % len(ANSWER_TOKENS)] for number in range(len(arrivals_s))]
    dice.shuffle(lengths)
    return [
        (at_s, Ask(f"{dice.choice(SHORT)} ({number})", tokens, headers, full_length=True))
        for number, (at_s, tokens) in enumerate(zip(arrivals_s, lengths, strict=True))
    ]


async def full_tokens_per_s(client: openai.AsyncOpenAI) -> float:
    """Return what both tiers write at most, with every slot taken by requests without any promise."""
    began_s = time.monotonic()

    async def caller(number: int) -> int:
        dice, tokens = random.Random(f"{SEED} caller {number}"), 0  # noqa: S311
        while time.monotonic() < began_s + FULL_S:
            ask = Ask(f"{dice.choice(SHORT)} ({number} {tokens})", dice.choice(ANSWER_TOKENS), full_length=True)
            tokens += (await send(client, ask)).completion_tokens
        return tokens

    written = sum(await asyncio.gather(*map(caller, range(SLOTS))))
    return round(written / (time.monotonic() - began_s), 1)


async def timed(client: openai.AsyncOpenAI, ask: Ask) -> Timed:
    """Send one request and time its text."""
    began_s = time.monotonic()
    seen = Timed(Reply(ask))

    def note(reply: Reply) -> None:
        if len(reply.text) > seen.chars:
            seen.chars, seen.last_text_ms = len(reply.text), (time.monotonic() - began_s) * 1e3

    seen.reply = await send(client, ask, note)
    return seen


async def step(client: openai.AsyncOpenAI, rate_per_s: float, step_s: float) -> list[Timed]:
    """Send one step's requests when they are due, whatever became of those before; return all replies."""
    began_s = time.monotonic()

    async def one(at_s: float, ask: Ask) -> Timed:
        await asyncio.sleep(began_s + at_s - time.monotonic())
        return await timed(client, ask)

    return list(await asyncio.gather(*(one(at_s, ask) for at_s, ask in asks_of(rate_per_s, step_s))))


class OtherWork:
    """How much of the machine's processor time went to others than both tiers and this load generator.

    Args:
        pids: the tiers; their children count as theirs.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        ours = [psutil.Process(), *map(psutil.Process, pids)]
        self._ours = [*ours, *(child for parent in ours[1:] for child in parent.children(recursive=True))]
        self._began_s = self._seconds()

    def share(self) -> float:
        """Return the share since the beginning, in [0, 1]."""
        all_s, busy_s, ours_s = (now - then for now, then in zip(self._seconds(), self._began_s, strict=True))
        return round(max(0.0, busy_s - ours_s) / all_s, 3)

    def _seconds(self) -> tuple[float, float, float]:
        machine_wide = psutil.cpu_times()
        all_s = sum(machine_wide) - getattr(machine_wide, "guest", 0.0) - getattr(machine_wide, "guest_nice", 0.0)
        idle_s = machine_wide.idle + getattr(machine_wide, "iowait", 0.0)
        return all_s, all_s - idle_s, sum(sum(process.cpu_times()[:2]) for process in self._ours)


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return a percentile of what was measured, None of nothing."""
    if len(values) < 2:
        return round(values[0], 1) if values else None
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 1)


def summary(rate_per_s: float, step_s: float, seen: Sequence[Timed]) -> dict[str, Any]:
    """One row of the table: shares of all requests of a step, times in milliseconds."""
    replies = [one.reply for one in seen]
    in_time = sum(one.kept for one in seen)
    fates = Counter(fate_of(reply) for reply in replies)
    served = [reply for reply in replies if reply.served]
    ttfts_ms = [reply.ttft_ms for reply in served if reply.ttft_ms is not None]
    return {
        "offered_per_s": rate_per_s,
        "requests": len(replies),
        "shares": {fate: round(fates[fate] / max(len(replies), 1), 4) for fate in FATES},
        "smaller_rung": sum("pruned" in reply.variant for reply in served),
        "shortened": sum(reply.completion_tokens < reply.ask.max_tokens for reply in served),
        "promise_kept_share": round(in_time / max(len(seen), 1), 4),
        "kept_per_s": round(in_time / step_s, 3),
        "wanted_tokens_per_s": round(sum(reply.ask.max_tokens for reply in replies) / step_s, 1),
        "answer_tokens_per_s": round(sum(reply.completion_tokens for reply in served) / step_s, 1),
        "ttft_ms_p50": percentile(ttfts_ms, 50),
        "ttft_ms_p95": percentile(ttfts_ms, 95),
        "last_text_ms_p95": percentile([one.last_text_ms for one in seen if one.reply.served], 95),
        "refused_after_ms_p95": percentile([r.e2e_ms for r in replies if fate_of(r) == "refused"], 95),
        "errors": sorted({reply.error for reply in replies if fate_of(reply) == "failed"})[:5],
    }


async def measure(rates: Sequence[float], step_s: float, tensor_parallel: int) -> dict[str, Any]:
    """Start both tiers, send every step, and return the rows with what they were measured with."""
    options = StackOptions(tensor_parallel=tensor_parallel, dtype=fastest_dtype(), broker=False)
    rows = []
    with tempfile.TemporaryDirectory(prefix="overspill-load-") as folder:
        async with Stack(Path(folder), options) as stack:
            client = openai.AsyncOpenAI(base_url=f"{stack.edge_url}/v1", api_key="none", max_retries=0, timeout=60)
            try:
                for prompt in SHORT[:2]:  # neither tier meets its first request under measurement
                    await send(client, Ask(prompt, max_tokens=16))
                    await send(client, Ask(prompt, max_tokens=16, headers={"x-overspill-locality": "cloud-only"}))
                other_work = OtherWork([stack.edge.pid, stack.cloud.pid])
                full = await full_tokens_per_s(client)
                print(f"with every slot taken, both tiers write {full:.0f} tokens a second", flush=True)
                await asyncio.sleep(REST_S)
                print(HEADER)
                for rate_per_s in rates:
                    row = summary(rate_per_s, step_s, await step(client, rate_per_s, step_s))
                    rows.append(row)
                    print(line(row), flush=True)
                    await asyncio.sleep(REST_S)
                other_share = other_work.share()
            finally:
                await client.close()
    return {
        "model": "smollm2-135m",
        "policy": RouterSettings().policy,
        "ttft_slo_ms": TTFT_SLO_MS,
        "deadline_ms": DEADLINE_MS,
        "answer_tokens": list(ANSWER_TOKENS),
        "step_s": step_s,
        "seed": SEED,
        "cloud": {"dtype": options.dtype, "tensor_parallel": tensor_parallel},
        "full_tokens_per_s": full,
        "other_work_share": other_share,
        "rows": rows,
    }


HEADER = (
    f"{'offered/s':>9}{'n':>5}"
    + "".join(f"{fate:>16}" for fate in FATES)
    + f"{'kept':>8}{'TTFT p95, ms':>14}{'wanted tok/s':>14}"
)


def line(row: dict[str, Any]) -> str:
    """One row on a terminal."""
    shares = "".join(f"{share:>16.0%}" for share in row["shares"].values())
    p95_ms = "-" if row["ttft_ms_p95"] is None else f"{row['ttft_ms_p95']:.0f}"
    begin = f"{row['offered_per_s']:>9g}{row['requests']:>5}{shares}"
    return f"{begin}{row['promise_kept_share']:>8.0%}{p95_ms:>14}{row['wanted_tokens_per_s']:>14.0f}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw shares by offered load over the time to the first token."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "overspill", "font.family": ["sans-serif"], "font.size": 10}
    )
    from matplotlib import pyplot as plt

    rows = result["rows"]
    rates = [f"{row['offered_per_s']:g}" for row in rows]
    figure, (shares, times) = plt.subplots(
        2, 1, figsize=(7.6, 5.0), sharex=True, height_ratios=(2, 1), constrained_layout=True, facecolor="white"
    )
    below = [0.0] * len(rows)
    for fate, (name, colour) in FATES.items():
        heights = [100 * row["shares"][fate] for row in rows]
        if any(heights) or fate != "failed":
            shares.bar(rates, heights, width=0.86, bottom=below, color=colour, label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    in_time = [100 * row["promise_kept_share"] for row in rows]
    shares.plot(rates, in_time, "ko--", ms=3, lw=1.2, label="first and last token in time")
    enough = [100 * min(1.0, result["full_tokens_per_s"] / row["wanted_tokens_per_s"]) for row in rows]
    shares.plot(rates, enough, "k:", lw=1.2, label="tokens that both tiers can write,\nof those asked for")
    shares.set(ylim=(0, 100), ylabel="share of requests, %")
    shares.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    for key, style, name in (("ttft_ms_p95", "o-", "p95"), ("ttft_ms_p50", "s:", "median")):
        points_s = [float("nan") if row[key] is None else row[key] / 1e3 for row in rows]
        times.plot(rates, points_s, style, color="#333333", ms=4, lw=1.2, label=name)
    times.axhline(TTFT_SLO_MS / 1e3, color="#c0392b", lw=1, label="promised")
    times.set(ylim=(0, None), ylabel="first token, s", xlabel="requests offered a second")
    times.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    day = datetime.now(timezone.utc).date().isoformat()
    where = f"{result['model']}, both tiers and the load on {machine()['cpu']}, {day}"
    figure.suptitle(f"{where}; other work took {result['other_work_share']:.0%} of it", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Print the table; write JSON and picture where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES_PER_S))
    parser.add_argument("--step-s", type=float, default=15.0)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    arguments = parser.parse_args()
    result = asyncio.run(measure(sorted(arguments.rates), arguments.step_s, arguments.tensor_parallel))
    if arguments.json is None:
        return
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    try:
        draw(result, arguments.json.with_suffix(".svg"))
    except ModuleNotFoundError as error:
        print(f"no picture: {error.name} is not installed (extra `dev`)", file=sys.stderr)


if __name__ == "__main__":
    main()
