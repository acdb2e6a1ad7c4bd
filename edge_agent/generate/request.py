"""One request on its way through the generation loop, and what the loop counts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from edge_agent.generate.batcher import Sequence
from edge_agent.generate.logprobs import Logprobs
from router.base.errors import OverspillError
from router.values.chunk import TokenChunk


class TextDelta(Protocol):
    """What `TextStream.push` returns."""

    @property
    def text(self) -> str: ...

    @property
    def stop(self) -> str | None: ...


class TextStream(Protocol):
    """Incremental detokenization; see `models.text.stream.TextStream`."""

    def push(self, token_ids: list[int]) -> TextDelta: ...

    def finish(self) -> str: ...


@dataclass(slots=True, eq=False)
class Generation:
    """One request inside the loop.

    Attributes:
        inbox: chunks, or the error that ended them; read on the event loop.
        ending_ids: tokens that end the answer and are no part of it.
        logprobs: what it wants told of its tokens, None for nothing.
        delivered: whether a token was handed out, so that an error is `ReplicaBroken`.
    """

    request_id: str
    sequence: Sequence
    text: TextStream
    ending_ids: frozenset[int]
    logprobs: Logprobs | None = None
    inbox: asyncio.Queue[TokenChunk | OverspillError] = field(default_factory=asyncio.Queue)
    cancelled: bool = False
    delivered: bool = False


@dataclass(slots=True)
class LoopCounters:
    """What happened since the start; written by the worker, read by anybody.

    Attributes:
        cached_tokens: prompt tokens that were in the KV cache already; `prefill_tokens` does not count them.
    """

    steps: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    failed_steps: int = 0
    loads: int = 0
    worker_restarts: int = 0
    compute_s: float = 0.0
