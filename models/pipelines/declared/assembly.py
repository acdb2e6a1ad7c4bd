"""From `[[pipelines]]` to pipelines that can run: every stage found, its options read, and all of them wired."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from models.pipelines.declared.contract import ArrayWork, Checked, Contract, Kind, Wired, wire
from models.pipelines.declared.rows import OpenRows, Row, Rows, length_of, size_of
from models.pipelines.declared.settings import PipelineSettings
from models.pipelines.kinds.registry import Supplies, kind_of
from models.pipelines.pipeline import PipelinePlan
from models.pipelines.replica import ServedPipeline, turn_tokens
from models.pipelines.stage import StagePlan, cost_of_one
from router.base.errors import ConfigError
from router.values.replica import ReplicaInfo, SpeedPrior
from router.values.status import ReplicaFacts
from router.values.task import Task

_WINDOW = 8  # of one input, which counts as one token, and its answer as another


def assemble(settings: PipelineSettings, supplies: Supplies) -> Checked:
    """Find the stages of a pipeline, and check that they fit. Imports functions; loads no model.

    Raises:
        ConfigError: a stage is wrong; names pipeline, stage and remedy.
        ArtifactError, ModelNotFound: a model is not here.
    """
    return wire(settings, [kind_of(settings.name, stage, supplies) for stage in settings.stages])


def check_ladders(pipelines: list[Checked]) -> None:
    """Check that the rungs of each family take and give the same: whoever steps down changes nothing else.

    Raises:
        ConfigError: two differ.
    """
    first: dict[str, Checked] = {}
    for checked in pipelines:
        other = first.setdefault(checked.settings.family_name, checked)
        if other.signature != checked.signature:
            raise ConfigError(
                f"pipelines `{other.settings.name}` and `{checked.settings.name}` are rungs of "
                f"`{checked.settings.family_name}`, and differ in what they take or give: "
                f"{_told(other)} and {_told(checked)}: make them alike, or give one another `family`",
                param="pipelines",
            )


def _told(checked: Checked) -> str:
    signature = checked.signature
    return f"{', '.join(map(str, signature.inputs))} → {', '.join(map(str, signature.outputs))}"


def plan_of(checked: Checked) -> PipelinePlan:
    """Return what runs it."""
    stages = tuple(_stage(wired) for wired in checked.stages)
    settings = checked.settings
    return PipelinePlan(settings.name, stages, settings.queue_inputs, settings.queue_mib * 2**20, size_of)


def _stage(wired: Wired) -> StagePlan:
    settings = wired.settings
    measured = length_of(wired) if settings.buckets else None
    if wired.kind.shared and settings.pool == "threads":
        wired = replace(wired, kind=_Shared(wired.kind))
    return StagePlan(
        settings.name,
        OpenRows(wired),
        workers=settings.instances,
        batching=settings.batching,
        cost=cost_of_one if measured is None else _Length(*measured),
        pool=settings.pool,
        queue_items=settings.queue_inputs,
        timeout_s=settings.timeout_s,
    )


@dataclass(frozen=True, slots=True)
class _Length:
    """The size of a row in the unit of the buckets."""

    name: str
    axis: int

    def __call__(self, row: Row) -> int:
        length: int = row[self.name].shape[self.axis]
        return length


@dataclass(slots=True)
class _Shared:
    """A kind whose function is made once for all threads of its pool."""

    kind: Kind
    shared: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _work: ArrayWork | None = None

    @property
    def contract(self) -> Contract:
        return self.kind.contract

    def open(self) -> ArrayWork:
        with self._lock:
            if self._work is None:
                self._work = self.kind.open()
            return self._work


def info_of(settings: PipelineSettings, checked: Checked | None, tier: str, where: str) -> ReplicaInfo:
    """Describe a pipeline to the router.

    Args:
        checked: None where a model of it is missing.
        where: what its rungs compute on.
    """
    prior = SpeedPrior(settings.inputs_per_s, settings.inputs_per_s, 0.0, source="pipelines.inputs_per_s")
    return ReplicaInfo(
        replica_id=f"{where}/{settings.name}",
        endpoint=f"{where}/{settings.name}",
        tier=tier,
        remote=False,
        family=settings.family_name,
        variant=settings.name,
        rung=settings.rung,
        quality=settings.quality,
        context_tokens=_WINDOW,
        prior=prior,
        device=f"{where} {settings.family_name}",
        tasks=frozenset({Task.INFER}),
        signature=None if checked is None else checked.signature,
        turn_tokens=turn_tokens(prior),
    )


def served(checked: Checked, info: ReplicaInfo, plan: Callable[[], PipelinePlan]) -> ServedPipeline:
    """Return what a replica of it is made from."""
    settings = checked.settings
    return ServedPipeline(
        info,
        settings.slots,
        Rows(checked.signature),
        plan,
        settings.unload_idle_s,
        facts=ReplicaFacts(kind="pipeline"),
    )
