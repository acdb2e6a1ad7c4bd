"""Log probabilities as servers tell them, back into values; the prompt that an answer begins with is cut off again."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import msgspec

from router.values.logprobs import Alternative, TokenLogprob
from router.values.prompt import TextPrompt
from router.values.request import InferenceRequest

_SPELLED = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")
_LEAST = -9999.0  # what servers tell for a token that cannot come


class _Entry(msgspec.Struct):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[_Entry] | None = None


class Logprobs(msgspec.Struct):
    """The `logprobs` of a choice, in either of OpenAI's shapes: llama.cpp has that of chats for both."""

    content: list[_Entry] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] | None = None
    text_offset: list[int] | None = None

    def values(self, top: int) -> tuple[TokenLogprob, ...]:
        """Return them, with at most `top` alternatives each."""
        if self.content is not None:
            return tuple(_of_entry(entry, top) for entry in self.content)
        rows = zip_longest(self.tokens, self.token_logprobs, self.top_logprobs or ())
        return tuple(_of_row(token or "", logprob, others or {}, top) for token, logprob, others in rows)


class EchoedPrompt:
    """Tells the prompt of an answer apart from its text, where the server was asked to begin with the prompt.

    Attributes:
        whole: all of the prompt has come.
    """

    def __init__(self, request: InferenceRequest) -> None:
        prompt = request.prompt
        self.whole = False
        self._text = prompt.text if isinstance(prompt, TextPrompt) else None

    def split(
        self, text: str, told: tuple[TokenLogprob, ...], prompt_tokens: int | None
    ) -> tuple[str, tuple[TokenLogprob, ...], tuple[TokenLogprob, ...]]:
        """Return the text of the answer, the tokens of the prompt, and those of the answer, of the first event.

        Args:
            prompt_tokens: as the server counts them; None takes all for the prompt's.
        """
        self.whole = True
        cut = len(told) if prompt_tokens is None else min(prompt_tokens, len(told))
        prompt, answer = told[:cut], told[cut:]
        if self._text is not None:
            return text.removeprefix(self._text), prompt, answer
        tail = "".join(token.text for token in answer)
        return (tail if text.endswith(tail) else ""), prompt, answer


def _of_entry(entry: _Entry, top: int) -> TokenLogprob:
    others = sorted(entry.top_logprobs or (), key=lambda other: -_finite(other.logprob))[:top]
    return TokenLogprob(
        entry.token,
        _finite(entry.logprob),
        _raw(entry.bytes),
        top=tuple(Alternative(other.token, _finite(other.logprob), _raw(other.bytes)) for other in others),
    )


def _of_row(token: str, logprob: float | None, others: Mapping[str, float | None], top: int) -> TokenLogprob:
    text, raw = _spelled(token)
    best = sorted(others.items(), key=lambda item: -_finite(item[1]))[:top]
    alternatives = tuple(Alternative(*_turned(name, _finite(value))) for name, value in best)
    return TokenLogprob(text, None if logprob is None else _finite(logprob), raw, top=alternatives)


def _turned(name: str, logprob: float) -> tuple[str, float, bytes | None]:
    text, raw = _spelled(name)
    return text, logprob, raw


def _spelled(name: str) -> tuple[str, bytes | None]:
    """Read how lists write half a character."""
    found = _SPELLED.fullmatch(name)
    if found is None:
        return name, None
    raw = bytes.fromhex(found[1].replace("\\x", ""))
    return raw.decode("utf-8", "replace"), raw


def _finite(logprob: float | None) -> float:
    return _LEAST if logprob is None or not math.isfinite(logprob) else logprob


def _raw(told: Any) -> bytes | None:
    return bytes(told) if told and all(0 <= byte < 256 for byte in told) else None
