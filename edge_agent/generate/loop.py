"""The generation loop of one local model: one worker thread computes, the event loop only submits and receives.

The thread takes new requests and cancellations between two steps, so both take effect at the next step.

A step that fails is computed again for each of its sequences alone, and ends only those that fail again; after several
failures in a row the model is loaded anew. Anything else that the thread raises unloads the model, ends every request
in flight with an error, and lets the thread go on after a pause that doubles.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import operator
import threading
import time
from collections.abc import Callable, Iterator

import structlog

from edge_agent.generate.batcher import BatchLimits
from edge_agent.generate.request import Generation, LoopCounters
from edge_agent.generate.steps import Result, Steps
from edge_agent.generate.turn import Turn
from edge_agent.runtime.protocol import Runtime
from router.base.errors import OverspillError, ReplicaBroken, ReplicaUnreachable, in_words
from router.base.host import trim_heap
from router.base.timers import within

log = structlog.get_logger("edge_agent")

_FAILURES_BEFORE_RELOAD = 3
_RELOAD_PAUSE_S = (5.0, 300.0)  # after a load that failed: at first, and at most
_RESTART_PAUSE_S = (0.5, 60.0)  # the same after a failure of the worker itself
_CALM_S = 60.0  # a worker that did not fail for so long begins with the first pause again
_IDLE_BEFORE_RELEASE_S = 0.5
_IDLE_BEFORE_FORGETTING_S = 600.0  # what is kept of ended answers; the next turn of a chat comes sooner or not at all
_JOIN_S = 10.0
_WORKER_LOOK_S = 1.0
_RECOVER_PAUSE_S = 0.2


class GenerationLoop:
    """Runs one model in one worker thread. Create and use it on the event loop; `close` ends it.

    Args:
        open_runtime: loads the model; called in the worker, again after repeated failures.
        turn: shared by all local models.
        unload_idle_s: free the model when it had nothing to do for so long; None never does.
        keep_kv: keep what is in the slots of ended answers while nobody needs them, for prompts that begin alike.

    Attributes:
        problem: why the model is not loaded although it should be; empty when nothing is wrong.
        load_s: how long the last load took, None before the first.
    """

    def __init__(
        self,
        name: str,
        open_runtime: Callable[[], Runtime],
        limits: BatchLimits,
        turn: Turn,
        unload_idle_s: float | None = None,
        *,
        keep_kv: bool = False,
    ) -> None:
        self.name = name
        self.counters = LoopCounters()
        self.runtime: Runtime | None = None
        self.problem = ""
        self.load_s: float | None = None
        self._open_runtime = open_runtime
        self._turn = turn
        idle: list[tuple[float, Callable[[], None]]] = [
            (_IDLE_BEFORE_RELEASE_S, self._rest),
            (_IDLE_BEFORE_FORGETTING_S, self._forget_kept),
        ]
        if unload_idle_s is not None:
            idle.append((unload_idle_s, self._unload))
        self._idle_stages = sorted(idle, key=operator.itemgetter(0))
        self._steps = Steps(name, limits, self.counters, keep_kv=keep_kv)
        self._live: set[Generation] = set()
        self._arrivals: list[Generation] = []
        self._wake = threading.Condition()
        self._nudged = False
        self._stopping = False
        self._load_wanted = False
        self._load_again_at_s = 0.0
        self._reload_pause_s = _RELOAD_PAUSE_S[0]
        self._restart_pause_s = _RESTART_PAUSE_S[0]
        self._restarted_at_s = -_CALM_S
        self._step_began_s: float | None = None
        self._event_loop = asyncio.get_running_loop()
        self._loaded = asyncio.Event()
        self._thread = self._started()

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._work, name=f"generate-{self.name}", daemon=True)
        thread.start()
        return thread

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
        runtime, wanted = self.runtime, self._steps.limits.slots
        return wanted if runtime is None else min(wanted, runtime.facts.slots)

    def limit_slots(self, slots: int) -> None:
        """Admit only while fewer than `slots` run, and keep no more than the rest; those that run stay."""
        if slots == self._steps.limits.slots:
            return
        self._steps.limits = dataclasses.replace(self._steps.limits, slots=slots)
        with self._wake:
            self._nudged = True
            self._wake.notify()

    @property
    def failed(self) -> bool:
        """Whether the model should be loaded and is not, for the reason in `problem`; `load` tries again."""
        return self.runtime is None and bool(self.problem)

    @property
    def resting(self) -> bool:
        """Whether it failed a moment ago; requests are refused until the pause is over."""
        return self.runtime is None and time.monotonic() < self._load_again_at_s

    @property
    def stuck_s(self) -> float:
        """How long the present step takes, and the wait for its turn; 0 between steps."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

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
        self._check_worker()
        self._loaded.clear()
        with self._wake:
            self._load_wanted = True
            self._load_again_at_s = 0.0
            self._wake.notify()
        while not self._loaded.is_set() and self._thread.is_alive():
            with contextlib.suppress(asyncio.TimeoutError):
                await within(_WORKER_LOOK_S, self._loaded.wait())
        self._check_worker()
        if self.runtime is None:
            raise ReplicaUnreachable(f"{self.name}: {self.problem}")

    def submit(self, generation: Generation) -> None:
        """Queue a request; its chunks arrive in `generation.inbox`."""
        self._live.add(generation)
        with self._wake:
            self._arrivals.append(generation)
            self._wake.notify()
        self._check_worker()

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

    def _check_worker(self) -> None:
        """Start the worker thread again if it has ended: its callers would wait for ever."""
        if self._thread.is_alive() or self._stopping:
            return
        log.error("worker gone", model=self.name)
        self._give_up("its worker is gone; it is started anew")
        self._lose_all(self.problem)
        self._thread = self._started()

    def _lose_all(self, why: str) -> None:
        """End every request with an error; the worker, which forgot them, passes over those it still meets."""
        lost, self._live = self._live, set()
        for generation in lost:
            generation.cancelled = True
            kind = ReplicaBroken if generation.delivered else ReplicaUnreachable
            generation.inbox.put_nowait(kind(f"{self.name}: {why}"))

    # --- in the worker ---

    def _work(self) -> None:
        while not self._served():
            pass

    def _served(self) -> bool:
        """Serve until told to stop; False after a failure, which must not end the thread: callers wait for it."""
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001  also what no handler of `Exception` sees
            while not self._recovered(error):
                time.sleep(_RECOVER_PAUSE_S)
            return False
        return True

    def _serve(self) -> None:
        while self._take_news():
            if self.runtime is None and not self._load():
                continue
            self._load_wanted = False
            if self.runtime is not None:
                self._step_began_s = time.monotonic()
                with self._turn:
                    self._step(self.runtime)
                self._step_began_s = None
            self._flush()
            if self.runtime is not None:
                self._steps.settle(self.runtime)
                self._steps.rest()
        self._steps.fail_all(ReplicaBroken, "the agent is shutting down")
        self._unload()
        self._flush()

    def _recovered(self, error: BaseException) -> bool:
        """Reset after a failure of the worker itself; False if the reset failed too, for want of memory say."""
        try:
            self._flush()
            self._give_up(f"its worker failed ({in_words(error)})")
            self._call(functools.partial(self._lose_all, self.problem))
            self._call(self._loaded.set)
            log.error("worker failed", model=self.name, pause_s=self.rest_s, exc_info=error)
        except BaseException:  # noqa: BLE001  see `_served`
            return False
        return True

    def _give_up(self, why: str) -> None:
        """Forget the model and everything in it, and rest."""
        runtime, self.runtime = self.runtime, None
        now_s = time.monotonic()
        if now_s - self._restarted_at_s > _CALM_S:
            self._restart_pause_s = _RESTART_PAUSE_S[0]
        self._restarted_at_s = now_s
        self._step_began_s = None
        self.problem = why
        self._load_again_at_s = now_s + self._restart_pause_s
        self._restart_pause_s = min(2 * self._restart_pause_s, _RESTART_PAUSE_S[1])
        self._load_wanted = False
        self._steps.clear()
        self.counters.worker_restarts += 1
        if runtime is not None:
            self._close(runtime)

    def _take_news(self) -> bool:
        """Wait until there is something to do and take in what arrived; False when the loop shall end."""
        began_s = time.monotonic()
        for idle_s, act in self._idle_stages:
            if self._wait_for_news(max(0.0, began_s + idle_s - time.monotonic())):
                break
            act()
        else:
            self._wait_for_news(None)
        with self._wake:
            self._nudged = False
            while self._arrivals:
                generation = self._arrivals.pop(0)
                if not generation.cancelled:
                    self._steps.add(generation)
            return not self._stopping

    def _wait_for_news(self, timeout_s: float | None) -> bool:
        with self._wake:
            return self._wake.wait_for(
                lambda: bool(self._arrivals or self._nudged or self._stopping or self._load_wanted or self._steps),
                timeout_s,
            )

    def _rest(self) -> None:
        if self.runtime is not None:
            self.runtime.release_memory()
        trim_heap()

    def _forget_kept(self) -> None:
        """Nobody came back to what is kept."""
        if self.runtime is not None:
            self.runtime.trim_kept(0)
        self._rest()

    def _unload(self) -> None:
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            self._close(runtime)
            log.info("model unloaded", model=self.name)
        del runtime
        trim_heap()

    def _close(self, runtime: Runtime) -> None:
        """Close a runtime that is not used afterwards; an error of its `close` is logged."""
        try:
            runtime.close()
        except Exception:
            log.exception("model not closed", model=self.name)

    def _load(self) -> bool:
        """Load the model if anybody needs it; on failure fail whoever waits and pause before the next attempt."""
        if not self._steps and not self._load_wanted:
            return False
        if not self.resting:
            self._try_load()
        if self.runtime is None:
            self._steps.fail_all(ReplicaUnreachable, self.problem)
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
            self._load_again_at_s = time.monotonic() + self._reload_pause_s
            self._reload_pause_s = min(2 * self._reload_pause_s, _RELOAD_PAUSE_S[1])
            return
        self.counters.loads += 1
        self.problem = ""
        self.load_s = time.monotonic() - started_s
        self._reload_pause_s = _RELOAD_PAUSE_S[0]
        self._steps.failures = 0
        trim_heap()
        log.info("model loaded", model=self.name, load_s=round(self.load_s, 2))

    def _step(self, runtime: Runtime) -> None:
        self._steps.step(runtime)
        if self._steps.failures >= _FAILURES_BEFORE_RELOAD:
            why = f"failed {self._steps.failures} times in a row"
            log.warning("model reload", model=self.name, why=why)
            self._steps.fail_admitted(f"the model is loaded anew: {why}")
            self._unload()

    def _flush(self) -> None:
        """Hand the results of a step to the event loop in one call."""
        if self._steps.results:
            items, self._steps.results = self._steps.results, []
            self._call(functools.partial(self._deliver, items))

    def _deliver(self, items: list[Result]) -> None:
        for generation, item in items:
            if isinstance(item, OverspillError) or item.finish_reason is not None:
                self._live.discard(generation)
            generation.inbox.put_nowait(item)

    def _call(self, function: Callable[[], object]) -> None:
        try:
            self._event_loop.call_soon_threadsafe(function)
        except RuntimeError:  # the event loop is closed: nobody listens any more
            self._stopping = True
