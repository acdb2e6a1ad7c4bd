"""A pipeline as the router sees it: a description, a load snapshot, an answer of one piece.

It is loaded with its first request, or before, and unloaded when nobody came for a while. One that fails on what it has
computed before is loaded anew; where that does not help, or it cannot be loaded, it says why, rests, and is tried once
more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from models.pipelines.batching import LONG_S
from models.pipelines.lessons import Lessons
from models.pipelines.pipeline import Pipeline, PipelinePlan
from models.pipelines.stage import Stage
from router.base.clock import Clock
from router.base.errors import OverspillError, ReplicaUnreachable, Unavailable, in_words
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import Input
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import InferenceRequest
from router.values.status import NO_FACTS, ReplicaFacts
from router.values.task import Output

log = structlog.get_logger("models.pipelines")

_REST_S = (5.0, 300.0)  # after a load that failed, or did not help: at first, and at most
_HELPED_S = 60.0  # a pipeline that was loaded anew, and breaks within so long, was not helped by it


class Calls(Protocol):
    """How a call becomes inputs of a pipeline, and their results an answer."""

    def values(self, prompt: Input) -> Sequence[Any]:
        """Return the inputs of a call; raises InvalidRequest."""
        ...

    def output(self, results: Sequence[Any]) -> tuple[Output, int]:
        """Return the answer, and how many tokens were computed for it."""
        ...


@dataclass(frozen=True, slots=True)
class ServedPipeline:
    """What it takes to serve a pipeline.

    Attributes:
        slots: requests that it is sent at once.
        plan: makes it; called in a worker thread before each load.
        unload_idle_s: free it when it had no request for so long; 0 never does.
        load_s: first guess of how long loading takes.
        facts: what it is, for operators.
    """

    info: ReplicaInfo
    slots: int
    calls: Calls
    plan: Callable[[], PipelinePlan]
    unload_idle_s: float = 0.0
    load_s: float = 1.0
    facts: ReplicaFacts = NO_FACTS


def turn_tokens(prior: SpeedPrior) -> int:
    """Return what is computed of a request of many inputs before another one has its turn: a batch, by the prior."""
    return max(1, int(LONG_S * prior.prefill_tokens_per_s))


class PipelineReplica:
    """`router.values.replica.Replica` over a pipeline.

    Attributes:
        problem: why it cannot answer, or could not a moment ago; empty when nothing is wrong.
        loads: how often it was loaded; load_s: how long the last load took.
    """

    link = None

    def __init__(self, served: ServedPipeline, clock: Clock) -> None:
        self._served = served
        self._clock = clock
        self._pipeline: Pipeline | None = None
        self._loading: asyncio.Task[Pipeline] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._again_at_s = 0.0
        self._rest_s = _REST_S[0]
        self._broke_down = False
        self._loaded_anew_at_s = -math.inf
        self._used_at_s = clock.now_s()
        self._slots = served.slots
        self._lessons = Lessons()
        self._closed = False
        self.problem = ""
        self.loads = 0
        self.load_s: float | None = None

    @property
    def info(self) -> ReplicaInfo:
        return self._served.info

    @property
    def loaded(self) -> bool:
        return self._pipeline is not None

    @property
    def resting(self) -> bool:
        """Whether it failed a moment ago; requests are refused until the pause is over."""
        return bool(self.problem) and self._clock.now_s() < self._again_at_s

    @property
    def busy(self) -> int:
        """Requests inside."""
        return 0 if self._pipeline is None else self._pipeline.requests

    @property
    def stages(self) -> Sequence[Stage]:
        """Its stages, where it is loaded."""
        return () if self._pipeline is None else self._pipeline.stages

    @property
    def slots(self) -> int:
        return self._slots

    def limit_slots(self, slots: int | None) -> None:
        """Offer so many slots at most from now on; None: all."""
        self._slots = self._served.slots if slots is None else min(slots, self._served.slots)

    async def load(self) -> Pipeline:
        """Load it now, unless it is; whoever comes meanwhile waits for the same load.

        Raises:
            ReplicaUnreachable: it cannot be loaded; says why.
        """
        if self._pipeline is not None:
            return self._pipeline
        if self._closed:
            raise ReplicaUnreachable(f"{self.info.variant}: it is closed")
        if self._loading is None:
            self._loading = asyncio.create_task(self._load(), name=f"load {self.info.variant}")
        return await asyncio.shield(self._loading)

    async def _load(self) -> Pipeline:
        began_s = self._clock.now_s()
        try:
            plan = await asyncio.to_thread(self._served.plan)
            pipeline = Pipeline(plan, self._clock, self._broke, self._lessons)
            await pipeline.open()
        except Exception as error:
            known = isinstance(error, OverspillError)
            why = error.message if isinstance(error, OverspillError) else in_words(error)
            log.error("pipeline not loaded", model=self.info.variant, why=why, exc_info=not known)  # noqa: TRY400
            self._rest(why)
            raise ReplicaUnreachable(f"{self.info.variant}: {why}") from error
        finally:
            self._loading = None
        self._pipeline = pipeline
        self.problem = ""
        if self._broke_down:
            self._broke_down, self._loaded_anew_at_s = False, self._clock.now_s()
        else:
            self._rest_s = _REST_S[0]
        self.loads += 1
        self.load_s = self._clock.now_s() - began_s
        self._used_at_s = self._clock.now_s()
        log.info("pipeline loaded", model=self.info.variant, load_s=round(self.load_s, 2))
        return pipeline

    def _rest(self, why: str) -> None:
        self.problem = why
        self._again_at_s = self._clock.now_s() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _REST_S[1])

    def _broke(self, why: str) -> None:
        """Load it anew: what fails on what it has computed before is not the fault of its requests."""
        log.warning("pipeline reload", model=self.info.variant, why=why)
        if self._clock.now_s() - self._loaded_anew_at_s < _HELPED_S:
            self._rest(why)
        else:
            self._rest_s = _REST_S[0]
        self._broke_down = True
        self._unload(why)

    def _unload(self, why: str) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            closing = asyncio.create_task(pipeline.close(why), name=f"unload {self.info.variant}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def tend(self) -> None:
        """Free it when it was idle for long. Called now and then."""
        idle_s = self._served.unload_idle_s
        if idle_s and self.loaded and not self.busy and self._clock.now_s() - self._used_at_s > idle_s:
            log.info("pipeline unloaded", model=self.info.variant)
            self._unload("it was idle")

    async def close(self) -> None:
        """Free it; requests inside end as `ReplicaBroken`."""
        self._closed = True
        if self._loading is not None:
            await asyncio.gather(self._loading, return_exceptions=True)
        self._unload("it is shutting down")
        await asyncio.gather(*self._closing, return_exceptions=True)

    def snapshot(self) -> ReplicaSnapshot:
        pipeline, info = self._pipeline, self.info
        running = 0 if pipeline is None else pipeline.requests
        tokens = 0 if pipeline is None else pipeline.cost
        if pipeline is None:  # the first request also waits for the load; counted in the currency of this snapshot
            load_s = self._served.load_s if self.load_s is None else self.load_s
            tokens += int(load_s * info.prior.prefill_tokens_per_s)
        slots, resting = self.slots, self.resting
        return ReplicaSnapshot(
            info=info,
            available=not resting,
            slots=slots,
            running=min(running, slots),
            queued=max(0, running - slots),
            queued_prefill_tokens=tokens,
            pending_decode_tokens=running,
            why=self.problem if resting else "",
            back_in_s=max(0.0, self._again_at_s - self._clock.now_s()) if resting else 0.0,
        )

    def facts(self) -> ReplicaFacts:
        """See `router.values.status.TellsFacts`."""
        return self._served.facts

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        """Compute a call; its one chunk is its answer."""
        served = self._served
        values = served.calls.values(request.prompt)
        if self.resting:
            wait_s = max(self._again_at_s - self._clock.now_s(), 0.25)
            raise Unavailable(f"{self.info.replica_id}: {self.problem}", retry_after_s=wait_s)
        pipeline = await self.load()
        objective = request.objective
        due_s = float("inf") if objective.ends_s is None else request.accepted_at_s + objective.ends_s
        try:
            done = await pipeline.run(
                values,
                priority=objective.priority,
                due_s=due_s,
                cost=self.info.before_newcomers(request.prompt_tokens),
                caller=request.caller,
            )
        finally:
            self._used_at_s = self._clock.now_s()
        output, tokens = served.calls.output(done.results)
        yield TokenChunk(
            "",
            tokens=1,
            finish_reason=FinishReason.STOP,
            prompt_tokens=tokens,
            output=output,
            own_s=done.ended_s - done.began_s,
        )
