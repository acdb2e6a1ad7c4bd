"""Answers that are sent whole: gathered to their end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TypeVar

import msgspec

from router.base.errors import ReplicaBroken
from router.values.chunk import FinishReason, TokenChunk
from router.values.logprobs import TokenLogprob
from router.values.task import Embeddings, Passed
from router.values.tensors import Tensors
from router.values.usage import Usage

Out = TypeVar("Out", Embeddings, Passed, Tensors)


class Whole(msgspec.Struct, frozen=True):
    """A finished answer.

    Attributes:
        reasoning: what the model thought, where its server tells that apart.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""


async def collect(chunks: AsyncGenerator[TokenChunk, None], prompt_tokens: int) -> Whole:
    """Gather an answer to its end.

    Raises:
        ReplicaBroken: it ended without a finish reason.
    """
    pieces: list[str] = []
    thoughts: list[str] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    tokens = 0
    cached_tokens: int | None = None
    async for chunk in chunks:
        if not pieces or chunk.finish_reason is not None:
            cached_tokens = chunk.cached_tokens if cached_tokens is None else cached_tokens
        pieces.append(chunk.text)
        thoughts.append(chunk.reasoning)
        logprobs += chunk.logprobs
        prompt_logprobs += chunk.prompt_logprobs
        tokens += chunk.tokens
        if chunk.finish_reason is not None:
            usage = Usage(chunk.prompt_tokens or prompt_tokens, tokens, cached_tokens, chunk.details)
            told = (tuple(logprobs), tuple(prompt_logprobs))
            return Whole("".join(pieces), chunk.finish_reason, usage, *told, "".join(thoughts))
    raise unfinished()


async def collect_output(
    chunks: AsyncGenerator[TokenChunk, None], prompt_tokens: int, kind: type[Out]
) -> tuple[Out, int]:
    """Return what a call came to, which is a `kind`, and the tokens of its inputs.

    Raises:
        ReplicaBroken: it ended without.
    """
    async for chunk in chunks:
        if isinstance(chunk.output, kind):
            return chunk.output, chunk.prompt_tokens or prompt_tokens
    raise unfinished()


def unfinished() -> ReplicaBroken:
    return ReplicaBroken("the answer ended without a finish reason: it is incomplete, send the request again")
