"""A local model as the router sees it: a description, a load snapshot, a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import TracebackType

from edge_agent.generate.batcher import BatchLimits, Sequence
from edge_agent.generate.loop import GenerationLoop
from edge_agent.generate.request import Generation
from edge_agent.generate.sampling import Sampler
from edge_agent.generate.turn import Turn
from edge_agent.runtime.protocol import Runtime
from edge_agent.serving.prompts import PromptCodec
from router.base.errors import ContextTooLong, InvalidRequest, OverspillError, Unavailable
from router.values.replica import ReplicaInfo, ReplicaSnapshot
from router.values.request import IN_THREAD_CHARS, ChatPrompt, InferenceRequest, TokenChunk, size_chars

_COLD_START_S = 1.5
_RETRY_BOUNDS_S = (0.25, 60.0)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """What it takes to serve one variant on this device.

    Attributes:
        limits: KV slots and the pace of prefill.
        queue_limit: requests that may wait beyond the slots.
        open_runtime: loads the model; called in a worker thread.
        codec: tokenizer and chat template.
        digest: of the artifact's manifest.
        unload_idle_s: free it when it had no request for so long; 0 never does.
    """

    info: ReplicaInfo
    limits: BatchLimits
    queue_limit: int
    open_runtime: Callable[[], Runtime]
    codec: PromptCodec
    digest: str = ""
    unload_idle_s: float = 0.0


class LocalReplica:
    """`router.values.replica.Replica` over a generation loop. Create it on the event loop; use as `async with`."""

    link = None

    def __init__(self, model: LocalModel, turn: Turn) -> None:
        self._model = model
        self._throttled_why = ""
        self.loop = GenerationLoop(
            model.info.variant, model.open_runtime, model.limits, turn, model.unload_idle_s or None
        )

    async def __aenter__(self) -> LocalReplica:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Free the model; requests still running end as `ReplicaBroken`."""
        await self.loop.close()

    @property
    def info(self) -> ReplicaInfo:
        return self._model.info

    @property
    def codec(self) -> PromptCodec:
        """Tokenizer and chat template."""
        return self._model.codec

    @property
    def digest(self) -> str:
        """`sha256:…` of the artifact's manifest, which holds the digests of all its files."""
        return self._model.digest

    @property
    def loaded(self) -> bool:
        return self.loop.runtime is not None

    async def load(self) -> None:
        """Load the model before its first request.

        Raises:
            ReplicaUnreachable: it cannot be loaded; says why.
        """
        await self.loop.load()

    def throttle(self, why: str) -> None:
        """Offer one slot instead of all while the device is in trouble (`why`); an empty text ends that."""
        self._throttled_why = why
        self.loop.limit_slots(1 if why else self._model.limits.slots)

    def snapshot(self) -> ReplicaSnapshot:
        info = self._model.info
        running = queued = prefill = decode = held = 0
        for generation in self.loop.live:
            sequence = generation.sequence
            if sequence.handle is None:
                queued += 1
            else:
                running += 1
                held += sequence.fed
            prefill += sequence.prefill_tokens_left
            decode += sequence.decode_tokens_left
        slots = self.loop.slots
        if not self.loaded:  # the first request also waits for the weights; counted in the currency of this snapshot
            prefill += int(_COLD_START_S * info.prior.prefill_tokens_per_s)
        return ReplicaSnapshot(
            info=info,
            available=not self.loop.resting,
            slots=slots,
            running=running,
            queued=queued,
            queued_prefill_tokens=prefill,
            pending_decode_tokens=decode,
            kv_free_tokens=max(0, slots * info.context_tokens - held),
            why=self.loop.problem if self.loop.resting else self._throttled_why,
        )

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        self._admit()
        prompt_ids = await self._encode(request)
        generation = self._generation(request, prompt_ids)
        self._admit()  # again: encoding may have taken a while
        self.loop.submit(generation)
        try:
            while True:
                item = await generation.inbox.get()
                if isinstance(item, OverspillError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self.loop.cancel(generation)

    def _admit(self) -> None:
        """Raises Unavailable when the replica has no room, with an estimate of when it will."""
        if self.loop.resting:
            raise Unavailable(f"{self.info.replica_id}: {self.loop.problem}", retry_after_s=self.loop.rest_s)
        waiting = self.loop.waiting
        if waiting >= self._model.queue_limit:
            raise Unavailable(
                f"{self.info.replica_id}: {waiting} requests wait already, the limit is {self._model.queue_limit}",
                retry_after_s=self._next_slot_s(),
            )

    def _next_slot_s(self) -> float:
        """Time until the running request with the fewest tokens left is done, at the speed of the prior."""
        prior = self.info.prior
        step_s = (1 + prior.decode_batch_slope * (self.loop.slots - 1)) / prior.decode_tokens_per_s
        left = [item.sequence.decode_tokens_left for item in self.loop.live if item.sequence.handle is not None]
        return min(max(min(left, default=0) * step_s, _RETRY_BOUNDS_S[0]), _RETRY_BOUNDS_S[1])

    async def _encode(self, request: InferenceRequest) -> list[int]:
        codec, prompt = self._model.codec, request.prompt
        ids = request.token_ids(codec.encoder)
        if ids is not None:
            pass  # the gateway has encoded it to count it
        elif size_chars(prompt) + len(request.continuation) < IN_THREAD_CHARS:
            ids = codec.encode(prompt, request.continuation)
        else:
            ids = await asyncio.to_thread(codec.encode, prompt, request.continuation)
        if not ids:
            raise InvalidRequest("prompt: must not be empty", param="prompt")
        window = self.info.context_tokens
        if len(ids) >= window:
            raise ContextTooLong(
                f"prompt: {len(ids)} tokens leave no room for an answer in the window of {window} tokens of "
                f"{self.info.variant}; shorten the prompt",
                param="messages" if isinstance(prompt, ChatPrompt) else "prompt",
            )
        return ids

    def _generation(self, request: InferenceRequest, prompt_ids: list[int]) -> Generation:
        sampling, codec = request.sampling, self._model.codec
        room = self.info.context_tokens - len(prompt_ids)
        wanted = room if sampling.max_tokens is None else max(1, sampling.max_tokens - request.continuation_tokens)
        return Generation(
            request_id=request.request_id,
            sequence=Sequence(
                prompt_ids=prompt_ids,
                max_tokens=min(room, wanted),
                sampler=Sampler(sampling, prompt_ids, codec.vocab_size),
                priority=request.objective.priority,
            ),
            text=codec.text_stream(sampling.stop, request.continuation),
            eos_ids=frozenset() if sampling.ignore_eos else codec.eos_ids,
        )
