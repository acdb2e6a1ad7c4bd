"""How fast is a server? Measured with a few short requests, before it serves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from router.base.clock import Clock
from router.values.feature import Feature
from router.values.prompt import ChatPrompt, Message, TextPrompt
from router.values.replica import Replica, SpeedPrior
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams

_LONG_WORDS, _SHORT_WORDS = 200, 4
_ANSWER_TOKENS = 16
_BATCH = 4
_LEAST_S = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class _Timing:
    """Of one request: its prompt as the server counted it, seconds to the first token and between tokens."""

    prompt_tokens: int
    first_s: float
    gap_s: float


async def measure_speed(replica: Replica, clock: Clock) -> SpeedPrior:
    """Measure prefill and decode speed, the latter alone and in company; the network is part of what is measured.

    Raises:
        OverspillError: a request failed.
    """
    await _ask(replica, clock, 0, _SHORT_WORDS, 2)  # the first may load, allocate and compile
    long = await _ask(replica, clock, 1, _LONG_WORDS, 1)
    alone = await _ask(replica, clock, 2, _SHORT_WORDS, _ANSWER_TOKENS)
    asks = [_ask(replica, clock, 3 + number, _SHORT_WORDS, _ANSWER_TOKENS) for number in range(_BATCH)]
    together_s = sum(timing.gap_s for timing in await asyncio.gather(*asks)) / _BATCH
    slope = (together_s / alone.gap_s - 1) / (_BATCH - 1)
    return SpeedPrior(
        prefill_tokens_per_s=max(long.prompt_tokens - alone.prompt_tokens, 1)
        / max(long.first_s - alone.first_s, 0.1 * long.first_s, _LEAST_S),
        decode_tokens_per_s=1 / alone.gap_s,
        decode_batch_slope=min(max(slope, 0.0), 1.0),
        source=f"measured: a prompt of {long.prompt_tokens} tokens, {_ANSWER_TOKENS} tokens alone and {_BATCH} at once",
    )


async def _ask(replica: Replica, clock: Clock, number: int, words: int, answer_tokens: int) -> _Timing:
    """Send numbers of which no server has the beginning in its cache, and time the answer."""
    first = 7919 * (number + 1)
    text = " ".join(str((first + 104_729 * index) % 99_991) for index in range(words))
    request = InferenceRequest(
        request_id=f"warm-up-{number}",
        model=replica.info.variant,
        prompt=TextPrompt(text) if Feature.CHAT in replica.info.lacks else _chat(text),
        sampling=SamplingParams(max_tokens=answer_tokens, temperature=0.0),
        objective=Objective(),
        prompt_tokens=4 * words,
        accepted_at_s=clock.now_s(),
    )
    began_s, first_s, tokens, ahead, prompt_tokens = clock.now_s(), 0.0, 0, 0, 0
    async with contextlib.aclosing(replica.generate(request)) as stream:
        async for chunk in stream:
            tokens += chunk.tokens
            prompt_tokens = chunk.prompt_tokens or prompt_tokens
            if not ahead and (chunk.text or chunk.reasoning):
                first_s, ahead = clock.now_s() - began_s, tokens
    last_s = clock.now_s() - began_s
    gap_s = (last_s - first_s) / max(tokens - ahead, 1)
    return _Timing(prompt_tokens or 4 * words, max(first_s or last_s, _LEAST_S), max(gap_s, _LEAST_S))


def _chat(text: str) -> ChatPrompt:
    return ChatPrompt((Message("user", f"{text} Go on counting."),))
