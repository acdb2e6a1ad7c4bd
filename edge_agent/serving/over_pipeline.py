"""What all models of this device have in common that are computed by a pipeline: their life, what they tell of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

from edge_agent.serving.artifact_watch import ArtifactWatch
from models.pipelines.replica import PipelineReplica, ServedPipeline
from router.base.clock import MonotonicClock
from router.base.errors import ReplicaUnreachable
from router.values.chunk import TokenChunk
from router.values.replica import ReplicaInfo, ReplicaSnapshot
from router.values.request import InferenceRequest
from router.values.status import ReplicaFacts


class OverPipeline(ABC):
    """`edge_agent.serving.lineup.ServedHere` over a pipeline. Create it on the event loop.

    Args:
        spared_slots: what it offers while the device is in trouble.

    Attributes:
        fault: why it must not be loaded; empty when nothing is known against it.
        notice: what an operator should know of a model that serves all the same.
    """

    link = None
    codec = None

    def __init__(self, served: ServedPipeline, fault: str, spared_slots: int) -> None:
        self.fault = fault
        self.notice = ""
        self.pipeline = PipelineReplica(served, MonotonicClock())
        self._spared_slots = spared_slots

    @property
    def info(self) -> ReplicaInfo:
        return self.pipeline.info

    @property
    def watch(self) -> ArtifactWatch | None:
        """Tells whether its artifact has changed; None where it has none of its own."""
        return None

    @property
    def digest(self) -> str:
        """`sha256:…` of its artifact's manifest; empty where it has none of its own."""
        return ""

    @property
    def loaded(self) -> bool:
        return self.pipeline.loaded

    @property
    def problem(self) -> str:
        """Why it cannot answer; empty for one that can, or that loads with its first request."""
        return "" if self.loaded else self.fault or self.pipeline.problem

    @property
    def failed(self) -> bool:
        """Whether it should be loaded and is not; `load` tries again."""
        return not self.loaded and bool(self.pipeline.problem)

    @property
    def resting(self) -> bool:
        """Whether it failed a moment ago."""
        return self.pipeline.resting

    @property
    def idle(self) -> bool:
        """Nobody waits for an answer of it."""
        return not self.pipeline.busy

    @property
    def slots(self) -> int:
        """Requests that it is sent at once."""
        return self.pipeline.slots

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Accelerators asked for and not had, a line each."""
        return ()

    @property
    def remarks(self) -> str:
        """All that an operator should know of it, empty when it is as configured."""
        return "; ".join(filter(None, (self.problem, self.notice, *self.fallbacks)))

    @property
    def can_do_without_store(self) -> bool:
        """Whether it is loaded, or can be, whatever has become of the store's files."""
        return True

    @abstractmethod
    def prepare(self) -> None:
        """Do ahead what the first load would otherwise wait for. Blocks; raises ArtifactError."""

    async def load(self) -> None:
        """Load it before its first request.

        Raises:
            ReplicaUnreachable: it cannot be loaded; says why.
        """
        if self.fault:
            raise ReplicaUnreachable(f"{self.info.variant}: {self.fault}")
        await self.pipeline.load()

    async def tend(self) -> None:
        """Free it when it was idle for long."""
        await self.pipeline.tend()

    def throttle(self, why: str) -> None:
        """Offer fewer slots while the device is in trouble (`why`); an empty text ends that."""
        self.pipeline.limit_slots(self._spared_slots if why else None)

    async def close(self) -> None:
        """Free it; requests inside end as `ReplicaBroken`."""
        await self.pipeline.close()

    def snapshot(self) -> ReplicaSnapshot:
        if self.fault and not self.loaded:
            return ReplicaSnapshot(self.info, available=False, slots=self.slots, why=self.fault)
        return self.pipeline.snapshot()

    @abstractmethod
    def facts(self) -> ReplicaFacts:
        """See `router.values.status.TellsFacts`."""

    def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        if self.fault and not self.loaded:
            raise ReplicaUnreachable(f"{self.info.replica_id}: {self.fault}")
        return self.pipeline.generate(request)
