"""The steps of one model: who is computed, what is drawn, and who ends when a step fails. Runs in the worker alone."""

from __future__ import annotations

import time
from collections.abc import Iterable

import structlog
from msgspec.structs import replace

from edge_agent.device.memory import is_out_of_memory
from edge_agent.generate.batcher import Batcher, BatchLimits, DecodeStep, PrefillStep, Sequence
from edge_agent.generate.request import Generation, LoopCounters
from edge_agent.runtime.protocol import Logits, Runtime, StepInput
from models.text.guide import Guide, Lookahead
from router.base.errors import (
    OverspillError,
    ReplicaBroken,
    ReplicaError,
    ReplicaFailed,
    ReplicaUnreachable,
    RequestFailed,
    in_words,
)
from router.base.host import trim_heap
from router.values.chunk import FinishReason, TokenChunk

log = structlog.get_logger("edge_agent")

_TELL_EVERY_S = 10.0
_MOMENT_S = 0.01

Result = tuple[Generation, TokenChunk | OverspillError]


class Steps:
    """Holds every request from its arrival in the worker until it ends.

    Args:
        keep_kv: leave the caches of requests that ended well with the runtime, for later ones that begin alike.

    Attributes:
        results: chunks and errors not yet handed out.
        failures: steps that failed in a row.
    """

    def __init__(self, name: str, limits: BatchLimits, counters: LoopCounters, *, keep_kv: bool = False) -> None:
        self.results: list[Result] = []
        self.failures = 0
        self._name = name
        self._counters = counters
        self._batcher = Batcher(limits)
        self._by_sequence: dict[int, Generation] = {}
        self._keep_kv = keep_kv
        self._ended: list[tuple[int, bool]] = []  # handles whose slots are not given back yet, and whether to keep
        self._told_at_s = -_TELL_EVERY_S
        self._lookahead = Lookahead()

    def __bool__(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._by_sequence)

    @property
    def limits(self) -> BatchLimits:
        return self._batcher.limits

    @limits.setter
    def limits(self, limits: BatchLimits) -> None:
        self._batcher.limits = limits

    def add(self, generation: Generation) -> None:
        self._by_sequence[id(generation.sequence)] = generation
        self._batcher.add(generation.sequence)

    def clear(self) -> None:
        """Drop every request, and the results that were not delivered."""
        self._by_sequence.clear()
        self._ended.clear()
        self._batcher = Batcher(self._batcher.limits)
        self.results = []
        self.failures = 0

    def step(self, runtime: Runtime) -> None:
        """Apply cancellations, admit requests while slots are free, and compute the next step."""
        for generation in [item for item in self._by_sequence.values() if item.cancelled]:
            self._forget(generation, runtime, keep=True)
        self.settle(runtime)
        while self._batcher.running < runtime.facts.slots and (sequence := self._batcher.admit()) is not None:
            self._open(sequence, runtime)
        self._draw_late(runtime)
        step = self._batcher.next_step()
        if step is None:
            return
        failure = self._compute(step, runtime)
        if failure is not None:
            self._find_culprit(step, failure, runtime)

    def rest(self) -> None:
        """Let a moment pass, if there is nothing to do but to wait for masks that take long."""
        late = [item.sequence for item in self._by_sequence.values() if item.sequence.late is not None]
        if late and self._batcher.next_step() is None and late[0].guide is not None:
            late[0].guide.wait(_MOMENT_S)

    def settle(self, runtime: Runtime) -> None:
        """Give the slots of those that ended back, now that their results are on the way."""
        while self._ended:
            handle, keep = self._ended.pop()
            runtime.close_sequence(handle, keep=keep and self._keep_kv)
        runtime.trim_kept(max(0, self.limits.slots - self._batcher.running))

    def fail_all(self, kind: type[ReplicaError], why: str) -> None:
        """End every request; the runtime is gone or about to go, so no slot is given back."""
        for generation in list(self._by_sequence.values()):
            self._fail(generation, kind, why, None)

    def fail_admitted(self, why: str) -> None:
        """End those in a slot of a runtime that is about to go; those that wait see the next one."""
        self._ended.clear()
        for generation in [item for item in self._by_sequence.values() if item.sequence.handle is not None]:
            self._fail(generation, ReplicaBroken, why, None)

    def _open(self, sequence: Sequence, runtime: Runtime) -> None:
        try:
            opened = runtime.open(
                sequence.prompt_ids, sequence.caller, exact=sequence.exact, from_scratch=sequence.scored
            )
            sequence.handle, sequence.fed = opened
            sequence.scored_tokens = runtime.facts.scored_tokens
        except Exception as error:
            log.exception("sequence not opened", model=self._name)
            self._fail_alone(self._by_sequence[id(sequence)], f"no slot: {in_words(error)}", runtime)
        else:
            sequence.cached_tokens = sequence.fed
            if sequence.matcher is not None:
                sequence.guide = Guide(sequence.matcher, runtime.facts.vocab_size, proposes=sequence.sampler.proposes)
                self._lookahead.begin([sequence.guide])
            self._counters.cached_tokens += sequence.fed

    def _compute(self, step: PrefillStep | DecodeStep, runtime: Runtime) -> Exception | None:
        """Compute a step and draw its tokens; return what the runtime raised instead."""
        started_s = time.monotonic()
        try:
            logits = runtime.forward(_inputs(step))
        except Exception as error:  # noqa: BLE001  task boundary: the runtime's own exception types are not ours to know
            return error
        took_s = time.monotonic() - started_s
        self.failures = 0
        self._counters.steps += 1
        self._counters.compute_s += took_s
        self._batcher.fed(step)
        # Some masks were begun before; whoever's takes longer than the model, and once more, is drawn in a later step.
        self._lookahead.wait(_guides(_drawing(step)), took_s)
        self._take_logits(step, logits, runtime)
        refused = [guide for guide in _guides(item for item in _drawing(step) if item.late is not None) if guide.ready]
        self._lookahead.find(refused)
        self._look_ahead(_drawing(step))
        if refused:
            self._lookahead.wait(refused, took_s)
            self._draw_late(runtime)
        return None

    def _find_culprit(self, step: PrefillStep | DecodeStep, failure: Exception, runtime: Runtime) -> None:
        """Compute each sequence of a failed step alone, and end those that fail again.

        Want of memory speaks against what was asked for, not against the model: loaded anew it would take no less, and
        might find no room at all.
        """
        if is_out_of_memory(failure):
            trim_heap()
        else:
            self.failures += 1
        self._counters.failed_steps += 1
        sequences = step.sequences if isinstance(step, DecodeStep) else (step.sequence,)
        if time.monotonic() - self._told_at_s >= _TELL_EVERY_S:  # a batch that fails at each step would fill the disk
            self._told_at_s = time.monotonic()
            failed = self._counters.failed_steps
            log.error("step failed", model=self._name, so_far=failed, sequences=len(sequences), exc_info=failure)
        for sequence in sequences:
            alone = self._compute(DecodeStep((sequence,)), runtime) if len(sequences) > 1 else failure
            if alone is not None:
                generation = self._by_sequence[id(sequence)]
                self._fail_alone(generation, f"the runtime failed: {in_words(alone)}", runtime)

    def _take_logits(self, step: PrefillStep | DecodeStep, logits: Logits, runtime: Runtime) -> None:
        if isinstance(step, PrefillStep):
            self._counters.prefill_tokens += len(step.token_ids)
            wanted = self._by_sequence[id(step.sequence)].logprobs
            if step.sequence.scored and wanted is not None:
                wanted.read(step.sequence.prompt_ids, logits)
                logits = logits[-1:]
        for index, sequence in enumerate(_drawing(step)):
            if sequence.guide is None or sequence.guide.ready:
                self._draw_or_fail(sequence, logits[index], runtime)
            else:
                sequence.late = logits[index].copy()

    def _draw_late(self, runtime: Runtime) -> None:
        """Draw for those whose masks were late and are ready: they are computed on in this step."""
        for generation in [item for item in self._by_sequence.values() if item.sequence.late is not None]:
            sequence = generation.sequence
            logits, guide = sequence.late, sequence.guide
            if logits is not None and guide is not None and guide.ready:
                sequence.late = None
                self._draw_or_fail(sequence, logits, runtime)
                self._look_ahead((sequence,))

    def _look_ahead(self, drawn: Iterable[Sequence]) -> None:
        """Begin the masks of those that a token was drawn for and that go on."""
        going_on = [item for item in drawn if item.handle is not None and item.late is None]
        self._lookahead.begin(_guides(going_on))

    def _draw_or_fail(self, sequence: Sequence, logits: Logits, runtime: Runtime) -> None:
        """Draw the next token of one sequence, and let go of it if that was its last, or cannot be drawn."""
        generation = self._by_sequence[id(sequence)]
        try:
            ended = self._draw(generation, logits)
        except RequestFailed as error:  # its constraint went past its bounds
            self.results.append((generation, error))
            self._forget(generation, runtime)
        except Exception as error:
            log.exception("request failed", model=self._name, request_id=generation.request_id)
            self._fail_alone(generation, f"failed while drawing a token: {in_words(error)}", runtime)
        else:
            if ended:
                self._forget(generation, runtime, keep=True)

    def _draw(self, generation: Generation, logits: Logits) -> bool:
        """Draw the next token of a request from float32 (vocab,); whether it was the last one."""
        sequence, guide = generation.sequence, generation.sequence.guide
        if guide is not None and guide.failure:
            raise RequestFailed(guide.failure)
        if guide is not None and guide.complete:  # a slow one: that was not known when its last token was drawn
            self._tell(generation, TokenChunk(generation.text.finish(), 0, FinishReason.STOP))
            return True
        token = sequence.sampler.draw(logits, guide)
        if token is None:  # it is drawn with its mask
            sequence.late = logits.copy()
            return False
        if guide is not None:
            guide.advance(token)
        return self._take(generation, token, logits)

    def _take(self, generation: Generation, token: int, logits: Logits) -> bool:
        """Append a drawn token to its answer; whether it was the last one."""
        sequence, guide = generation.sequence, generation.sequence.guide
        sequence.generated.append(token)
        self._counters.decode_tokens += 1
        reason: FinishReason | None = None
        wanted, stop = generation.logprobs, None
        if token in generation.ending_ids:
            reason, text = FinishReason.STOP, generation.text.finish()
        else:
            if wanted is not None:
                wanted.draw(logits, token)
            delta = generation.text.push([token])
            text = delta.text
            stop = delta.stop
            if stop is not None:
                reason = FinishReason.STOP
            elif guide is not None and guide.complete:
                reason = FinishReason.STOP  # whole, and nothing may follow
                text += generation.text.finish()
            elif not sequence.decode_tokens_left:
                reason = FinishReason.LENGTH
                text += generation.text.finish()
        self._tell(generation, TokenChunk(text, 1, reason, stop=stop), cut=stop is not None)
        return reason is not None

    def _tell(self, generation: Generation, chunk: TokenChunk, *, cut: bool = False) -> None:
        """Hand a chunk out, with what is to be told of its request besides."""
        sequence = generation.sequence
        chunk = replace(
            chunk,
            prompt_tokens=None if chunk.finish_reason is None else len(sequence.prompt_ids),
            cached_tokens=None if generation.delivered else sequence.cached_tokens,
        )
        if generation.logprobs is not None:
            chunk = generation.logprobs.onto(chunk, first=not generation.delivered, cut=cut)
        self.results.append((generation, chunk))
        generation.delivered = True

    def _forget(self, generation: Generation, runtime: Runtime | None, *, keep: bool = False) -> None:
        """Let a request go; `settle` gives its slot back to the runtime.

        Args:
            keep: nothing was wrong with it, so its cache may serve others.
        """
        sequence = generation.sequence
        self._by_sequence.pop(id(sequence), None)
        self._batcher.remove(sequence)
        handle, sequence.handle = sequence.handle, None
        if handle is not None and runtime is not None:
            self._ended.append((handle, keep))

    def _fail_alone(self, generation: Generation, why: str, runtime: Runtime) -> None:
        """End one request of a model that goes on with the others: its prompt may be what the model fails on."""
        self._fail(generation, ReplicaBroken if generation.delivered else ReplicaFailed, why, runtime)

    def _fail(self, generation: Generation, kind: type[ReplicaError], why: str, runtime: Runtime | None) -> None:
        """End a request with an error; one that produced nothing yet may always be sent elsewhere."""
        if kind is ReplicaBroken and not generation.delivered:
            kind = ReplicaUnreachable
        self.results.append((generation, kind(f"{self._name}: {why}")))
        self._forget(generation, runtime)


def _drawing(step: PrefillStep | DecodeStep) -> tuple[Sequence, ...]:
    """Return the sequences that a step brings to their next token."""
    if isinstance(step, DecodeStep):
        return step.sequences
    return (step.sequence,) if step.last else ()


def _guides(sequences: Iterable[Sequence]) -> list[Guide]:
    return [sequence.guide for sequence in sequences if sequence.guide is not None]


def _inputs(step: PrefillStep | DecodeStep) -> list[StepInput]:
    if isinstance(step, PrefillStep):
        scored = step.sequence.scored
        return [StepInput(_handle(step.sequence), step.token_ids, step.last or scored, every=scored)]
    return [StepInput(_handle(item), [item.generated[-1]]) for item in step.sequences]


def _handle(sequence: Sequence) -> int:
    if sequence.handle is None:
        raise RuntimeError("a sequence is computed before it was admitted")
    return sequence.handle
