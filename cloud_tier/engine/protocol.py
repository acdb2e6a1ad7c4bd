"""What the cloud tier asks of an engine, in plain values: nothing here imports torch.

One request's life: `Engine.generate` hands an `EngineRequest` to the engine process; its scheduler lets it wait, gives
it KV blocks, runs it in steps beside the others, and every step's new tokens come back as `EngineChunk`s.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import msgspec

from router.base.errors import ConfigError
from router.values.chunk import FinishReason
from router.values.logprobs import DrawnToken
from router.values.request import LINE_PRIORITY, SLACK_PRIORITY
from router.values.sampling import SamplingParams
from router.values.token_rules import ending_ids

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine: one variant of one model, on one or more ranks.

    Attributes:
        weights: a GGUF file or a Hugging Face directory, as `models.formats.weights.open_weights` takes it.
        layers: the layers to keep, in order, for a depth-pruned variant; None keeps all.
        dtype: of weights, activations and KV cache; logits are float32 always. `int8`, on a CPU alone, is W8A8: int8
            weights and inputs of the matrix products, float32 between them, bfloat16 keys and values.
        tensor_parallel: ranks, one process each; at most the model's number of KV heads.
        max_running: sequences that may be in one step.
        token_budget: most tokens computed in one step, over all sequences; must exceed `max_running`.
        step_target_s: how long a step may hold up decoding sequences for somebody else's prompt, in seconds: while
            some decode, prompts are computed in chunks that fit this time at the measured speed.
        kv_block_tokens, kv_cache_tokens: size of a KV block, and of the cache, in tokens.
        max_context_tokens: window for prompt and answer together; None takes the model's, and the cache bounds both.
        threads: torch threads a rank: one number, or several in ascending order, of which the fastest is found while
            it runs (see `threads.Threads`).
        draft_tokens: most tokens drafted for a greedy sequence, in steps where that pays; 0 is off. Answers are the
            same either way.
        draft_weights, draft_layers: of a smaller model of the same vocabulary that drafts, as `weights` and `layers`;
            None drafts out of what a sequence said before.
        prefix_caching: keep the KV blocks of finished sequences until their room is needed.
        step_timeout_s: the engine is killed and restarted when it has work and reports nothing for so long.
        start_timeout_s: bound on loading the weights.
        gpus: the GPUs of the ranks, by index or UUID as in CUDA_VISIBLE_DEVICES; empty leaves that variable as it is.
    """

    weights: str
    layers: tuple[int, ...] | None = None
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    tensor_parallel: Positive = 1
    max_running: Positive = 16
    token_budget: Positive = 256
    step_target_s: Seconds = 0.25
    kv_block_tokens: Positive = 16
    kv_cache_tokens: Positive = 16384
    max_context_tokens: Positive | None = None
    threads: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)] = (1,)
    draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=32)] = 0
    draft_weights: str | None = None
    draft_layers: tuple[int, ...] | None = None
    prefix_caching: bool = True
    step_timeout_s: Seconds = 60.0
    start_timeout_s: Seconds = 300.0
    gpus: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what the types cannot say.

        Raises:
            ConfigError: two fields contradict each other.
        """
        if self.dtype == "int8" and self.device != "cpu":
            raise ConfigError(
                "dtype = 'int8' is for the CPU; on a GPU set dtype = 'bfloat16', or serve with vLLM", param="dtype"
            )
        if self.draft_weights is not None and self.tensor_parallel > 1:
            raise ConfigError(
                f"a model that drafts runs beside an engine of one rank, not of {self.tensor_parallel}; set "
                "tensor_parallel = 1, or draft_tokens without `draft`",
                param="draft",
            )
        if self.token_budget <= self.max_running:
            raise ConfigError(
                f"token_budget = {self.token_budget} must exceed max_running = {self.max_running}, or prompts would "
                "never be computed while that many sequences decode",
                param="token_budget",
            )
        if self.kv_cache_tokens < 2 * self.kv_block_tokens:
            raise ConfigError(
                f"kv_cache_tokens = {self.kv_cache_tokens} holds fewer than two blocks of {self.kv_block_tokens} "
                "tokens; raise it",
                param="kv_cache_tokens",
            )


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue.

    Attributes:
        request_id: for logs; need not be unique.
        max_tokens: bound on generated tokens; the context window bounds it too. `sampling.max_tokens` is not read.
        priority: higher is served first and preempted last; equals are served in the order of `arrival_s`. Lines
            yield to all others: see `Engine.limit_lines`.
        eos_ids: tokens that end the answer (unless `sampling.ignore_eos`); they are not emitted.
        cache_owner: requests of other owners find nothing of this one in the prefix cache, nor it of theirs.
        said: text of the answer that the prompt ends with, which `sampling.constraint` holds for too.
        caller: whose it is: constraints are compiled by turns of their callers.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    priority: int = 0
    arrival_s: float = 0.0
    eos_ids: frozenset[int] = frozenset()
    cache_owner: str = ""
    said: str = ""
    caller: str = ""

    @property
    def in_slack(self) -> bool:
        """Whether it asks for what nobody else needs."""
        return self.priority <= SLACK_PRIORITY

    @property
    def yields(self) -> bool:
        """Whether it is held up for all others, with all that it has."""
        return self.priority <= LINE_PRIORITY

    @property
    def ending_ids(self) -> frozenset[int]:
        """All tokens that end the answer."""
        return ending_ids(self.sampling, self.eos_ids)


@dataclass(frozen=True, slots=True)
class EngineChunk:
    """New tokens of one request: at least one, except in a last chunk, which carries the finish reason.

    `STOP` means that a token of `ending_ids` was drawn, or that the constraint lets nothing follow; `LENGTH`, that
    `max_tokens` or the context window was reached. Stop strings are the caller's: it closes the generator.

    Attributes:
        closed: with `STOP`: a token of `ending_ids` ended it. It is not in `token_ids`, and counts.
        cached_tokens: set on the first chunk: tokens of the prompt that were found in the prefix cache.
        logprobs: of `token_ids`, where they were asked for; prompt_logprobs: of the prompt, on the first chunk.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    logprobs: tuple[DrawnToken, ...] = ()
    prompt_logprobs: tuple[DrawnToken, ...] = ()
    closed: bool = False


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's load as last reported, with requests sent since then counted as queued.

    Lines are no load: they are held up for all others, and their blocks are taken where these need them.

    Attributes:
        running, queued: sequences in steps; sequences waiting (new and preempted ones).
        queued_prefill_tokens: prompt tokens accepted and not yet computed, of running and waiting sequences.
        pending_decode_tokens: upper bound on tokens still to generate.
        kv_blocks_total, kv_blocks_free: free ones include those kept for prefix hits, which yield when needed.
        kv_block_tokens: size of a block; 0 before the engine has told.
        step_s: smoothed duration of one step, in seconds; 0 before the first.
        preemptions, prefix_hit_tokens: counted since the engine process started.
        failed: requests that failed alone since then.
        drafted_tokens, accepted_tokens: drafted since then, and how many of them were right.
    """

    running: int = 0
    queued: int = 0
    queued_prefill_tokens: int = 0
    pending_decode_tokens: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    step_s: float = 0.0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    failed: int = 0
    kv_block_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def kv_free_tokens(self) -> int | None:
        """Tokens for which the KV cache has room once all accepted prompts are computed; None if it is not known."""
        if not self.kv_block_tokens:
            return None
        return max(0, self.kv_blocks_free * self.kv_block_tokens - self.queued_prefill_tokens)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is known once the weights are loaded.

    Attributes:
        context_tokens: the window in force: the least of the model's, the configuration's and the cache's.
        load_s: seconds from the start of the processes to ready.
        pids: one process a rank, rank 0 first.
        devices: what each rank computes on, as torch says it: `cpu`, `cuda (NVIDIA H100)`.
    """

    vocab_size: int
    context_tokens: int
    max_running: int
    tensor_parallel: int
    load_s: float = 0.0
    pids: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()


class EngineState(enum.Enum):
    """Where the engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineOutage:
    """Why an engine does not serve now, and when it should again.

    Attributes:
        reason: one short line, fit for a reply to a caller and for a log.
        ready_in_s: seconds until it should be ready: what is left of the pause, plus as long as the last start took.
            0 where that time has passed already; None where no start has succeeded yet, or none will follow.
    """

    reason: str
    ready_in_s: float | None


class Engine(Protocol):
    """Runs one variant for many callers at once. Lives in one event loop; everything heavy is in other processes."""

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        ...

    @property
    def ready(self) -> bool:
        """True while `generate` is served."""
        ...

    @property
    def outage(self) -> EngineOutage | None:
        """Why the engine does not serve and when it should again, None while it is ready."""
        ...

    @property
    def info(self) -> EngineInfo | None:
        """The static description, None before the engine was first ready."""
        ...

    async def start(self) -> None:
        """Return when the engine is ready.

        Raises:
            ArtifactError: the weights are missing or of a kind the engine cannot run.
            ConfigError: the configuration does not fit the model.
            ReplicaUnreachable: the engine process died or did not become ready in time.
        """
        ...

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `drain_s` seconds, then end every process."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """Stream the answer; closing the generator ends the sequence and frees its KV blocks.

        Raises:
            InvalidRequest: the prompt is empty or holds ids outside the vocabulary; a constraint cannot be enforced.
            ContextTooLong: the prompt leaves no room for one token.
            RequestFailed: this request failed in the engine, which goes on with the others.
            ReplicaUnreachable: nothing was generated; the engine is not ready, or died before the first token.
            ReplicaBroken: the engine died after the first token.
        """
        ...

    def limit_lines(self, lines: int | None) -> None:
        """Let that many requests that yield be computed; the others are held up with all that they have.

        On a CPU a step of such requests alone is left, and computed again, once none of them may run.

        Args:
            lines: in one step, whoever else is in it; None: all of them, while the engine has no other request.
        """
        ...

    def load(self) -> EngineLoad:
        """Return the load now. Cheap; no I/O."""
        ...
