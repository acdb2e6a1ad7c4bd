"""What a caller may ask of sampling, over any API: one set of bounds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from router.base.errors import InvalidRequest

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
"""Stop strings are looked for in every piece of an answer, and their tables are built on the event loop."""
COMPLETION_MAX_TOKENS = 16
"""What is generated for a raw prompt when `max_tokens` is absent, as OpenAI does."""

MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10)]
"""Logits are divided by it: the lower bound keeps them finite."""


def stop_strings(raw: str | list[str] | None, at: str = "stop") -> tuple[str, ...]:
    """Check what ends an answer.

    Args:
        at: the field's path, for the error.

    Raises:
        InvalidRequest: too many, an empty or a very long one; `param` is the path of the one at fault.
    """
    if raw is None:
        return ()
    strings = (raw,) if isinstance(raw, str) else tuple(raw)
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"`{at}`: {len(strings)} strings, at most {MAX_STOP_STRINGS} are served", param=at)
    for index, text in enumerate(strings):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            which = at if isinstance(raw, str) else f"{at}[{index}]"
            raise InvalidRequest(f"`{which}`: {len(text)} characters, expected 1 to {MAX_STOP_CHARS}", param=which)
    return strings
