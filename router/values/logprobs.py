"""How likely a model found the tokens of an answer, and what else it might have said. Pure values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A token as a model tells it, by ids.

    Attributes:
        logprob: natural logarithm of its probability before temperature, penalties and bans; None for the first token
            of a prompt, which nothing predicts.
        top: (token id, log probability) of the likeliest, best first.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that might have come.

    Attributes:
        text: as the model's files write it; half a UTF-8 character becomes U+FFFD.
        raw: its bytes; None where only the text is known.
    """

    text: str
    logprob: float
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of an answer or of a prompt.

    Attributes:
        text, raw, logprob: see `Alternative` and `DrawnToken`.
        shown: its text is part of what the caller reads: a special token's is not.
        top: the likeliest, best first.
    """

    text: str
    logprob: float | None
    raw: bytes | None = None
    shown: bool = True
    top: tuple[Alternative, ...] = ()
