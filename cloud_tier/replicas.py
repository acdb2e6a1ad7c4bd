"""An engine as the router sees it: prompts in, text out, load figures."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from cloud_tier.answers import Told
from cloud_tier.engine.protocol import Engine, EngineRequest
from cloud_tier.warm_up import measure_speed
from models.text.chat import PromptEncoder
from models.text.stream import TextStream
from models.text.tools.answer import with_tools
from router.base.clock import Clock
from router.base.errors import ContextTooLong, ReplicaBroken
from router.base.extras import installed
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import IN_THREAD_CHARS, ChatPrompt, size_chars
from router.values.replica import ReplicaInfo, ReplicaSnapshot
from router.values.request import InferenceRequest
from router.values.status import ReplicaFacts

_MAX_REASON_CHARS = 160
_INTERNALS = re.compile(r"\s*\([^()]*\)|'[^']*/[^']*'|(?:[\w.~-]*/)+[\w.~-]+")


def few_words(reason: str) -> str:
    """Return why an engine does not serve as callers may read it: without paths, process ids and other internals."""
    return " ".join(_INTERNALS.sub("", reason).split())[:_MAX_REASON_CHARS].rstrip(" :;,")


class SupervisedEngine(Engine, Protocol):
    """An engine that counts how often its processes had to be started again."""

    @property
    def restarts(self) -> int:
        """Restarts since `start`."""
        ...


class EngineReplica:
    """`router.values.replica.Replica` on an engine of this tier."""

    def __init__(self, engine: SupervisedEngine, prompts: PromptEncoder, info: ReplicaInfo) -> None:
        """Join the two; the engine may still be starting, the replica is then unavailable.

        Args:
            info: `context_tokens` and `prior` are replaced by what the engine reports and `warm_up` measures.
        """
        self.engine = engine
        self._prompts = prompts
        self._info = info

    @property
    def info(self) -> ReplicaInfo:
        """The static description; its window is the engine's once that is known."""
        known = self.engine.info
        if known is not None and known.context_tokens != self._info.context_tokens:
            self._info = dataclasses.replace(self._info, context_tokens=known.context_tokens)
        return self._info

    @property
    def link(self) -> None:
        """None: the engine runs on this host."""
        return None

    def snapshot(self) -> ReplicaSnapshot:
        """Return the load as the engine last reported it."""
        engine = self.engine
        load, outage = engine.load(), engine.outage
        return ReplicaSnapshot(
            info=self.info,
            available=outage is None,
            slots=engine.info.max_running if engine.info is not None else 0,
            running=load.running,
            queued=load.queued,
            queued_prefill_tokens=load.queued_prefill_tokens,
            pending_decode_tokens=load.pending_decode_tokens,
            kv_free_tokens=load.kv_free_tokens,
            why="" if outage is None else few_words(outage.reason),
            back_in_s=0.0 if outage is None else outage.ready_in_s or 0.0,
        )

    def limit_lines(self, lines: int | None) -> None:
        """See `router.values.replica.HoldsUp`."""
        self.engine.limit_lines(lines)

    def facts(self) -> ReplicaFacts:
        """See `router.values.status.TellsFacts`."""
        known, load = self.engine.info, self.engine.load()
        blocks = load.kv_blocks_total
        return ReplicaFacts(
            kind="torch",
            software=f"torch {installed('torch')}",
            kv_usage=1 - load.kv_blocks_free / blocks if blocks else None,
            cold_starts=self.engine.restarts + (known is not None),
            cold_start_s=None if known is None else round(known.load_s, 3),
            computes_on=() if known is None else known.devices,
        )

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `router.values.replica.Replica.generate`."""
        ids = await self._encode(request)
        cap = self._answer_cap(request, len(ids))
        if cap < 1:  # the continuation was cut exactly where the answer ends
            yield TokenChunk("", tokens=0, finish_reason=FinishReason.LENGTH, prompt_tokens=len(ids))
            return
        tokenizer = self._prompts.tokenizer
        tools = with_tools(request, self._prompts)
        wanted = request.sampling if tools is None else tools.sampling
        said = request.continuation if tools is None else tools.said
        sampling = msgspec.structs.replace(
            wanted, min_tokens=request.min_tokens_left, prompt_logprobs=request.scores_prompt
        )
        text = TextStream(
            tokenizer, sampling.stop, said, sampling.min_tokens, frozenset() if tools is None else tools.shown
        )
        stream = self.engine.generate(
            EngineRequest(
                request_id=request.request_id,
                prompt_ids=tuple(ids),
                sampling=sampling,
                max_tokens=cap,
                priority=request.objective.priority,
                arrival_s=request.accepted_at_s,
                eos_ids=tokenizer.eos_ids,
                cache_owner=request.cache_owner,
                said=said if sampling.constraint is not None else "",
                caller=request.caller,
            )
        )
        told = Told(text, tokenizer, len(ids), logprobs=sampling.logprobs is not None)
        async with contextlib.aclosing(stream):
            async for chunk in stream:
                answered = told.chunk(chunk) if tools is None else tools.onto(told.chunk(chunk))
                if answered.finish_reason is not None:
                    await stream.aclose()  # before the caller reads on: the KV blocks are free at once
                    yield answered
                    return
                yield answered
        raise ReplicaBroken(f"the engine ended request {request.request_id!r} without a finish reason")

    async def warm_up(self, clock: Clock) -> None:
        """Measure prefill and decode speed on the idle engine, and make them the prior.

        Raises:
            ReplicaError: the engine died meanwhile.
        """
        known = self.engine.info
        if known is None:
            return
        prior = await measure_speed(self.engine, known, clock)
        self._info = dataclasses.replace(self.info, prior=prior)

    async def _encode(self, request: InferenceRequest) -> list[int]:
        known = request.token_ids(self._prompts)
        if known is not None:
            return known
        if size_chars(request.to_continue) < IN_THREAD_CHARS:
            return self._prompts.encode(request.to_continue, request.continuation)
        return await asyncio.to_thread(self._prompts.encode, request.to_continue, request.continuation)

    def _answer_cap(self, request: InferenceRequest, prompt_tokens: int) -> int:
        """Return how many tokens may be generated.

        Raises:
            ContextTooLong: the prompt leaves no room for one.
        """
        window = self.info.context_tokens
        if prompt_tokens >= window:
            raise ContextTooLong.of(
                window,
                f"the prompt has {prompt_tokens} tokens, which leave no room for an answer of {self._info.variant}",
                param="messages" if isinstance(request.to_continue, ChatPrompt) else "prompt",
            )
        room = window - prompt_tokens
        asked = request.sampling.max_tokens
        return room if asked is None else min(room, asked - request.continuation_tokens)
