"""How fast two live tiers are, as a world of the simulator: measured alone and at each batch, then fitted.

    first token = fixed + prompt / prefill speed            least squares over prompts of different lengths, alone
    step(b)     = step · (1 + slope · (b − 1))              least squares over batches

Every figure is measured as the router meets it, through the edge agent, so gateways and the way to the cloud are in it.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from benchmarks.live.client import Seen, Target, ask_one
from benchmarks.live.tiers import Tiers
from benchmarks.live.workload import TOKENS_A_NUMBER, Ask, alone_body
from router.simulation.world import DeviceSpec, LinkSpec, NoiseSpec, RungSpec, World
from router.values.request import Objective

PROMPTS_TOKENS = (50, 150, 300, 450)
REPEATS = 3
BATCH_ANSWER_TOKENS = 40
GIVE_UP_S = 60.0


@dataclass(frozen=True)
class Line:
    """y = fixed + slope · x."""

    fixed: float
    slope: float


@dataclass(frozen=True)
class RungFit:
    """One rung as it was measured; `spread_log` is the standard deviation of log measured / fitted first tokens."""

    variant: str
    fixed_s: float
    prefill_tokens_per_s: float
    step_s: float
    batch_slope: float
    spread_log: float
    steps_s: dict[int, float]


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Fit a line by least squares on relative errors; neither figure below 0.

    Raises:
        ValueError: fewer than two different x.
    """
    if len({x for x, _ in points}) < 2:
        raise ValueError(f"a line wants two different x; got {sorted({x for x, _ in points})}")
    x, y = np.array(points, dtype=np.float64).T
    slope, fixed = np.polyfit(x, y, 1, w=1.0 / y)
    if fixed < 0:
        fixed, slope = 0.0, float(np.mean(y / x))
    return Line(float(fixed), max(float(slope), 0.0))


def fit_rung(variant: str, alone: Sequence[tuple[int, float]], steps_s: dict[int, float]) -> RungFit:
    """Fit one rung.

    Args:
        alone: prompt tokens and seconds to the first token, nobody else there.
        steps_s: batch and seconds a decode step.
    """
    line = fit_line([(float(tokens), seconds) for tokens, seconds in alone])
    errors = [math.log(seconds / (line.fixed + line.slope * tokens)) for tokens, seconds in alone]
    pace = fit_line([(batch - 1.0, step_s) for batch, step_s in steps_s.items()])
    return RungFit(
        variant,
        line.fixed,
        1.0 / line.slope,
        pace.fixed,
        pace.slope / pace.fixed,
        statistics.pstdev(errors),
        steps_s,
    )


async def measure_rung(target: Target, variant: str, batches: Sequence[int], seed: int) -> RungFit:
    """Measure one rung; nothing else may run on the tiers."""
    timeout = aiohttp.ClientTimeout(total=GIVE_UP_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        numbers = iter(range(seed, seed + 10_000))

        async def one(prompt_tokens: int, answer_tokens: int) -> Seen:
            seen = await ask_one(session, target, _ask(variant, prompt_tokens, answer_tokens, next(numbers)))
            if seen.first_s is None or seen.last_s is None or seen.tokens < answer_tokens:
                raise RuntimeError(f"{variant}: no measurement: HTTP {seen.status}, {seen.tokens} tokens, {seen.error}")
            return seen

        await one(PROMPTS_TOKENS[0], 8)
        alone = []
        for _ in range(REPEATS):
            for prompt_tokens in PROMPTS_TOKENS:
                seen = await one(prompt_tokens, 2)
                alone.append((seen.prompt_tokens, seen.first_s or 0.0))
        prefill_s = statistics.median(seconds for tokens, seconds in alone if tokens <= PROMPTS_TOKENS[0])
        steps_s = {}
        for batch in batches:
            together = await asyncio.gather(*(one(PROMPTS_TOKENS[0], BATCH_ANSWER_TOKENS) for _ in range(batch)))
            steps_s[batch] = _step_s(together, prefill_s)
    return fit_rung(variant, alone, steps_s)


def _step_s(together: Sequence[Seen], prefill_s: float) -> float:
    """Return the seconds a step of all of them; those after the first also paused for the prefills that came later."""
    paces = []
    for place, seen in enumerate(sorted(together, key=lambda one: one.first_s or 0.0)):
        paused_s = (len(together) - 1 - place) * prefill_s
        spread_s = (seen.last_s or 0.0) - (seen.first_s or 0.0)
        paces.append(max(spread_s - paused_s, 0.1 * spread_s) / (seen.tokens - 1))
    return statistics.median(paces)


def _ask(variant: str, prompt_tokens: int, answer_tokens: int, seed: int) -> Ask:
    body = {"model": variant, **alone_body(prompt_tokens // TOKENS_A_NUMBER, answer_tokens, seed)}
    return Ask(0.0, body, prompt_tokens, answer_tokens, open_length=False, kind="alone", objective=Objective())


async def measure_world(tiers: Tiers, edge_slots: int, cloud_slots: int) -> tuple[World, list[RungFit]]:
    """Measure every rung of both tiers; return the world that they are."""
    qualities = await tiers.qualities()
    fits: dict[str, RungFit] = {}
    for number, variant in enumerate(qualities):
        batches = (1, 2, 4) if "int8" in variant else (1, 2, 4, 8)
        fit = fits[variant] = await measure_rung(tiers.hybrid, variant, batches, 10_000 * number)
        print(
            f"  {variant:<26} prefill {1e3 * fit.fixed_s:.0f} ms + {fit.prefill_tokens_per_s:.0f} tokens/s, "
            f"step {1e3 * fit.step_s:.1f} ms, slope {fit.batch_slope:.3f}, spread {fit.spread_log:.2f}",
            flush=True,
        )
        await tiers.settle()
    return world_of(list(fits.values()), qualities, edge_slots, cloud_slots), list(fits.values())


def world_of(fits: Sequence[RungFit], qualities: dict[str, float], edge_slots: int, cloud_slots: int) -> World:
    """Return the world of measured rungs: INT8 ones on the device, the others in the cloud."""
    rungs = {
        fit.variant: RungSpec(
            variant=fit.variant,
            quality=qualities[fit.variant],
            prefill_tokens_per_s=fit.prefill_tokens_per_s,
            prefill_fixed_ms=1e3 * fit.fixed_s,
            step_ms=1e3 * fit.step_s,
            batch_slope=fit.batch_slope,
            context_tokens=2048 if "int8" in fit.variant else 8192,
        )
        for fit in sorted(fits, key=lambda fit: -qualities[fit.variant])
    }
    local = tuple(rung for name, rung in rungs.items() if "int8" in name)
    remote = tuple(rung for name, rung in rungs.items() if "int8" not in name)
    link = LinkSpec(rtt_ms=1.0, uplink_mbps=1000.0)  # the loopback; what the way costs is in the fixed part
    sigma = statistics.median(fit.spread_log for fit in fits)
    return World(
        devices=(
            DeviceSpec(name="edge", slots=edge_slots, rungs=local),
            DeviceSpec(name="cloud", slots=cloud_slots, rungs=remote, remote=True, link=link),
        ),
        family="smollm2-135m",
        noise=NoiseSpec(sigma=min(sigma, 3.0), prior_error_sigma=0.0),
    )
