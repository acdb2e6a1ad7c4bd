"""A pipeline that the configuration declares, as a model of this device."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_agent.batching.manifest import FORMAT as ENCODER
from edge_agent.batching.onnx_stage import OnnxModels
from edge_agent.generate.turn import Turn
from edge_agent.serving.artifact_watch import ArtifactWatch
from hardware_profiles.loader import RuntimeOptions
from models.pipelines.declared.assembly import assemble, check_ladders, info_of, plan_of, served
from models.pipelines.declared.contract import Checked, Contract
from models.pipelines.declared.settings import PipelineSettings
from models.pipelines.kinds.registry import Supplies
from models.pipelines.pipeline import PipelinePlan
from models.pipelines.replica import PipelineReplica
from models.store.manifest import MANIFEST_FILE, read_regular
from models.store.store import ModelStore
from router.base.clock import MonotonicClock
from router.base.errors import ArtifactError, ReplicaUnreachable
from router.values.chunk import TokenChunk
from router.values.replica import ReplicaInfo, ReplicaSnapshot
from router.values.request import InferenceRequest
from router.values.status import ReplicaFacts
from router.values.tensors import Signature, TensorSpec


@dataclass(frozen=True, slots=True)
class Machine:
    """What pipelines of this device are made with.

    Attributes:
        options: of the runtime, by the device's profile.
    """

    store: ModelStore
    options: RuntimeOptions
    allow_provider_fallback: bool = True


@dataclass(frozen=True, slots=True)
class DeclaredModel:
    """`edge_agent.serving.lineup.Described`: a pipeline before it is served.

    Attributes:
        fault: why it cannot be served, known before loading: a model of it is missing.
    """

    settings: PipelineSettings
    machine: Machine
    info: ReplicaInfo
    fault: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that its replica is made from."""
        machine = self.machine
        told = msgspec.json.encode(self.settings)  # its options are dictionaries, which have no hash
        return (told, machine.options, machine.allow_provider_fallback, self.info, self.fault)

    def replica(self, turn: Turn) -> DeclaredReplica:
        """Make its replica."""
        return DeclaredReplica(self, turn)

    def checked(self, turn: Turn | None) -> Checked:
        """Assemble it; raises as `assemble`."""
        machine = self.machine
        models = OnnxModels(self.settings.name, machine.options, machine.allow_provider_fallback, turn)
        return assemble(self.settings, Supplies(_Artifacts(machine.store).find, models))


def declared_models(pipelines: Sequence[PipelineSettings], machine: Machine) -> list[DeclaredModel]:
    """Describe every declared pipeline, and check it; nothing is loaded.

    A pipeline whose model is missing is described too, with the reason in `fault`.

    Raises:
        ConfigError: a stage is wrong, or rungs of a family differ; names pipeline, stage and remedy.
    """
    found, whole = [], []
    for settings in pipelines:
        bare = DeclaredModel(settings, machine, info_of(settings, None, "edge", "local"))
        try:
            checked = bare.checked(None)
        except ArtifactError as error:
            found.append(DeclaredModel(settings, machine, bare.info, error.message))
            continue
        whole.append(checked)
        found.append(DeclaredModel(settings, machine, info_of(settings, checked, "edge", "local")))
    check_ladders(whole)
    return found


class _Manifest(msgspec.Struct):
    """What the manifest of an artifact says of its tensors, if it does."""

    format: str = ""
    dimensions: int = 0
    signature: Signature | None = None


@dataclass(frozen=True, slots=True)
class _Artifacts:
    """Finds artifacts of the store, and what they take and give."""

    store: ModelStore

    def find(self, variant: str) -> tuple[Path, Contract | None]:
        """Return the folder of a variant, and its tensors.

        Raises:
            ArtifactError, ModelNotFound: it is not there; names the command that brings it.
        """
        folder = self.store.artifact_dir(variant)
        try:
            told = msgspec.json.decode(read_regular(folder / MANIFEST_FILE), type=_Manifest)
        except (OSError, msgspec.DecodeError) as error:
            raise ArtifactError(f"cannot read {folder / MANIFEST_FILE}: {error}") from error
        if told.format == ENCODER:
            ids, mask = TensorSpec("input_ids", "INT64", (-1,)), TensorSpec("mask", "FP32", (-1,))
            return folder, Contract((ids, mask), (TensorSpec("pooled", "FP32", (told.dimensions,)),))
        signature = told.signature
        return folder, None if signature is None else Contract(signature.inputs, signature.outputs)


class DeclaredReplica:
    """`edge_agent.serving.lineup.ServedHere` over a declared pipeline. Create it on the event loop.

    Attributes:
        fault: why it must not be loaded; empty when nothing is known against it.
        notice: nothing, so far.
    """

    link = None
    codec = None
    watch: ArtifactWatch | None = None
    digest = ""
    fallbacks: tuple[str, ...] = ()
    can_do_without_store = True

    def __init__(self, model: DeclaredModel, turn: Turn) -> None:
        self._model = model
        self._turn = turn
        self.fault = model.fault
        self.notice = ""
        info = model.info
        signature = info.signature or Signature((), ())
        checked = Checked(model.settings, signature, ())
        self.pipeline = PipelineReplica(served(checked, info, self._plan), MonotonicClock())

    @property
    def info(self) -> ReplicaInfo:
        return self._model.info

    @property
    def loaded(self) -> bool:
        return self.pipeline.loaded

    @property
    def problem(self) -> str:
        """Why it cannot answer; empty for one that can, or that loads with its first request."""
        return "" if self.loaded else self.fault or self.pipeline.problem

    @property
    def remarks(self) -> str:
        """All that an operator should know of it."""
        return self.problem

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

    def prepare(self) -> None:
        """There is nothing to do ahead."""

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
        """Offer half of the slots while the device is in trouble (`why`); an empty text ends that."""
        self.pipeline.limit_slots(max(1, self._model.settings.slots // 2) if why else None)

    async def close(self) -> None:
        """Free it; requests inside end as `ReplicaBroken`."""
        await self.pipeline.close()

    def snapshot(self) -> ReplicaSnapshot:
        if self.fault and not self.loaded:
            return ReplicaSnapshot(self.info, available=False, slots=self.slots, why=self.fault)
        return self.pipeline.snapshot()

    def facts(self) -> ReplicaFacts:
        """See `router.values.status.TellsFacts`."""
        loads, load_s = self.pipeline.loads, self.pipeline.load_s
        return ReplicaFacts(
            kind="pipeline", cold_starts=loads, cold_start_s=None if load_s is None else round(load_s, 3)
        )

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        if self.fault and not self.loaded:
            raise ReplicaUnreachable(f"{self.info.replica_id}: {self.fault}")
        async for chunk in self.pipeline.generate(request):
            yield chunk

    def _plan(self) -> PipelinePlan:
        return plan_of(self._model.checked(self._turn))
