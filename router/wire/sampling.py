"""What a caller may ask of sampling, over any API: one set of bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from router.base.errors import InvalidRequest

MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 4096
"""Of all together: they are looked for in every piece of an answer, and their tables are built on the event loop."""
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_TOKEN_ID = 2**31
COMPLETION_MAX_TOKENS = 16
"""What is generated for a raw prompt when `max_tokens` is absent, as OpenAI does."""

MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(ge=0, le=1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
MinTokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10)]
"""Logits are divided by it: the lower bound keeps them finite."""


_ALONE = 1e-7
"""Less than the likeliest token of any vocabulary has: that token alone is drawn from. Servers behind refuse 0."""


def nucleus(top_p: float | None) -> float:
    """Return the mass that tokens are drawn from; 0 is OpenAI's way to say: the likeliest one."""
    return 1.0 if top_p is None else max(top_p, _ALONE)


def stop_strings(raw: str | list[str] | None, at: str = "stop") -> tuple[str, ...]:
    """Check what ends an answer.

    Args:
        at: the field's path, for the error.

    Raises:
        InvalidRequest: too many, an empty one, or too much text in all; `param` is the path of the one at fault.
    """
    if raw is None:
        return ()
    strings = (raw,) if isinstance(raw, str) else tuple(raw)
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"`{at}`: {len(strings)} strings, at most {MAX_STOP_STRINGS} are served", param=at)
    left = MAX_STOP_CHARS
    for index, text in enumerate(strings):
        if not 1 <= len(text) <= left:
            which = at if isinstance(raw, str) else f"{at}[{index}]"
            together = f", {MAX_STOP_CHARS} for all together" if left < MAX_STOP_CHARS else ""
            raise InvalidRequest(f"`{which}`: {len(text)} characters, expected 1 to {left}{together}", param=which)
        left -= len(text)
    return strings


def token_ids(raw: Sequence[int] | None, at: str, most: int) -> tuple[int, ...]:
    """Check a list of token ids; which of them a model has is for its replica to say.

    Args:
        at: the field's path, for the error.

    Raises:
        InvalidRequest: too many, or one that is none; `param` is the path of the one at fault.
    """
    found = tuple(raw or ())
    if len(found) > most:
        raise InvalidRequest(f"`{at}`: {len(found)} token ids, at most {most} are read", param=at)
    for index, token in enumerate(found):
        if not 0 <= token < MAX_TOKEN_ID:
            raise InvalidRequest(f"`{at}[{index}]`: {token} is no token id", param=f"{at}[{index}]")
    return found


def logit_biases(raw: Mapping[str, float] | None, at: str = "logit_bias") -> tuple[tuple[int, float], ...]:
    """Check biases by token id, as OpenAI spells them: the ids are the keys of an object.

    Raises:
        InvalidRequest: naming the entry at fault.
    """
    if not raw:
        return ()
    if len(raw) > MAX_BIASES:
        raise InvalidRequest(f"`{at}`: {len(raw)} token ids, at most {MAX_BIASES} are read", param=at)
    found: dict[int, float] = {}
    for key, bias in raw.items():
        which = f"{at}.{key[:20]}"
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(MAX_TOKEN_ID)) and int(key) < MAX_TOKEN_ID):
            raise InvalidRequest(f"`{which}`: no token id: `{at}` maps token ids to biases", param=which)
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(f"`{which}` = {bias:g}: expected {-MAX_BIAS:g} to {MAX_BIAS:g}", param=which)
        found[int(key)] = bias
    return tuple(found.items())
