"""A slice of a trace as prompts that a small model can really answer, with answers of the trace's lengths.

Prompts are lists of numbers that are to be counted on; tokens are exact: a number of three digits is five of them.
They are raw completions: as a chat, the same model excuses itself one time in four.
Lengths of answers are imposed in two honest ways:

- `open`: the model counts on until the caller's own stop string, the number after its last; nobody is told how long
  that takes. Only full rungs can count, so these ask for `x-overspill-min-quality`.
- `capped`: `ignore_eos` with `max_tokens`: the length is known to whoever reads the request, and any rung will do.

Lists begin anywhere and go in steps of 1, so few prompts share a beginning; those that do are as likely for everyone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from router.simulation.traces import TraceRow, at_rate, load_trace, scale_inputs, slice_of
from router.values.request import Objective

OPEN_SHARE = 0.5
OPEN_CAP_TOKENS = 256
MIN_QUALITY = 0.9
TOKENS_A_NUMBER = 5
STOP_TOKENS = 4
"""Tokens of an `open` answer besides its numbers: the stop string's blank and digits."""
_LEAST_LISTED = 10


@dataclass(frozen=True)
class Scale:
    """How a trace is fitted to two tiers of a core each.

    Attributes:
        rate_rps: mean arrivals a second; bursts keep their shape.
        prompt_tokens: mean of a prompt.
        answer_share: answers are so much of the trace's.
        longest_answer_tokens: longer ones are cut to it.
    """

    rate_rps: float = 2.5
    prompt_tokens: float = 130.0
    answer_share: float = 0.25
    longest_answer_tokens: int = 160


@dataclass(frozen=True)
class Promises:
    """What callers ask for; times in seconds. A third each: `first + token · answer`, one deadline, TTFT and TPOT."""

    first_s: float = 2.5
    token_s: float = 0.2
    ttft_s: float = 2.0


@dataclass(frozen=True)
class Ask:
    """One request of the workload.

    Attributes:
        arrival_s: seconds from the beginning.
        body: of the POST to `/v1/completions`, less the model.
        answer_tokens: length of a whole answer.
        open_length: the length is told nobody.
        kind: which promise: `proportional`, `one-deadline` or `ttft-tpot`.
    """

    arrival_s: float
    body: dict[str, object]
    prompt_tokens: int
    answer_tokens: int
    open_length: bool
    kind: str
    objective: Objective
    headers: dict[str, str] = field(default_factory=dict)


def rows_of(trace: str, count: int, seed: int, scale: Scale) -> tuple[TraceRow, ...]:
    """Return `count` successive rows of a trace, at the scale's rate and lengths."""
    rows = slice_of(load_trace(trace), count, seed)
    shorter = tuple(
        replace(row, output_tokens=min(round(row.output_tokens * scale.answer_share), scale.longest_answer_tokens))
        for row in rows
    )
    return at_rate(scale_inputs(shorter, scale.prompt_tokens, 640), scale.rate_rps)


def asks_of(rows: Sequence[TraceRow], seed: int, salt: str, promises: Promises) -> list[Ask]:
    """Return one request for each row.

    Args:
        seed: of kinds and promises; the same for all that are compared.
        salt: of the numbers; another one for each that is compared.
    """
    dice, numbers = random.Random(f"kinds {seed}"), random.Random(f"numbers {seed} {salt}")  # noqa: S311
    planned = [_numbers(row.output_tokens) * TOKENS_A_NUMBER + STOP_TOKENS for row in rows]
    mean_tokens = sum(planned) / len(planned)
    asks = []
    for row, answer_tokens in zip(rows, planned, strict=True):
        open_length = dice.random() < OPEN_SHARE
        kind = dice.choice(("proportional", "one-deadline", "ttft-tpot"))
        objective = _objective(kind, answer_tokens, mean_tokens, promises)
        if open_length:
            objective = msgspec.structs.replace(objective, min_quality=MIN_QUALITY)
        listed = max(_LEAST_LISTED, round(row.input_tokens / TOKENS_A_NUMBER))
        asks.append(
            Ask(
                row.arrival_s,
                _body(listed, _numbers(row.output_tokens), open_length, numbers),
                listed * TOKENS_A_NUMBER,
                answer_tokens,
                open_length,
                kind,
                objective,
                headers_of(objective),
            )
        )
    return asks


def headers_of(objective: Objective) -> dict[str, str]:
    """Return the promise as a caller writes it."""
    times = {
        "x-overspill-deadline-ms": objective.deadline_s,
        "x-overspill-ttft-slo-ms": objective.ttft_s,
        "x-overspill-tpot-slo-ms": objective.tpot_s,
    }
    headers = {name: f"{1e3 * value:.0f}" for name, value in times.items() if value is not None}
    if objective.min_quality:
        headers["x-overspill-min-quality"] = f"{objective.min_quality:g}"
    return headers


def _numbers(answer_tokens: int) -> int:
    return max(1, round((answer_tokens - STOP_TOKENS) / TOKENS_A_NUMBER))


def _objective(kind: str, answer_tokens: int, mean_tokens: float, promises: Promises) -> Objective:
    if kind == "ttft-tpot":
        return Objective(ttft_s=promises.ttft_s, tpot_s=promises.token_s)
    counted = answer_tokens if kind == "proportional" else mean_tokens
    return Objective(deadline_s=promises.first_s + promises.token_s * counted)


def alone_body(listed: int, answer_tokens: int, seed: int) -> dict[str, object]:
    """Return the body of a request of so many numbers and exactly so many tokens, for measuring a tier's speed."""
    first = random.Random(f"alone {seed}").randrange(101, 999 - listed)  # noqa: S311
    return {**_common(first, listed), "ignore_eos": True, "max_tokens": answer_tokens}


def _body(listed: int, answered: int, open_length: bool, numbers: random.Random) -> dict[str, object]:
    first = numbers.randrange(101, 999 - listed - answered)
    if open_length:
        return {**_common(first, listed), "stop": [f" {first + listed + answered}"], "max_tokens": OPEN_CAP_TOKENS}
    return {**_common(first, listed), "ignore_eos": True, "max_tokens": answered * TOKENS_A_NUMBER + STOP_TOKENS}


def _common(first: int, listed: int) -> dict[str, object]:
    return {
        "prompt": ", ".join(str(number) for number in range(first, first + listed)) + ",",
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
