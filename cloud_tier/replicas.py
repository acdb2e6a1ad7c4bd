"""An engine as the router sees it: prompts in, text out, load figures, and a speed measured at start."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cloud_tier.engine.protocol import Engine, EngineLoad, EngineRequest
from models.chat import PromptEncoder
from models.tokenizer import TextStream
from router.clock import Clock
from router.errors import ContextTooLong, ModelNotFound, ReplicaBroken
from router.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.wire.inference import (
    IN_THREAD_CHARS,
    ChatPrompt,
    FinishReason,
    InferenceRequest,
    Prompt,
    SamplingParams,
    TokenChunk,
    size_chars,
)

_NORMALISED = 2  # Unicode normalisation (NFC) can join up to two characters into a byte's worth of text each
_WARM_UP_PROMPT_TOKENS = 256
_WARM_UP_DECODE_TOKENS = 16
_WARM_UP_BATCH = 4


class SupervisedEngine(Engine, Protocol):
    """An engine that counts how often its processes had to be started again."""

    @property
    def restarts(self) -> int:
        """Restarts since `start`."""
        ...


class EngineReplica:
    """`router.replica.Replica` on an engine of this tier."""

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
        load = engine.load()
        return ReplicaSnapshot(
            info=self.info,
            available=engine.ready,
            slots=engine.info.max_running if engine.info is not None else 0,
            running=load.running,
            queued=load.queued,
            queued_prefill_tokens=load.queued_prefill_tokens,
            pending_decode_tokens=load.pending_decode_tokens,
            kv_free_tokens=load.kv_blocks_free * load.kv_block_tokens if load.kv_blocks_total else None,
            why="" if engine.ready else f"engine is {engine.state.value}",
        )

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `router.replica.Replica.generate`."""
        ids = await self._encode(request)
        cap = self._answer_cap(request, len(ids))
        if cap < 1:  # the continuation was cut exactly where the answer ends
            yield TokenChunk("", tokens=0, finish_reason=FinishReason.LENGTH, prompt_tokens=len(ids))
            return
        tokenizer = self._prompts.tokenizer
        text = TextStream(tokenizer, request.sampling.stop, prompt_tail=request.continuation)
        stream = self.engine.generate(
            EngineRequest(
                request_id=request.request_id,
                prompt_ids=tuple(ids),
                sampling=request.sampling,
                max_tokens=cap,
                priority=request.objective.priority,
                arrival_s=request.accepted_at_s,
                eos_ids=tokenizer.eos_ids,
            )
        )
        async with contextlib.aclosing(stream):
            async for chunk in stream:
                delta = text.push(chunk.token_ids)
                tokens = len(chunk.token_ids)
                if delta.stopped:
                    await stream.aclose()  # before the caller reads on: the KV blocks are free at once
                    yield TokenChunk(delta.text, tokens, FinishReason.STOP, len(ids))
                    return
                if chunk.finish_reason is not None:
                    yield TokenChunk(delta.text + text.finish(), tokens, chunk.finish_reason, len(ids))
                    return
                yield TokenChunk(delta.text, tokens)
        raise ReplicaBroken(f"the engine ended request {request.request_id!r} without a finish reason")

    async def warm_up(self, clock: Clock) -> None:
        """Measure prefill and decode speed on the idle engine, and make them the prior.

        Raises:
            ReplicaError: the engine died meanwhile.
        """
        known = self.engine.info
        if known is None:
            return
        size = max(2, min(_WARM_UP_PROMPT_TOKENS, known.context_tokens // 2))
        steps = max(2, min(_WARM_UP_DECODE_TOKENS, known.context_tokens - size - 1))
        batch = min(_WARM_UP_BATCH, known.max_running)
        probe = _Probe(self.engine, clock, self._prompts.tokenizer.vocab_size)
        await probe.run(8, 2)  # the first steps allocate and compile
        prefill_s = (await probe.run(size, 1)).first_s
        single_s = (await probe.run(8, steps)).gap_s
        runs = await asyncio.gather(*(probe.run(8, steps) for _ in range(batch)))
        batched_s = sum(run.gap_s for run in runs) / batch
        slope = (batched_s / single_s - 1) / (batch - 1) if batch > 1 else 0.2
        prior = SpeedPrior(
            prefill_tokens_per_s=size / prefill_s,
            decode_tokens_per_s=1 / single_s,
            decode_batch_slope=min(max(slope, 0.0), 1.0),
            source=f"measured at start: {size} prompt tokens, {steps} decode steps at batch 1 and {batch}",
        )
        self._info = dataclasses.replace(self.info, prior=prior)

    async def _encode(self, request: InferenceRequest) -> list[int]:
        if size_chars(request.prompt) < IN_THREAD_CHARS:
            return self._prompts.encode(request.prompt, request.continuation)
        return await asyncio.to_thread(self._prompts.encode, request.prompt, request.continuation)

    def _answer_cap(self, request: InferenceRequest, prompt_tokens: int) -> int:
        """Return how many tokens may be generated.

        Raises:
            ContextTooLong: the prompt leaves no room for one.
        """
        window = self.info.context_tokens
        if prompt_tokens >= window:
            raise ContextTooLong(
                f"the prompt has {prompt_tokens} tokens and the window of {self._info.variant} {window}, "
                "which leaves no room for an answer; shorten the prompt",
                param="messages" if isinstance(request.prompt, ChatPrompt) else "prompt",
            )
        room = window - prompt_tokens
        asked = request.sampling.max_tokens
        return room if asked is None else min(room, asked - request.continuation_tokens)


class TierPrompts:
    """`router.gateway.deps.PromptCounter` for every name that this tier answers to.

    What is far too long for the window is refused by its size, before seconds and hundreds of megabytes go into its
    tokens: a token is never longer than the vocabulary's longest, and a turn of a chat never less than one token.
    """

    def __init__(self, encoders: Mapping[str, PromptEncoder], window_tokens: int) -> None:
        """Take encoders by family and variant name, and the longest window among their models."""
        self._encoders = dict(encoders)
        self._window_tokens = window_tokens
        longest = {id(encoder): _longest_token_chars(encoder) for encoder in encoders.values()}
        self._limit_chars = {
            name: _NORMALISED * window_tokens * longest[id(encoder)] for name, encoder in encoders.items()
        }

    def count(self, model: str, prompt: Prompt) -> int:
        """Return the length of the rendered prompt, in tokens.

        Raises:
            ModelNotFound: the tier serves no such model.
            ContextTooLong: it cannot fit any window, whatever it says.
            InvalidRequest: the prompt cannot be encoded.
        """
        encoder = self._encoders.get(model)
        if encoder is None:
            known = ", ".join(sorted(self._encoders)) or "none yet"
            raise ModelNotFound(f"`model`: `{model}` is not served here; served here: {known}", param="model")
        self._refuse_hopeless(model, prompt)
        return len(encoder.encode(prompt))

    def _refuse_hopeless(self, model: str, prompt: Prompt) -> None:
        chat = isinstance(prompt, ChatPrompt)
        turns = len(prompt.messages) if isinstance(prompt, ChatPrompt) else 0
        size = size_chars(prompt)
        if turns <= self._window_tokens and size <= self._limit_chars[model]:
            return
        what = f"{turns} messages" if turns > self._window_tokens else f"a prompt of {size} characters"
        raise ContextTooLong(
            f"{what}: the longest window of `{model}` here is {self._window_tokens} tokens, prompt and answer together",
            param="messages" if chat else "prompt",
        )


class EngineMetrics(Collector):
    """What each engine does, read at every scrape."""

    def __init__(self, replicas: Sequence[EngineReplica]) -> None:
        """Watch these replicas; the sequence may grow later."""
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Yield one family a figure, one sample an engine."""
        restarts = CounterMetricFamily(
            "overspill_engine_restarts", "Times the engine's processes were started again.", labels=["engine"]
        )
        ready = GaugeMetricFamily("overspill_engine_ready", "1 while the engine serves.", labels=["engine"])
        usage = GaugeMetricFamily("overspill_engine_kv_usage_ratio", "Used share of KV blocks.", labels=["engine"])
        step = GaugeMetricFamily("overspill_engine_step_seconds", "Smoothed duration of a step.", labels=["engine"])
        preempted = CounterMetricFamily(
            "overspill_engine_preemptions", "Sequences preempted since the engine's last start.", labels=["engine"]
        )
        hits = CounterMetricFamily(
            "overspill_engine_prefix_hit_tokens",
            "Prompt tokens found in the KV cache since the engine's last start.",
            labels=["engine"],
        )
        for replica in self._replicas:
            name = [replica.info.replica_id]
            load = replica.engine.load()
            restarts.add_metric(name, replica.engine.restarts)
            ready.add_metric(name, float(replica.engine.ready))
            usage.add_metric(name, kv_usage([load]) or 0.0)
            step.add_metric(name, load.step_s)
            preempted.add_metric(name, load.preemptions)
            hits.add_metric(name, load.prefix_hit_tokens)
        yield from (restarts, ready, usage, step, preempted, hits)


def kv_usage(loads: Sequence[EngineLoad]) -> float | None:
    """Return the used share of all KV blocks in [0, 1]; None while no engine runs."""
    total = sum(load.kv_blocks_total for load in loads)
    return 1 - sum(load.kv_blocks_free for load in loads) / total if total else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Timing:
    """Seconds from sending to the first token, and between tokens after it."""

    first_s: float
    gap_s: float


class _Probe:
    """Sends prompts of fresh pseudo-random ids, so that no prefix is found in the cache, and times the answers."""

    def __init__(self, engine: Engine, clock: Clock, vocab_size: int) -> None:
        self._engine = engine
        self._clock = clock
        self._vocab_size = vocab_size
        self._next_id = 1

    async def run(self, prompt_tokens: int, answer_tokens: int) -> _Timing:
        first = self._next_id
        self._next_id += prompt_tokens
        ids = tuple(index * 7919 % self._vocab_size for index in range(first, first + prompt_tokens))
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        began_s = self._clock.now_s()
        first_s = 0.0
        ahead = 0  # tokens of the first chunk, which took no gap
        seen = 0
        stream = self._engine.generate(EngineRequest(f"warm-up-{first}", ids, sampling, answer_tokens))
        async with contextlib.aclosing(stream):
            async for chunk in stream:
                seen += len(chunk.token_ids)
                if not ahead:
                    first_s = self._clock.now_s() - began_s
                    ahead = seen
        gap_s = (self._clock.now_s() - began_s - first_s) / max(seen - ahead, 1)
        return _Timing(max(first_s, 1e-6), max(gap_s, 1e-6))


def _longest_token_chars(prompts: PromptEncoder) -> int:
    tokenizer = prompts.tokenizer
    return max(len(tokenizer.token_of(token) or "") for token in range(tokenizer.vocab_size))
