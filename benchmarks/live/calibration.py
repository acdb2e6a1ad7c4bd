"""How fast two live tiers are, as a world of the simulator: measured alone, in batches and beside each other.

    first token = fixed + prompt / prefill speed            least squares over prompts of different lengths, alone, each
                                                            after a moment in which nothing was computed
    noise       of a prompt asked again, of its time        by seconds: milliseconds that a short prompt waits for a
                                                            wake-up are not what a long one varies by
    step(b)     = step · (1 + slope · (b − 1))              least squares over batches, while all of them decode
    shares      of their speed, that a prompt and two answers keep while the one is computed beside the others
    beside      of its speed, that a tier's decode keeps while the other tier, on the same machine, decodes too

Every figure is measured as the router meets it, through the edge agent, so gateways and the way to the cloud are in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import statistics
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace

import aiohttp
import numpy as np

from benchmarks.live.client import Seen, Target, ask_one
from benchmarks.live.tiers import Tiers
from benchmarks.live.workload import TOKENS_A_NUMBER, Ask, alone_body
from router.simulation.world import DeviceSpec, LinkSpec, NoiseSpec, RungSpec, World
from router.values.request import Objective

PROMPTS_TOKENS = (50, 150, 300, 450)
REPEATS = 5
IDLE_S = 0.5
"""Before a prompt that is alone: on a processor that has just computed another one it takes a fifth less time."""
BATCH_ANSWER_TOKENS = 24
INTERRUPTING_TOKENS = 400
BESIDE_S = 3.0
GIVE_UP_S = 60.0


@dataclass(frozen=True)
class Line:
    """y = fixed + slope · x."""

    fixed: float
    slope: float


@dataclass(frozen=True)
class RungFit:
    """One rung as it was measured; `noise` is what `repeated_noise` says of its first tokens."""

    variant: str
    fixed_s: float
    prefill_tokens_per_s: float
    step_s: float
    batch_slope: float
    noise: float
    steps_s: dict[int, float]

    def prefill_s(self, prompt_tokens: float) -> float:
        return self.fixed_s + prompt_tokens / self.prefill_tokens_per_s

    def fitted_step_s(self, batch: int) -> float:
        return self.step_s * (1.0 + self.batch_slope * (batch - 1))


@dataclass(frozen=True)
class TierFit:
    """What of its speed a tier keeps: a prompt while two answers go on, they meanwhile, and beside the other tier."""

    prefill_share: float
    decode_share: float
    beside: float = 1.0


One = Callable[[str, int, int], Coroutine[None, None, Seen]]
"""Asks a variant for a prompt and an answer of so many tokens, and returns what came, whole."""


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


def repeated_noise(alone: Sequence[tuple[int, float]]) -> float:
    """Return by how much of its time a first token varies where the same length is asked again.

    The root mean square of the deviations from each length's own mean, with its degrees of freedom, over that of the
    times. What a straight line does not fit is thereby no noise.

    Args:
        alone: prompt tokens and seconds to the first token, each length more than once.

    Raises:
        ValueError: no length came twice.
    """
    by_length: dict[int, list[float]] = {}
    for tokens, seconds in alone:
        by_length.setdefault(tokens, []).append(seconds)
    freedom = len(alone) - len(by_length)
    if freedom < 1:
        raise ValueError(f"noise wants a length that was asked twice; got {sorted(by_length)} once each")
    deviations = sum(sum((s - statistics.fmean(same)) ** 2 for s in same) for same in by_length.values())
    return math.sqrt(deviations / freedom) / math.sqrt(statistics.fmean(seconds**2 for _, seconds in alone))


def fit_rung(variant: str, alone: Sequence[tuple[int, float]], steps_s: dict[int, float]) -> RungFit:
    """Fit one rung.

    Args:
        alone: prompt tokens and seconds to the first token, nobody else there.
        steps_s: batch and seconds a decode step.
    """
    line = fit_line([(float(tokens), seconds) for tokens, seconds in alone])
    pace = fit_line([(batch - 1.0, step_s) for batch, step_s in steps_s.items()])
    return RungFit(
        variant,
        line.fixed,
        1.0 / line.slope,
        pace.fixed,
        pace.slope / pace.fixed,
        repeated_noise(alone),
        steps_s,
    )


async def measure_rung(one: One, variant: str, batches: Sequence[int]) -> RungFit:
    """Measure one rung; nothing else may run on the tiers."""
    await one(variant, PROMPTS_TOKENS[0], 8)
    alone = []
    for _ in range(REPEATS):
        for prompt_tokens in PROMPTS_TOKENS:
            await asyncio.sleep(IDLE_S)
            seen = await one(variant, prompt_tokens, 2)
            alone.append((seen.prompt_tokens, seen.first_s or 0.0))
    steps_s = {}
    for batch in batches:
        answer_tokens = BATCH_ANSWER_TOKENS + 4 * batch  # those that are first go on while the others' prompts come
        together = await asyncio.gather(*(one(variant, PROMPTS_TOKENS[0], answer_tokens) for _ in range(batch)))
        steps_s[batch] = step_s(together)
    return fit_rung(variant, alone, steps_s)


def step_s(together: Sequence[Seen]) -> float:
    """Return the seconds a step took while all of them decoded.

    Raises:
        RuntimeError: they never all did.
    """
    from_s = max(one.began_s + (one.first_s or 0.0) for one in together)
    to_s = min(one.began_s + (one.last_s or 0.0) for one in together)
    tokens = statistics.median(_tokens_between(one, from_s, to_s) for one in together)
    if to_s <= from_s or tokens < 1:
        raise RuntimeError(f"{len(together)} answers never ran at once; were slots or credits missing?")
    return (to_s - from_s) / tokens


def _tokens_between(seen: Seen, from_s: float, to_s: float) -> float:
    return seen.tokens_until(to_s - seen.began_s) - seen.tokens_until(from_s - seen.began_s)


async def measure_shares(one: One, fit: RungFit) -> TierFit:
    """Measure what a long prompt and two answers take from each other on one rung."""
    step_alone_s = fit.fitted_step_s(2)
    before_s = 4.0 * fit.prefill_s(PROMPTS_TOKENS[0]) + 0.2
    answer_tokens = math.ceil((before_s + 3.0 * fit.prefill_s(INTERRUPTING_TOKENS)) / step_alone_s)
    kept, left = [], []
    for _ in range(REPEATS):
        await asyncio.sleep(IDLE_S)
        alone_s = (await one(fit.variant, INTERRUPTING_TOKENS, 2)).first_s or math.inf
        answers = [asyncio.ensure_future(one(fit.variant, PROMPTS_TOKENS[0], answer_tokens)) for _ in range(2)]
        try:
            await asyncio.sleep(before_s)
            prompt = await one(fit.variant, INTERRUPTING_TOKENS, 2)
            decoding = [await answer for answer in answers]
        finally:
            for answer in answers:
                answer.cancel()
        took_s = prompt.first_s or math.inf
        tokens = statistics.fmean(_tokens_between(d, prompt.began_s, prompt.began_s + took_s) for d in decoding)
        kept.append(alone_s / took_s)
        left.append(tokens * step_alone_s / took_s)
    return TierFit(min(statistics.median(kept), 1.0), min(statistics.median(left), 1.0))


async def measure_beside(one: One, fits: Sequence[RungFit]) -> list[float]:
    """Return what each rung keeps of its decode speed while the others, on other devices, decode too."""
    counts = [math.ceil(BESIDE_S / fit.fitted_step_s(2)) for fit in fits]
    asked = [one(fit.variant, PROMPTS_TOKENS[0], n) for fit, n in zip(fits, counts, strict=True) for _ in range(2)]
    seen = await asyncio.gather(*asked)
    from_s = max(each.began_s + (each.first_s or 0.0) for each in seen)
    to_s = min(each.began_s + (each.last_s or 0.0) for each in seen)
    kept = []
    for index, fit in enumerate(fits):
        tokens = statistics.fmean(_tokens_between(each, from_s, to_s) for each in seen[2 * index : 2 * index + 2])
        kept.append(min(tokens * fit.fitted_step_s(2) / (to_s - from_s), 1.0))
    return kept


def _ask(variant: str, prompt_tokens: int, answer_tokens: int, seed: int) -> Ask:
    body = {"model": variant, **alone_body(prompt_tokens // TOKENS_A_NUMBER, answer_tokens, seed)}
    return Ask(0.0, body, prompt_tokens, answer_tokens, open_length=False, kind="alone", objective=Objective())


async def measure_world(tiers: Tiers, edge_slots: int, cloud_slots: int) -> tuple[World, list[RungFit]]:
    """Measure every rung of both tiers, and the tiers beside each other; return the world that they are."""
    qualities = await tiers.qualities()
    fits: dict[str, RungFit] = {}
    shares: list[TierFit] = []
    async with _asking(tiers.hybrid) as one:
        for variant in qualities:
            fits[variant] = await measure_rung(one, variant, (1, 2, 4) if _local(variant) else (1, 2, 4, 8))
            print(_described(fits[variant]), flush=True)
            await tiers.settle()
        best = [
            max((fit for name, fit in fits.items() if _local(name) is local), key=lambda fit: qualities[fit.variant])
            for local in (True, False)
        ]
        for fit in best:
            shares.append(await measure_shares(one, fit))
            await tiers.settle()
        kept = [await measure_beside(one, best) for _ in range(REPEATS)]
    beside = [statistics.median(values) for values in zip(*kept, strict=True)]
    edge, cloud = (replace(share, beside=value) for share, value in zip(shares, beside, strict=True))
    for name, tier in (("edge", edge), ("cloud", cloud)):
        print(
            f"  {name}: a prompt beside answers keeps {tier.prefill_share:.0%} of its speed, "
            f"they {tier.decode_share:.0%}; beside the other tier {tier.beside:.0%}",
            flush=True,
        )
    return world_of(list(fits.values()), qualities, (edge_slots, edge), (cloud_slots, cloud)), list(fits.values())


@contextlib.asynccontextmanager
async def _asking(target: Target) -> AsyncIterator[One]:
    """Ask `target` for exact variants, each time with another prompt.

    Raises (from what it yields):
        RuntimeError: the answer did not come whole.
    """
    numbers = itertools.count(10_000)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=GIVE_UP_S)) as session:

        async def one(variant: str, prompt_tokens: int, answer_tokens: int) -> Seen:
            seen = await ask_one(session, target, _ask(variant, prompt_tokens, answer_tokens, next(numbers)))
            if seen.first_s is None or seen.last_s is None or seen.tokens < answer_tokens:
                raise RuntimeError(f"{variant}: no measurement: HTTP {seen.status}, {seen.tokens} tokens, {seen.error}")
            return seen

        yield one


def _local(variant: str) -> bool:
    return "int8" in variant


def _described(fit: RungFit) -> str:
    return (
        f"  {fit.variant:<26} prefill {1e3 * fit.fixed_s:.0f} ms + {fit.prefill_tokens_per_s:.0f} tokens/s, "
        f"step {1e3 * fit.step_s:.1f} ms, slope {fit.batch_slope:.3f}, noise {fit.noise:.2f}"
    )


def world_of(
    fits: Sequence[RungFit],
    qualities: Mapping[str, float],
    edge: tuple[int, TierFit],
    cloud: tuple[int, TierFit],
) -> World:
    """Return the world of measured rungs: INT8 ones on the device, the others in the cloud.

    Args:
        edge, cloud: slots, and what is kept of the speed.
    """
    rungs = {
        fit.variant: RungSpec(
            variant=fit.variant,
            quality=qualities[fit.variant],
            prefill_tokens_per_s=fit.prefill_tokens_per_s,
            prefill_fixed_ms=1e3 * fit.fixed_s,
            step_ms=1e3 * fit.step_s,
            batch_slope=fit.batch_slope,
            context_tokens=2048 if _local(fit.variant) else 8192,
        )
        for fit in sorted(fits, key=lambda fit: -qualities[fit.variant])
    }
    link = LinkSpec(rtt_ms=1.0, uplink_mbps=1000.0)  # the loopback; what the way costs is in the fixed part
    devices = tuple(
        DeviceSpec(
            name=name,
            slots=slots,
            rungs=tuple(rung for variant, rung in rungs.items() if _local(variant) is (name == "edge")),
            remote=name == "cloud",
            link=link,
            prefill_share=tier.prefill_share,
            decode_share=tier.decode_share,
            machine="this",
            beside=tier.beside,
        )
        for name, (slots, tier) in (("edge", edge), ("cloud", cloud))
    )
    sigma = statistics.median(fit.noise for fit in fits)
    return World(
        devices=devices,
        family="smollm2-135m",
        noise=NoiseSpec(sigma=min(sigma, 3.0), prior_error_sigma=0.0),
    )
