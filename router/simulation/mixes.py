"""What callers ask for: the rows of a trace become requests with objectives, in one of a few mixes.

| mix | every request asks for |
|---|---|
| `proportional` | a deadline of 1.5 s + 40 ms a token of its own answer |
| `proportional-capped` | the same, and half of them say `max_tokens`, which is just the length of their answer |
| `one-deadline` | one deadline for all: 1.5 s + 40 ms × the mean length of an answer |
| `ttft-tpot` | TTFT ≤ 1 s and TPOT ≤ 40 ms |
| `mixture` | a quarter each of `proportional`, `one-deadline`, `ttft-tpot` and nothing; priorities −1 to 2 |

The length of an answer is the trace's: the router learns it only where a mix tells it. A priority p weighs 2^p.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from router.base.errors import ConfigError
from router.simulation.traces import TraceRow
from router.simulation.values import SimRequest
from router.values.request import Objective

FIRST_S = 1.5
TOKEN_S = 0.040
TTFT_S = 1.0
PRIORITIES = ((-1, 0.2), (0, 0.5), (1, 0.2), (2, 0.1))
"""Priorities of `mixture`, and their shares."""

_Asked = tuple[Objective, int | None, str]  # objective, max_tokens, kind
_Asker = Callable[[TraceRow, float, random.Random], _Asked]  # of a row, the mean answer in tokens, and chance


def deadline_s(answer_tokens: float) -> float:
    """Seconds after which an answer of that length has lost its use to its caller."""
    return FIRST_S + TOKEN_S * answer_tokens


def _proportional(row: TraceRow, mean_tokens: float, chance: random.Random) -> _Asked:
    del mean_tokens, chance
    return Objective(deadline_s=deadline_s(row.output_tokens)), None, "proportional"


def _capped(row: TraceRow, mean_tokens: float, chance: random.Random) -> _Asked:
    objective, _, _ = _proportional(row, mean_tokens, chance)
    if chance.random() < 0.5:
        return objective, row.output_tokens, "capped"
    return objective, None, "open"


def _one_deadline(row: TraceRow, mean_tokens: float, chance: random.Random) -> _Asked:
    del row, chance
    return Objective(deadline_s=deadline_s(mean_tokens)), None, "one-deadline"


def _ttft_tpot(row: TraceRow, mean_tokens: float, chance: random.Random) -> _Asked:
    del row, mean_tokens, chance
    return Objective(ttft_s=TTFT_S, tpot_s=TOKEN_S), None, "ttft-tpot"


def _nothing(row: TraceRow, mean_tokens: float, chance: random.Random) -> _Asked:
    del row, mean_tokens, chance
    return Objective(), None, "none"


def _mixture(row: TraceRow, mean_tokens: float, chance: random.Random) -> _Asked:
    objective, max_tokens, kind = chance.choice(_PARTS)(row, mean_tokens, chance)
    (priority,) = chance.choices([p for p, _ in PRIORITIES], [share for _, share in PRIORITIES])
    return replace(objective, priority=priority), max_tokens, kind


_PARTS: tuple[_Asker, ...] = (_proportional, _one_deadline, _ttft_tpot, _nothing)

MIXES: dict[str, _Asker] = {
    "proportional": _proportional,
    "proportional-capped": _capped,
    "one-deadline": _one_deadline,
    "ttft-tpot": _ttft_tpot,
    "mixture": _mixture,
}


def requests_of(rows: Sequence[TraceRow], mix: str, seed: int) -> tuple[SimRequest, ...]:
    """Return one request for each row, with what `mix` asks for; the same for the same seed.

    Raises:
        ConfigError: there is no such mix.
    """
    if mix not in MIXES:
        raise ConfigError(f"mix: {mix!r} is not known; known: {', '.join(MIXES)}", param="mix")
    mean_tokens = sum(row.output_tokens for row in rows) / len(rows)
    chance = random.Random(f"{mix}/{seed}")  # noqa: S311 - a simulation's chance, not a secret
    requests = []
    for row in rows:
        objective, max_tokens, kind = MIXES[mix](row, mean_tokens, chance)
        requests.append(
            SimRequest(
                arrival_s=row.arrival_s,
                prompt_tokens=row.input_tokens,
                answer_tokens=row.output_tokens,
                objective=replace(objective, session=row.session),
                max_tokens=max_tokens,
                weight=2.0**objective.priority,
                kind=kind,
            )
        )
    return tuple(requests)
