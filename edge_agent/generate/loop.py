"""The generation loop of one local model: one worker thread computes, the event loop only submits and receives.

The thread takes new requests and cancellations between two steps, so both take effect at the next step. A failing
step fails the requests of that step alone; after several failures in a row the model is loaded anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import structlog

from edge_agent.generate.batcher import Batcher, BatchLimits, DecodeStep, PrefillStep, Sequence
from edge_agent.generate.request import Generation, LoopCounters
from edge_agent.generate.turn import Turn
from edge_agent.runtime.protocol import Logits, Runtime, StepInput
from router.base.errors import OverspillError, ReplicaBroken, ReplicaError, ReplicaUnreachable
from router.base.host import trim_heap
from router.values.request import FinishReason, TokenChunk

log = structlog.get_logger("edge_agent")

_FAILURES_BEFORE_RELOAD = 3
_RELOAD_PAUSE_S = 5.0
_IDLE_BEFORE_RELEASE_S = 0.5
_JOIN_S = 10.0


class GenerationLoop:
    """Runs one model in one worker thread. Create and use it on the event loop; `close` ends it.

    Args:
        open_runtime: loads the model; called in the worker, again after repeated failures.
        turn: shared by all local models.
        unload_idle_s: free the model when it had nothing to do for so long; None never does.
    """

    def __init__(
        self,
        name: str,
        open_runtime: Callable[[], Runtime],
        limits: BatchLimits,
        turn: Turn,
        unload_idle_s: float | None = None,
    ) -> None:
        self.name = name
        self.counters = LoopCounters()
        self.runtime: Runtime | None = None
        self.problem = ""
        self._open_runtime = open_runtime
        self._turn = turn
        self._unload_idle_s = unload_idle_s
        self._batcher = Batcher(limits)
        self._live: set[Generation] = set()
        self._by_sequence: dict[int, Generation] = {}
        self._arrivals: list[Generation] = []
        self._wake = threading.Condition()
        self._nudged = False
        self._stopping = False
        self._load_wanted = False
        self._load_again_at_s = 0.0
        self._failures = 0
        self._outbox: list[tuple[Generation, TokenChunk | OverspillError]] = []
        self._event_loop = asyncio.get_running_loop()
        self._loaded = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name=f"generate-{name}", daemon=True)
        self._thread.start()

    # --- on the event loop ---

    @property
    def live(self) -> Iterator[Generation]:
        """Requests that wait or run."""
        return iter(self._live)

    @property
    def waiting(self) -> int:
        return sum(1 for generation in self._live if generation.sequence.handle is None)

    @property
    def slots(self) -> int:
        """Sequences computed together at most, now."""
        return self._batcher.limits.slots

    def limit_slots(self, slots: int) -> None:
        """Admit only while fewer than `slots` run; those that run stay."""
        self._batcher.limits = dataclasses.replace(self._batcher.limits, slots=slots)

    @property
    def resting(self) -> bool:
        """Loading failed a moment ago; requests are refused until the pause is over."""
        return self.runtime is None and time.monotonic() < self._load_again_at_s

    @property
    def rest_s(self) -> float:
        return max(0.0, self._load_again_at_s - time.monotonic())

    async def load(self) -> None:
        """Load the model now.

        Raises:
            OverspillError: it cannot be loaded.
        """
        if self.runtime is not None:
            return
        self._loaded.clear()
        with self._wake:
            self._load_wanted = True
            self._load_again_at_s = 0.0
            self._wake.notify()
        await self._loaded.wait()
        if self.runtime is None:
            raise ReplicaUnreachable(f"{self.name}: {self.problem}")

    def submit(self, generation: Generation) -> None:
        """Queue a request; its chunks arrive in `generation.inbox`."""
        self._live.add(generation)
        with self._wake:
            self._arrivals.append(generation)
            self._wake.notify()

    def cancel(self, generation: Generation) -> None:
        """Stop a request at the next step; its slot is free then. Finished requests are left alone."""
        if generation not in self._live:
            return
        self._live.discard(generation)
        generation.cancelled = True
        with self._wake:
            self._nudged = True
            self._wake.notify()

    async def close(self) -> None:
        """End the thread; requests still running end as `ReplicaBroken`.

        A load cannot be broken off. One that takes longer than `_JOIN_S` is not waited for: the thread then frees the
        model as soon as it is loaded, or ends with the process.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, _JOIN_S)
        if self._thread.is_alive():
            log.warning("a model is still being loaded and is left to end by itself", model=self.name)

    # --- in the worker ---

    def _work(self) -> None:
        while self._take_news():
            if self.runtime is None and not self._load():
                continue
            self._load_wanted = False
            try:
                with self._turn:
                    self._step()
            except Exception:
                log.exception("worker failed", model=self.name)
                self._drop_runtime("internal error in the generation loop")
            self._flush()
        self._fail_all(ReplicaBroken, "the agent is shutting down")
        self._unload()
        self._flush()

    def _take_news(self) -> bool:
        """Wait until there is something to do and take in what arrived; False when the loop shall end."""
        if not self._wait_for_news(_IDLE_BEFORE_RELEASE_S):
            self._rest()
            if not self._wait_for_news(self._unload_idle_s):
                self._unload()
                self._wait_for_news(None)
        with self._wake:
            arrivals, self._arrivals = self._arrivals, []
            self._nudged = False
            if self._stopping:
                for generation in arrivals:
                    self._add(generation)
                return False
        for generation in arrivals:
            if not generation.cancelled:
                self._add(generation)
        return True

    def _wait_for_news(self, timeout_s: float | None) -> bool:
        with self._wake:
            return self._wake.wait_for(
                lambda: bool(
                    self._arrivals or self._nudged or self._stopping or self._load_wanted or self._by_sequence
                ),
                timeout_s,
            )

    def _add(self, generation: Generation) -> None:
        self._by_sequence[id(generation.sequence)] = generation
        self._batcher.add(generation.sequence)

    def _rest(self) -> None:
        if self.runtime is not None:
            self.runtime.release_memory()
        trim_heap()

    def _unload(self) -> None:
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.close()
            log.info("model unloaded", model=self.name)
        del runtime
        trim_heap()

    def _load(self) -> bool:
        """Load the model if anybody needs it; on failure fail whoever waits and pause before the next attempt."""
        if not self._by_sequence and not self._load_wanted:
            return False
        if not self.resting:
            self._try_load()
        if self.runtime is None:
            self._fail_all(ReplicaUnreachable, self.problem)
            self._flush()
        self._load_wanted = False
        self._call(self._loaded.set)
        return self.runtime is not None

    def _try_load(self) -> None:
        started_s = time.monotonic()
        try:
            self.runtime = self._open_runtime()
        except Exception as error:
            known = isinstance(error, OverspillError)
            self.problem = error.message if isinstance(error, OverspillError) else f"cannot be loaded: {error}"
            log.error("model not loaded", model=self.name, why=self.problem, exc_info=not known)  # noqa: TRY400
            self._load_again_at_s = time.monotonic() + _RELOAD_PAUSE_S
            return
        self.counters.loads += 1
        self.problem = ""
        self._failures = 0
        trim_heap()
        log.info("model loaded", model=self.name, load_s=round(time.monotonic() - started_s, 2))

    def _step(self) -> None:
        runtime = self.runtime
        if runtime is None:
            return
        for generation in [item for item in self._by_sequence.values() if item.cancelled]:
            self._forget(generation)
        while (sequence := self._batcher.admit()) is not None:
            sequence.handle, sequence.fed = runtime.open(sequence.prompt_ids)
        step = self._batcher.next_step()
        if step is None:
            return
        started_s = time.monotonic()
        try:
            logits = runtime.forward(_inputs(step))
        except Exception as error:  # noqa: BLE001  task boundary: the runtime's own exception types are not ours to know
            self._step_failed(step, error)
            return
        self._failures = 0
        self.counters.steps += 1
        self.counters.compute_s += time.monotonic() - started_s
        self._batcher.fed(step)
        self._take_logits(step, logits)

    def _take_logits(self, step: PrefillStep | DecodeStep, logits: Logits) -> None:
        if isinstance(step, DecodeStep):
            drawing = step.sequences
        else:
            self.counters.prefill_tokens += len(step.token_ids)
            drawing = (step.sequence,) if step.last else ()
        for index, sequence in enumerate(drawing):
            generation = self._by_sequence[id(sequence)]
            try:
                self._draw(generation, logits, index)
            except Exception as error:
                log.exception("request failed", model=self.name, request_id=generation.request_id)
                self._fail(generation, ReplicaBroken, f"failed while drawing a token: {error}")

    def _draw(self, generation: Generation, logits: Logits, index: int) -> None:
        sequence = generation.sequence
        token = sequence.sampler.draw(logits[index])
        sequence.generated.append(token)
        self.counters.decode_tokens += 1
        reason: FinishReason | None = None
        if token in generation.eos_ids:
            reason, text = FinishReason.STOP, generation.text.finish()
        else:
            delta = generation.text.push([token])
            text = delta.text
            if delta.stopped:
                reason = FinishReason.STOP
            elif not sequence.decode_tokens_left:
                reason = FinishReason.LENGTH
                text += generation.text.finish()
        generation.delivered = True
        prompt_tokens = len(sequence.prompt_ids) if reason is not None else None
        self._outbox.append((generation, TokenChunk(text, 1, reason, prompt_tokens)))
        if reason is not None:
            self._forget(generation)

    def _step_failed(self, step: PrefillStep | DecodeStep, error: Exception) -> None:
        self._failures += 1
        self.counters.failed_steps += 1
        log.error("step failed", model=self.name, in_a_row=self._failures, exc_info=error)
        for sequence in step.sequences if isinstance(step, DecodeStep) else (step.sequence,):
            self._fail(self._by_sequence[id(sequence)], ReplicaBroken, f"the runtime failed: {error}")
        if self._failures >= _FAILURES_BEFORE_RELOAD:
            self._drop_runtime(f"failed {self._failures} times in a row")

    def _drop_runtime(self, why: str) -> None:
        """Unload a runtime that no longer works; sequences in its slots are lost, waiting ones see the next load."""
        log.warning("model reload", model=self.name, why=why)
        for generation in [item for item in self._by_sequence.values() if item.sequence.handle is not None]:
            self._fail(generation, ReplicaBroken, f"the model is loaded anew: {why}")
        self._unload()

    def _forget(self, generation: Generation) -> None:
        """Free the slot of a request."""
        sequence = generation.sequence
        self._by_sequence.pop(id(sequence), None)
        self._batcher.remove(sequence)
        if sequence.handle is not None and self.runtime is not None:
            self.runtime.close_sequence(sequence.handle)
        sequence.handle = None

    def _fail(self, generation: Generation, kind: type[ReplicaError], why: str) -> None:
        """End a request with an error; one that produced nothing yet may always be sent elsewhere."""
        self._forget(generation)
        chosen = kind if generation.delivered else ReplicaUnreachable
        self._outbox.append((generation, chosen(f"{self.name}: {why}")))

    def _fail_all(self, kind: type[ReplicaError], why: str) -> None:
        for generation in list(self._by_sequence.values()):
            self._fail(generation, kind, why)

    def _flush(self) -> None:
        """Hand the results of a step to the event loop in one call."""
        if self._outbox:
            items, self._outbox = self._outbox, []
            self._call(lambda: self._deliver(items))

    def _deliver(self, items: list[tuple[Generation, TokenChunk | OverspillError]]) -> None:
        for generation, item in items:
            if isinstance(item, OverspillError) or item.finish_reason is not None:
                self._live.discard(generation)
            generation.inbox.put_nowait(item)

    def _call(self, function: Callable[[], object]) -> None:
        try:
            self._event_loop.call_soon_threadsafe(function)
        except RuntimeError:  # the event loop is closed: nobody listens any more
            self._stopping = True


def _inputs(step: PrefillStep | DecodeStep) -> list[StepInput]:
    if isinstance(step, PrefillStep):
        return [StepInput(_handle(step.sequence), step.token_ids, step.last)]
    return [StepInput(_handle(item), [item.generated[-1]]) for item in step.sequences]


def _handle(sequence: Sequence) -> int:
    if sequence.handle is None:
        raise RuntimeError("a sequence is computed before it was admitted")
    return sequence.handle
