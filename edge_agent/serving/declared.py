"""A pipeline that the configuration declares, as a model of this device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_agent.batching.manifest import FORMAT as ENCODER
from edge_agent.batching.onnx_stage import OnnxModels
from edge_agent.generate.turn import Turn
from edge_agent.serving.over_pipeline import OverPipeline
from hardware_profiles.loader import RuntimeOptions
from models.pipelines.declared.assembly import assemble, check_ladders, info_of, plan_of, served
from models.pipelines.declared.contract import Checked, Contract
from models.pipelines.declared.settings import PipelineSettings
from models.pipelines.kinds.registry import Supplies
from models.pipelines.pipeline import PipelinePlan
from models.store.manifest import MANIFEST_FILE, read_regular
from models.store.store import ModelStore
from router.base.errors import ArtifactError
from router.base.json_input import UNREADABLE
from router.values.replica import ReplicaInfo
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
        except (OSError, *UNREADABLE) as error:
            raise ArtifactError(f"cannot read {folder / MANIFEST_FILE}: {error}") from error
        if told.format == ENCODER:
            ids, mask = TensorSpec("input_ids", "INT64", (-1,)), TensorSpec("mask", "FP32", (-1,))
            return folder, Contract((ids, mask), (TensorSpec("pooled", "FP32", (told.dimensions,)),))
        signature = told.signature
        return folder, None if signature is None else Contract(signature.inputs, signature.outputs)


class DeclaredReplica(OverPipeline):
    """A declared pipeline, served."""

    def __init__(self, model: DeclaredModel, turn: Turn) -> None:
        self._model = model
        self._turn = turn
        info = model.info
        checked = Checked(model.settings, info.signature or Signature((), ()), ())
        super().__init__(served(checked, info, self._plan), model.fault, spared_slots=max(1, model.settings.slots // 2))

    def prepare(self) -> None:
        """There is nothing to do ahead."""

    def facts(self) -> ReplicaFacts:
        """See `router.values.status.TellsFacts`."""
        loads, load_s = self.pipeline.loads, self.pipeline.load_s
        return ReplicaFacts(
            kind="pipeline", cold_starts=loads, cold_start_s=None if load_s is None else round(load_s, 3)
        )

    def _plan(self) -> PipelinePlan:
        return plan_of(self._model.checked(self._turn))
