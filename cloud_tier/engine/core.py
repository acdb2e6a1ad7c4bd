"""The engine without its processes: requests in, steps, tokens out. Runs in rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from cloud_tier.engine.kv_blocks import BlockPool
from cloud_tier.engine.messages import Segment, Tokens
from cloud_tier.engine.protocol import EngineConfig, EngineLoad, EngineRequest
from cloud_tier.engine.sampler import SamplerState, sample
from cloud_tier.engine.scheduler import Scheduled, Scheduler
from cloud_tier.engine.sequence import Sequence
from router.base.clock import Clock

_SMOOTHING = 0.2  # weight of the newest step in the smoothed figures


class EngineCore:
    """Scheduler, sampler and the sequences between them.

    Args:
        compute: runs the forward pass of a step on every rank; returns rank 0's logits, float32 (draws, vocab).
        vocab_size: of those logits.
        context_tokens: window for prompt and answer together; must fit the cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        compute: Callable[[list[Segment]], torch.Tensor | None],
        *,
        vocab_size: int,
        context_tokens: int,
        clock: Clock,
    ) -> None:
        self._config = config
        self._compute = compute
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._clock = clock
        blocks = config.kv_cache_tokens // config.kv_block_tokens
        self._pool = BlockPool(blocks, config.kv_block_tokens, prefix_caching=config.prefix_caching)
        self._scheduler = Scheduler(self._pool, max_running=config.max_running, token_budget=config.token_budget)
        self._sequences: dict[int, Sequence] = {}
        self._device = torch.device("cuda", 0) if config.device == "cuda" else torch.device("cpu")
        self._pace = Pace()

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._sequences)

    def add(self, handle: int, request: EngineRequest) -> None:
        """Take a request that fits the window and the vocabulary."""
        sampler = SamplerState.create(request.sampling, request.prompt_ids, self._vocab_size, self._device)
        sequence = Sequence(handle, request, self._context_tokens, sampler)
        self._sequences[handle] = sequence
        self._scheduler.add(sequence)

    def abort(self, handle: int) -> None:
        """End a request, whatever it is doing; one that has ended already is left alone."""
        sequence = self._sequences.pop(handle, None)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def step(self) -> list[Tokens]:
        """Run one step; return what it brought to whom."""
        started_s = self._clock.now_s()
        plan = self._scheduler.schedule(self._prompt_limit())
        prompt_tokens = sum(entry.num_tokens for entry in plan if entry.num_tokens > 1)
        logits = self._compute([_segment(entry) for entry in plan])
        if logits is None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # nothing is read back: the step has only been queued
        for entry in plan:
            self._scheduler.computed(entry)
        drawing = [entry.sequence for entry in plan if entry.draws]
        drawn: Iterable[int] = () if logits is None else sample(logits, [s.sampler for s in drawing])
        brought = [self._take(sequence, token) for sequence, token in zip(drawing, drawn, strict=True)]
        self._pace.observe(self._clock.now_s() - started_s, prompt_tokens)
        return brought

    def load(self) -> EngineLoad:
        """Return the load as of the last step."""
        sequences = self._sequences.values()
        return EngineLoad(
            running=len(self._scheduler.running),
            queued=len(self._scheduler.waiting),
            queued_prefill_tokens=sum(sequence.prompt_remaining for sequence in sequences),
            pending_decode_tokens=sum(sequence.tokens_to_generate for sequence in sequences),
            kv_blocks_total=self._pool.num_blocks,
            kv_blocks_free=self._pool.num_free,
            kv_block_tokens=self._pool.block_tokens,
            step_s=self._pace.step_s,
            decode_step_s=self._pace.decode_step_s,
            prefill_tokens_per_s=self._pace.prefill_tokens_per_s,
            steps=self._pace.steps,
            preemptions=self._scheduler.preemptions,
            prefix_hit_tokens=self._scheduler.prefix_hit_tokens,
        )

    def check(self) -> None:
        """Prove that no KV block is lost or held twice over (see `BlockPool.check`)."""
        self._pool.check([s.blocks for s in self._scheduler.running if s.blocks is not None])

    def _prompt_limit(self) -> int:
        """Prompt tokens that the engine computes in the time its decoding sequences may be held up for."""
        rate = self._pace.prefill_tokens_per_s
        if rate == 0:
            return self._config.token_budget
        return max(self._config.kv_block_tokens, int(rate * self._config.step_target_s))

    def _take(self, sequence: Sequence, token: int) -> Tokens:
        """Append a drawn token to its sequence and let go of the sequence if that was its last."""
        length = len(sequence.tokens)
        finish_reason = sequence.append(token)
        if finish_reason is not None:
            del self._sequences[sequence.handle]
            self._scheduler.remove(sequence)
        return Tokens(sequence.handle, tuple(sequence.tokens[length:]), finish_reason)


class Pace:
    """Smoothed duration of steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.step_s = 0.0
        self.decode_step_s = 0.0
        self._prompt_tokens = 0.0
        self._prompt_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second over recent steps that computed some, 0 before the first."""
        return self._prompt_tokens / self._prompt_s if self._prompt_s > 0 else 0.0

    def observe(self, duration_s: float, prompt_tokens: int) -> None:
        """Learn from one step that computed so many prompt tokens."""
        self.steps += 1
        self.step_s = _smooth(self.step_s, duration_s)
        if prompt_tokens == 0:
            self.decode_step_s = _smooth(self.decode_step_s, duration_s)
        else:
            self._prompt_tokens = _smooth(self._prompt_tokens, prompt_tokens)
            self._prompt_s = _smooth(self._prompt_s, duration_s)


def _smooth(old: float, new: float) -> float:
    return new if old == 0 else old + _SMOOTHING * (new - old)


def _segment(entry: Scheduled) -> Segment:
    sequence = entry.sequence
    start = sequence.num_computed
    runs = list(sequence.blocks.runs) if sequence.blocks is not None else []
    return Segment(start, sequence.tokens[start : start + entry.num_tokens], runs, entry.draws)
