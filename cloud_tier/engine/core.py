"""The engine without its processes: requests in, steps, tokens out. Runs in rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import structlog
import torch

from cloud_tier.engine.constrained import Compiling, Guided
from cloud_tier.engine.drafts import Drafts, ModelDrafts, NgramDrafts
from cloud_tier.engine.drawing import Drawn, draw
from cloud_tier.engine.kv_blocks import BlockPool
from cloud_tier.engine.logprobs import RowLogprobs
from cloud_tier.engine.messages import Compute, Segment, Tokens
from cloud_tier.engine.model import Computed, Deserted
from cloud_tier.engine.protocol import EngineConfig, EngineLoad, EngineRequest
from cloud_tier.engine.sampler import SamplerState
from cloud_tier.engine.scheduler import Scheduled, Scheduler
from cloud_tier.engine.sequence import Sequence
from cloud_tier.engine.speculation import Speculation
from models.text.guide import Guide
from router.base.clock import Clock
from router.base.errors import InvalidRequest, in_words
from router.values.chunk import FinishReason

if TYPE_CHECKING:
    from models.text.grammar import Matcher

log = structlog.get_logger("cloud_tier.engine")

_SMOOTHING = 0.2  # weight of the newest step in the smoothed figures


class EngineBroken(RuntimeError):
    """No later step can be trusted: the process has to end."""


class EngineCore:
    """Scheduler, sampler and the sequences between them.

    What goes wrong with one request ends that request: a step that raises is run again one sequence at a time, and
    a sequence whose numbers are none (NaN, infinity) fails and its KV blocks are zeroed and never shared.

    Args:
        compute: runs the forward pass of a step on every rank, and returns what it brought rank 0. May raise
            `EngineBroken`, and `Deserted` where all requests of the step are about to be aborted.
        vocab_size: of those logits.
        context_tokens: window for prompt and answer together; must fit the cache.
        draft: runs the forward pass of a smaller model that drafts; None drafts from what was said before.

    Attributes:
        pool: the KV blocks.
        compiling: constrained requests that are not computed yet.
    """

    def __init__(
        self,
        config: EngineConfig,
        compute: Callable[[Compute], Computed],
        *,
        vocab_size: int,
        context_tokens: int,
        clock: Clock,
        draft: Callable[[Compute], Computed] | None = None,
    ) -> None:
        self._config = config
        self._compute = compute
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._clock = clock
        blocks = config.kv_cache_tokens // config.kv_block_tokens
        self.pool = BlockPool(blocks, config.kv_block_tokens, prefix_caching=config.prefix_caching)
        self._scheduler = Scheduler(self.pool, max_running=config.max_running, token_budget=config.token_budget)
        self._sequences: dict[int, Sequence] = {}
        self._device = torch.device("cuda", 0) if config.device == "cuda" else torch.device("cpu")
        self._pace = Pace()
        self._speculation = Speculation()
        self._drafts: Drafts = NgramDrafts() if draft is None else ModelDrafts(draft, config.token_budget)
        self._failed = 0
        self._untold: list[Tokens] = []
        self.compiling = Compiling(config.weights)
        self._guided = Guided(self._device)

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        held_up = self._scheduler.lines_limit == 0 and all(s.yields for s in self._sequences.values())
        return bool((self._sequences and not held_up) or self._untold or self.compiling.ready)

    def limit_lines(self, lines: int | None) -> None:
        """See `Engine.limit_lines`."""
        self._scheduler.lines_limit = lines

    def yielding(self, handles: Iterable[int]) -> set[int]:
        """Return which of these are held up for others."""
        return {handle for handle in handles if handle in self._sequences and self._sequences[handle].yields}

    def add(self, handle: int, request: EngineRequest) -> None:
        """Take a request that fits the window and the vocabulary; a later step tells if it could not be taken."""
        if request.sampling.constraint is None:
            self._admit(handle, request)
        else:
            self.compiling.add(handle, request)

    def _take_compiled(self, handle: int, request: EngineRequest, made: Future[Matcher]) -> None:
        """Take a request whose constraint is compiled, or cannot be."""
        try:
            matcher = made.result()
        except InvalidRequest as error:
            self._untold.append(Tokens(handle, (), failure=error.message, invalid=error.param or ""))
        except Exception as error:
            log.exception("constraint not compiled", request_id=request.request_id)
            self._failed += 1
            self._untold.append(Tokens(handle, (), failure=in_words(error)))
        else:
            self._admit(handle, request, matcher)

    def _admit(self, handle: int, request: EngineRequest, matcher: Matcher | None = None) -> None:
        try:
            sampler = SamplerState.create(
                request.sampling, request.prompt_ids, self._vocab_size, self._device, request.ending_ids
            )
        except Exception as error:
            log.exception("request failed before its first step", request_id=request.request_id)
            self.probe()
            self._failed += 1
            self._untold.append(Tokens(handle, (), failure=in_words(error)))
            return
        guide = None if matcher is None else Guide(matcher, self._vocab_size, proposes=sampler.proposes)
        sequence = Sequence(handle, request, self._context_tokens, sampler, guide)
        self._guided.begin([sequence])
        self._sequences[handle] = sequence
        self._scheduler.add(sequence)

    def abort(self, handle: int) -> None:
        """End a request, whatever it is doing; one that has ended already is left alone."""
        self.compiling.abort(handle)
        sequence = self._sequences.pop(handle, None)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def step(self) -> list[Tokens]:
        """Run one step; return what it brought to whom.

        Raises:
            EngineBroken: a step that no request is to blame for fails as well.
        """
        started_s = self._clock.now_s()
        for compiled in self.compiling.take():
            self._take_compiled(*compiled)
        brought, self._untold = self._untold + self._draw_late(), []
        plan = self._scheduler.schedule(self._prompt_limit())
        if not plan:
            self._guided.wait_for_late()
            return brought
        prompt_tokens = sum(entry.num_tokens for entry in plan if entry.num_tokens > 1)
        plan = self._with_drafts(plan)
        drafted_s = self._clock.now_s()
        try:
            brought += self._run(plan)
        except EngineBroken:
            raise
        except Deserted:  # who left is forgotten before the next step, and who is held up computed again
            return brought
        except Exception as error:
            log.warning("step failed; its requests run alone", requests=len(plan), error=in_words(error), exc_info=True)
            brought += [tokens for entry in plan for tokens in self._run_alone(entry)]
        took_s = self._clock.now_s() - started_s
        self._pace.observe(took_s, prompt_tokens)
        if not prompt_tokens:
            took_s -= drafted_s - started_s
            self._speculation.note_step(sum(1 + len(entry.draft) for entry in plan), took_s)
        return brought

    def probe(self) -> None:
        """Run a step that belongs to no request, in the block behind those of the pool.

        Raises:
            EngineBroken: it failed, or brought numbers that are none.
        """
        try:
            finite = self._forward([Segment(0, [0, 0], [(self.pool.num_blocks, 1)], draws=True)]).finite
        except EngineBroken:
            raise
        except Exception as error:
            raise EngineBroken(f"nothing can be computed any more: {in_words(error)}") from error
        if not all(finite):
            raise EngineBroken(
                f"the model computes numbers that are none in {self._config.dtype}: its weights are damaged, or too "
                "large for that dtype"
            )

    def load(self) -> EngineLoad:
        """Return the load as of the last step."""
        sequences = [sequence for sequence in self._sequences.values() if not sequence.yields]
        running = sum(not sequence.yields for sequence in self._scheduler.running)
        lines = len(sequences) < len(self._sequences)
        return EngineLoad(
            running=running,
            queued=len(sequences) - running + self.compiling.others,
            queued_prefill_tokens=sum(sequence.prompt_remaining for sequence in sequences),
            pending_decode_tokens=sum(sequence.tokens_to_generate for sequence in sequences),
            kv_blocks_total=self.pool.num_blocks,
            kv_blocks_free=self.pool.num_free + (self._scheduler.blocks_of_lines() if lines else 0),
            step_s=self._pace.step_s,
            preemptions=self._scheduler.preemptions,
            prefix_hit_tokens=self._scheduler.prefix_hit_tokens,
            failed=self._failed,
            kv_block_tokens=self.pool.block_tokens,
            drafted_tokens=self._speculation.drafted,
            accepted_tokens=self._speculation.accepted,
        )

    def check(self) -> None:
        """Prove that no KV block is lost or held twice over (see `BlockPool.check`)."""
        self.pool.check([s.blocks for s in self._scheduler.running if s.blocks is not None])

    def _with_drafts(self, plan: list[Scheduled]) -> list[Scheduled]:
        began_s = self._clock.now_s()
        plan = self._scheduler.with_drafts(plan, self._config.draft_tokens, self._drafts, self._speculation)
        drafted = sum(len(entry.draft) for entry in plan)
        if drafted:
            self._speculation.note_drafting(drafted, self._clock.now_s() - began_s)
        return plan

    def _run(self, plan: list[Scheduled]) -> list[Tokens]:
        """Compute and draw, then keep what came of it: a step that raises has changed nothing."""
        began_s = self._clock.now_s()
        computed = self._forward([_segment(entry) for entry in plan])
        if not any(computed.finite):
            self.probe()
        finite = dict(zip((entry.sequence.handle for entry in plan), computed.finite, strict=True))
        # Some masks were begun before; whoever's takes longer than the model, and once more, is drawn in a later step.
        took_s = self._clock.now_s() - began_s
        self._guided.wait([entry.sequence for entry in plan if entry.draws], took_s)
        drawn = draw(computed.logits, [entry for entry in plan if entry.rows], finite, self._guided, took_s)
        brought: list[Tokens] = []
        for entry in plan:
            if not finite[entry.sequence.handle]:
                brought.append(self._fail(entry.sequence, "it computed what is not a number", spoiled=True))
            else:
                brought += self._bring(entry, drawn)
        self._guided.begin([entry.sequence for entry in plan if entry.sequence.handle in drawn.tokens])
        return brought

    def _bring(self, entry: Scheduled, drawn: Drawn) -> list[Tokens]:
        """Keep what came of one sequence whose numbers are some."""
        handle = entry.sequence.handle
        if handle in drawn.unmatched:
            return [self._fail(entry.sequence, drawn.unmatched[handle], spoiled=False)]
        if handle in drawn.tokens:
            return [self._take(entry, drawn.tokens[handle], drawn.logprobs)]
        self._scheduler.computed(entry)
        if handle in drawn.late:
            self._guided.keep(entry.sequence, drawn.late[handle])
        return []

    def _draw_late(self) -> list[Tokens]:
        """Draw for the sequences whose masks were late and are ready: they are computed on in this step."""
        brought: list[Tokens] = []
        for sequence, logits in self._guided.take_ripe():
            entry = Scheduled(sequence, 0, draws=True)
            try:
                drawn = draw(logits, [entry], {sequence.handle: True}, self._guided, 0.0)
            except Exception as error:
                log.exception("request failed in its draw", request_id=sequence.request.request_id)
                brought.append(self._fail(sequence, in_words(error), spoiled=False))
                continue
            brought += self._bring(entry, drawn)
            if sequence.handle in drawn.tokens:
                self._guided.begin([sequence])
        return brought

    def _run_alone(self, entry: Scheduled) -> list[Tokens]:
        """Run one sequence of a failed step; if it fails again, and the engine itself does not, it is to blame."""
        try:
            return self._run([entry])
        except EngineBroken:
            raise
        except Deserted:
            return []
        except Exception as error:
            log.exception("request failed in its step", request_id=entry.sequence.request.request_id)
            self.probe()
            return [self._fail(entry.sequence, in_words(error), spoiled=False)]

    def _forward(self, segments: list[Segment]) -> Computed:
        released = self._scheduler.take_released()
        self._drafts.released(released)
        computed = self._compute(Compute(segments, self.pool.to_zero, released))
        if computed.logits is None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # nothing is read back: the step has only been queued
        self.pool.zeroed()
        return computed

    def _fail(self, sequence: Sequence, why: str, *, spoiled: bool) -> Tokens:
        """Let go of a sequence that cannot go on."""
        log.error("request failed alone", request_id=sequence.request.request_id, why=why)
        self._failed += 1
        del self._sequences[sequence.handle]
        self._scheduler.remove(sequence, spoiled=spoiled)
        return Tokens(sequence.handle, (), failure=why)

    def _prompt_limit(self) -> int:
        """Prompt tokens that the engine computes in the time its decoding sequences may be held up for."""
        rate = self._pace.prefill_tokens_per_s
        if rate == 0:
            return self._config.token_budget
        return max(self._config.kv_block_tokens, int(rate * self._config.step_target_s))

    def _take(self, entry: Scheduled, drawn: list[int], logprobs: RowLogprobs | None) -> Tokens:
        """Append drawn tokens to their sequence and let go of the sequence if one of them was its last."""
        sequence, length = entry.sequence, len(entry.sequence.tokens)
        cached_tokens = sequence.cached_tokens if length == len(sequence.request.prompt_ids) else None
        finish_reason = None
        for token in drawn:
            finish_reason = sequence.append(token)
            if finish_reason is not None:
                break
        closed, guide = finish_reason is FinishReason.STOP, sequence.guide
        if guide is not None and len(sequence.tokens) == length + len(drawn) and guide.complete:
            finish_reason = FinishReason.STOP  # whole, and nothing may follow: no need to compute that it ends
        if entry.draft:
            self._speculation.note_drafts(len(entry.draft), max(0, len(drawn) - 1))
        # The newest token has not been computed; the one that ended the answer need not be part of it.
        self._scheduler.computed(entry, max(0, min(len(drawn), len(sequence.tokens) - length) - 1))
        if finish_reason is not None:
            del self._sequences[sequence.handle]
            self._scheduler.remove(sequence)
        tokens = tuple(sequence.tokens[length:])
        told = () if logprobs is None or not tokens else logprobs.told(sequence.handle, tokens[0])
        prompt_told, sequence.prompt_told = tuple(sequence.prompt_told), []
        return Tokens(
            sequence.handle,
            tokens,
            finish_reason,
            cached_tokens=cached_tokens,
            logprobs=told,
            prompt_logprobs=prompt_told,
            closed=closed,
        )


class Pace:
    """Smoothed duration of steps."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._prompt_tokens = 0.0
        self._prompt_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second over recent steps that computed some, 0 before the first."""
        return self._prompt_tokens / self._prompt_s if self._prompt_s > 0 else 0.0

    def observe(self, duration_s: float, prompt_tokens: int) -> None:
        """Learn from one step that computed so many prompt tokens."""
        self.step_s = _smooth(self.step_s, duration_s)
        if prompt_tokens > 0:
            self._prompt_tokens = _smooth(self._prompt_tokens, prompt_tokens)
            self._prompt_s = _smooth(self._prompt_s, duration_s)


def _smooth(old: float, new: float) -> float:
    return new if old == 0 else old + _SMOOTHING * (new - old)


def _segment(entry: Scheduled) -> Segment:
    sequence = entry.sequence
    start = sequence.num_computed
    runs = list(sequence.blocks.runs) if sequence.blocks is not None else []
    tokens = [*sequence.tokens[start : start + entry.num_tokens], *entry.draft]
    return Segment(start, tokens, runs, entry.rows > 0, sequence.handle, max(0, entry.rows - 1))
