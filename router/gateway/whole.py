"""An answer in one piece: its chunks, gathered to their end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TypeVar

import msgspec

from router.base.errors import ReplicaBroken
from router.values.answer import tapped
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
        stop: the stop string that ended it.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    stop: str | None = None


class _Gathered:
    """What came so far. It is a `router.values.answer.Tap`: a token that only lengthens it wakes nobody."""

    full = False

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._thoughts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._tokens = 0
        self._cached_tokens: int | None = None

    def give(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            self.add(chunk)

    def add(self, chunk: TokenChunk) -> None:
        if self._cached_tokens is None and (not self._pieces or chunk.finish_reason is not None):
            self._cached_tokens = chunk.cached_tokens
        self._pieces.append(chunk.text)
        self._thoughts.append(chunk.reasoning)
        self._logprobs += chunk.logprobs
        self._prompt_logprobs += chunk.prompt_logprobs
        self._tokens += chunk.tokens

    def whole(self, last: TokenChunk, finish_reason: FinishReason, prompt_tokens: int) -> Whole:
        """Return the answer that ends with `last`, which was added."""
        usage = Usage(last.prompt_tokens or prompt_tokens, self._tokens, self._cached_tokens, last.details)
        told = (tuple(self._logprobs), tuple(self._prompt_logprobs))
        return Whole("".join(self._pieces), finish_reason, usage, *told, "".join(self._thoughts), last.stop)


async def collect(chunks: AsyncGenerator[TokenChunk, None], prompt_tokens: int) -> Whole:
    """Gather an answer to its end.

    Raises:
        ReplicaBroken: it ended without a finish reason.
    """
    gathered, source = _Gathered(), tapped(chunks)
    if source is not None:
        source.tap(gathered)
    async for chunk in chunks:
        gathered.add(chunk)
        if chunk.finish_reason is not None:
            return gathered.whole(chunk, chunk.finish_reason, prompt_tokens)
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
