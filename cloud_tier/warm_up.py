"""How fast is an engine? Measured on the idle engine, before the tier serves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from cloud_tier.engine.protocol import Engine, EngineInfo, EngineRequest
from router.base.clock import Clock
from router.values.replica import SpeedPrior
from router.values.sampling import SamplingParams

_PROMPT_TOKENS = 256
_DECODE_TOKENS = 16
_BATCH = 4


async def measure_speed(engine: Engine, known: EngineInfo, clock: Clock) -> SpeedPrior:
    """Measure prefill and decode speed, the latter alone and in company.

    Raises:
        ReplicaError: the engine died meanwhile.
    """
    size = max(2, min(_PROMPT_TOKENS, known.context_tokens // 2))
    steps = max(2, min(_DECODE_TOKENS, known.context_tokens - size - 1))
    batch = min(_BATCH, known.max_running)
    probe = _Probe(engine, clock, known.vocab_size)
    await probe.run(8, 2)  # the first steps allocate and compile
    prefill_s = (await probe.run(size, 1)).first_s
    single_s = (await probe.run(8, steps)).gap_s
    runs = await asyncio.gather(*(probe.run(8, steps) for _ in range(batch)))
    batched_s = sum(run.gap_s for run in runs) / batch
    slope = (batched_s / single_s - 1) / (batch - 1) if batch > 1 else 0.2
    return SpeedPrior(
        prefill_tokens_per_s=size / prefill_s,
        decode_tokens_per_s=1 / single_s,
        decode_batch_slope=min(max(slope, 0.0), 1.0),
        source=f"measured at start: {size} prompt tokens, {steps} decode steps at batch 1 and {batch}",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Timing:
    """Seconds from sending to the first token, and between tokens after it."""

    first_s: float
    gap_s: float


class _Probe:
    """Sends prompts of fresh pseudo-random ids, so that no prefix is found in the cache, and times the answers."""

    def __init__(self, engine: Engine, clock: Clock, vocab_size: int) -> None:
        self._engine = engine
        self._clock = clock
        self._vocab_size = vocab_size
        self._next_id = 1

    async def run(self, prompt_tokens: int, answer_tokens: int) -> _Timing:
        first = self._next_id
        self._next_id += prompt_tokens
        ids = tuple(index * 7919 % self._vocab_size for index in range(first, first + prompt_tokens))
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        began_s = self._clock.now_s()
        first_s = 0.0
        ahead = 0  # tokens of the first chunk, which took no gap
        seen = 0
        stream = self._engine.generate(EngineRequest(f"warm-up-{first}", ids, sampling, answer_tokens))
        async with contextlib.aclosing(stream):
            async for chunk in stream:
                seen += len(chunk.token_ids)
                if not ahead:
                    first_s = self._clock.now_s() - began_s
                    ahead = seen
        gap_s = (self._clock.now_s() - began_s - first_s) / max(seen - ahead, 1)
        return _Timing(max(first_s, 1e-6), max(gap_s, 1e-6))
