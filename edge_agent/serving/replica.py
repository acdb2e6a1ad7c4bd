"""A local model as the router sees it: a description, a load snapshot, a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import TracebackType

from msgspec.structs import replace

from edge_agent.generate.batcher import BatchLimits, Sequence
from edge_agent.generate.logprobs import Logprobs
from edge_agent.generate.loop import GenerationLoop
from edge_agent.generate.request import Generation
from edge_agent.generate.sampling import Sampler
from edge_agent.generate.token_rules import TokenRules
from edge_agent.generate.turn import Turn
from edge_agent.runtime.protocol import Runtime
from edge_agent.serving.artifact_watch import ArtifactWatch
from edge_agent.serving.prompts import PromptCodec
from models.text.grammar import Matcher
from models.text.tools.answer import with_tools
from router.base.errors import ContextTooLong, InvalidRequest, OverspillError, ReplicaUnreachable, Unavailable
from router.base.extras import installed
from router.values.chunk import TokenChunk
from router.values.prompt import IN_THREAD_CHARS, ChatPrompt, size_chars
from router.values.replica import ReplicaInfo, ReplicaSnapshot
from router.values.request import InferenceRequest
from router.values.status import ReplicaFacts
from router.values.token_rules import check_token_rules, ending_ids

_RETRY_BOUNDS_S = (0.25, 60.0)
_DISTRIBUTIONS = {"onnx": ("onnxruntime-gpu", "onnxruntime"), "tensorrt": ("tensorrt", "tensorrt_rtx")}
_STUCK_S = 60.0  # a step takes milliseconds, a chunk of a prompt on the slowest board a few seconds


@dataclass(frozen=True, slots=True)
class LocalModel:
    """What it takes to serve one variant on this device.

    Attributes:
        limits: KV slots and the pace of prefill.
        queue_limit: requests that may wait beyond the slots.
        open_runtime: loads the model; called in a worker thread.
        codec: tokenizer and chat template; None where no rung of the family has a readable one.
        digest: of the artifact's manifest; empty where that cannot be read.
        unload_idle_s: free it when it had no request for so long; 0 never does.
        keep_kv: keep the KV caches of ended answers, for prompts of the same caller that begin alike.
        fault: why it cannot be served, known before loading; empty for a whole artifact.
        watch: tells whether the artifact has changed; None for a broken one.
        cold_start_s: first guess of how long loading takes.
        prepare: does what a load can have done before it, such as a private copy; called in a worker thread.
        has_copy: whether it was loaded from a copy that is not the store's; None where none is made.
    """

    info: ReplicaInfo
    limits: BatchLimits
    queue_limit: int
    open_runtime: Callable[[], Runtime]
    codec: PromptCodec | None
    digest: str = ""
    unload_idle_s: float = 0.0
    keep_kv: bool = False
    fault: str = ""
    watch: ArtifactWatch | None = None
    cold_start_s: float = 1.5
    prepare: Callable[[], object] | None = None
    has_copy: Callable[[], bool] | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that a replica is made from: equal models need only one."""
        return (self.info, self.limits, self.queue_limit, self.digest, self.fault)

    def replica(self, turn: Turn) -> LocalReplica:
        """Make its replica."""
        return LocalReplica(self, turn)


class LocalReplica:
    """`edge_agent.serving.lineup.ServedHere` over a generation loop.

    Create it on the event loop; use as `async with`.

    Attributes:
        fault: why its artifact must not be loaded; empty when nothing is known against it.
        notice: what an operator should know of a model that serves all the same.
    """

    link = None

    def __init__(self, model: LocalModel, turn: Turn) -> None:
        self._model = model
        self._throttled_why = ""
        self.fault = model.fault
        self.notice = ""
        self.loop = GenerationLoop(
            model.info.variant,
            model.open_runtime,
            model.limits,
            turn,
            model.unload_idle_s or None,
            keep_kv=model.keep_kv,
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
    def codec(self) -> PromptCodec | None:
        """Tokenizer and chat template; None where they cannot be read."""
        return self._model.codec

    @property
    def watch(self) -> ArtifactWatch | None:
        """Tells whether the artifact has changed; None for one that was broken from the start."""
        return self._model.watch

    @property
    def problem(self) -> str:
        """Why it cannot answer; empty for one that can, or that loads with its first request."""
        if self.loaded:
            stuck_s = self.loop.stuck_s
            return f"its runtime has not come back from a step for {stuck_s:.0f} s" if stuck_s > _STUCK_S else ""
        return self.fault or (self.loop.problem if self.loop.failed else "")

    @property
    def failed(self) -> bool:
        """Whether it should be loaded and is not; `load` tries again."""
        return self.loop.failed

    @property
    def resting(self) -> bool:
        """Whether it failed a moment ago."""
        return self.loop.resting

    @property
    def idle(self) -> bool:
        """Nobody waits for an answer of it."""
        return next(self.loop.live, None) is None

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Accelerators asked for and not had, a line each."""
        runtime = self.loop.runtime
        return () if runtime is None else runtime.facts.fallbacks

    @property
    def slots(self) -> int:
        """Answers computed together at most."""
        return self.loop.slots

    async def tend(self) -> None:
        """Do nothing: its loop looks after itself."""

    @property
    def digest(self) -> str:
        """`sha256:…` of the artifact's manifest, which holds the digests of all its files."""
        return self._model.digest

    @property
    def loaded(self) -> bool:
        return self.loop.runtime is not None

    @property
    def remarks(self) -> str:
        """All that an operator should know of it, empty when it is as configured."""
        runtime = self.loop.runtime
        facts = (*runtime.facts.fallbacks, *runtime.facts.notes) if runtime is not None else ()
        return "; ".join(filter(None, (self.problem, self.notice, *facts)))

    @property
    def can_do_without_store(self) -> bool:
        """Whether it is loaded, or can be loaded from its own copy, whatever has become of the store's files."""
        return self.loaded or (self._model.has_copy is not None and self._model.has_copy())

    def prepare(self) -> None:
        """Do ahead what the first load would otherwise wait for. Blocks.

        Raises:
            ArtifactError: the artifact is damaged.
        """
        if self._model.prepare is not None:
            self._model.prepare()

    async def load(self) -> None:
        """Load the model before its first request.

        Raises:
            ReplicaUnreachable: it cannot be loaded; says why.
        """
        if self.fault:
            raise ReplicaUnreachable(f"{self.info.variant}: {self.fault}")
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
            load_s = self._model.cold_start_s if self.loop.load_s is None else self.loop.load_s
            prefill += int(load_s * info.prior.prefill_tokens_per_s)
        return ReplicaSnapshot(
            info=info,
            available=not self.problem,
            slots=slots,
            running=running,
            queued=queued,
            queued_prefill_tokens=prefill,
            pending_decode_tokens=decode,
            kv_free_tokens=max(0, slots * info.context_tokens - held),
            why=self.problem or self._throttled_why,
        )

    def facts(self) -> ReplicaFacts:
        """See `router.values.status.TellsFacts`."""
        runtime, load = self.loop.runtime, self.snapshot()
        room = load.slots * self.info.context_tokens
        return ReplicaFacts(
            kind="" if runtime is None else runtime.facts.name,
            software="" if runtime is None else _software(runtime.facts.name),
            version=self.digest,
            kv_usage=1 - (load.kv_free_tokens or 0) / room if room else None,
            cold_starts=self.loop.counters.loads,
            cold_start_s=None if self.loop.load_s is None else round(self.loop.load_s, 3),
            computes_on=() if runtime is None else runtime.facts.providers,
        )

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        self._admit()
        prompt_ids = await self._encode(request)
        tools = with_tools(request, self._readable_codec().encoder)
        if tools is not None:
            request = replace(request, sampling=tools.sampling, continuation=tools.said)
        shown = frozenset() if tools is None else tools.shown
        generation = self._generation(request, prompt_ids, await self._matcher(request), shown)
        self._admit()  # again: encoding and compiling may have taken a while
        self.loop.submit(generation)
        try:
            while True:
                item = await generation.inbox.get()
                if isinstance(item, OverspillError):
                    raise item
                yield item if tools is None else tools.onto(item)
                if item.finish_reason is not None:
                    return
        finally:
            self.loop.cancel(generation)

    def _admit(self) -> None:
        """Raises Unavailable when the replica has no room, with an estimate of when it will."""
        if self.problem:
            retry_after_s = max(self.loop.rest_s, _RETRY_BOUNDS_S[0])
            raise Unavailable(f"{self.info.replica_id}: {self.problem}", retry_after_s=retry_after_s)
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

    def _readable_codec(self) -> PromptCodec:
        if self._model.codec is None:
            raise ReplicaUnreachable(f"{self.info.replica_id}: {self.problem or 'it has no tokenizer'}")
        return self._model.codec

    async def _encode(self, request: InferenceRequest) -> list[int]:
        codec, prompt = self._readable_codec(), request.to_continue
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
            raise ContextTooLong.of(
                window,
                f"the prompt has {len(ids)} tokens, which leave no room for an answer of {self.info.variant}",
                param="messages" if isinstance(prompt, ChatPrompt) else "prompt",
            )
        return ids

    async def _matcher(self, request: InferenceRequest) -> Matcher | None:
        """Compile what the answer has to match, beside this loop.

        Raises:
            InvalidRequest: it cannot be enforced.
        """
        constraint = request.sampling.constraint
        if constraint is None:
            return None
        grammars = self._readable_codec().grammars
        return await asyncio.wrap_future(grammars.begin(constraint, request.continuation, request.caller))

    def _generation(
        self, request: InferenceRequest, prompt_ids: list[int], matcher: Matcher | None, shown: frozenset[int]
    ) -> Generation:
        sampling, codec = request.sampling, self._readable_codec()
        check_token_rules(sampling, codec.vocab_size, codec.eos_ids)
        ends = ending_ids(sampling, codec.eos_ids)
        rules = TokenRules.of(sampling, ends, request.min_tokens_left)
        room = self.info.context_tokens - len(prompt_ids)
        wanted = room if sampling.max_tokens is None else max(1, sampling.max_tokens - request.continuation_tokens)
        return Generation(
            request_id=request.request_id,
            sequence=Sequence(
                prompt_ids=prompt_ids,
                max_tokens=min(room, wanted),
                sampler=Sampler(sampling, prompt_ids, codec.vocab_size, rules),
                priority=request.objective.priority,
                caller=request.cache_owner,
                exact=sampling.repeatable,
                scored=request.scores_prompt,
                matcher=matcher,
            ),
            text=codec.text_stream(sampling.stop, request.continuation, request.min_tokens_left, shown),
            ending_ids=ends,
            logprobs=_logprobs(request, codec),
        )


def _logprobs(request: InferenceRequest, codec: PromptCodec) -> Logprobs | None:
    top = request.sampling.logprobs
    return None if top is None else Logprobs(top, codec.logprob_stream(), [] if request.scores_prompt else None)


def _software(runtime: str) -> str:
    """Name what a runtime is installed as, with its version; empty where that cannot be told."""
    return next((f"{name} {found}" for name in _DISTRIBUTIONS.get(runtime, ()) if (found := installed(name))), "")
