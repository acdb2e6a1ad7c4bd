"""How the next token is drawn, as the bodies of chat and of completions say it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from router.base.errors import InvalidRequest
from router.values.sampling import SamplingParams
from router.wire.sampling import (
    MaxTokens,
    MinTokens,
    Penalty,
    Probability,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    logit_biases,
    nucleus,
    stop_strings,
    token_ids,
)

MAX_TOP_LOGPROBS = 20
"""Alternatives told beside each token, OpenAI's bound."""
_MAX_STOP_IDS = 128
_MAX_ALLOWED_IDS = 131_072
_MAX_BAD_WORDS = 256
_MAX_WORD_CHARS = 256

TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both; `logprobs` is a flag to one and a number to the other."""

    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: MinTokens | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None


Effort = Annotated[str, Meta(min_length=1, max_length=32)]
"""`none`, `minimal`, `low`, …: which of them there are is the model's to say."""


def sampling_of(
    raw: SamplingFields, default_max_tokens: int | None, logprobs: int | None = None, *, prompt_logprobs: bool = False
) -> SamplingParams:
    """Return how a body with these fields wants tokens drawn.

    Args:
        logprobs: how many alternatives it wants told, None for no log probabilities.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    max_tokens = raw.max_completion_tokens or raw.max_tokens or default_max_tokens
    min_tokens = raw.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(
            f"`min_tokens` = {min_tokens}: more than the {max_tokens} that the answer may have", param="min_tokens"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if raw.temperature is None else raw.temperature,
        top_p=nucleus(raw.top_p),
        top_k=max(0, raw.top_k or 0),
        seed=raw.seed,
        stop=stop_strings(raw.stop),
        presence_penalty=raw.presence_penalty or 0.0,
        frequency_penalty=raw.frequency_penalty or 0.0,
        repetition_penalty=1.0 if raw.repetition_penalty is None else raw.repetition_penalty,
        ignore_eos=bool(raw.ignore_eos),
        min_p=raw.min_p or 0.0,
        min_tokens=min_tokens,
        stop_token_ids=token_ids(raw.stop_token_ids, "stop_token_ids", _MAX_STOP_IDS),
        logit_bias=logit_biases(raw.logit_bias),
        allowed_token_ids=token_ids(raw.allowed_token_ids, "allowed_token_ids", _MAX_ALLOWED_IDS),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        bad_words=_bad_words(raw.bad_words) if raw.bad_words else (),
    )


def _bad_words(raw: list[str]) -> tuple[str, ...]:
    if len(raw) > _MAX_BAD_WORDS or not all(0 < len(word) <= _MAX_WORD_CHARS for word in raw):
        raise InvalidRequest(
            f"`bad_words`: at most {_MAX_BAD_WORDS} texts of 1 to {_MAX_WORD_CHARS} characters", param="bad_words"
        )
    return tuple(raw)
