"""A stateless model of this device: from its artifact to a replica that computes batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from edge_agent.batching.encoder import load_encoder, shape_of
from edge_agent.batching.manifest import EncoderManifest
from edge_agent.device.memory import available_bytes
from edge_agent.generate.turn import Turn
from edge_agent.runtime.private_copy import Held, PrivateCopies
from edge_agent.serving.artifact_watch import ArtifactWatch
from edge_agent.serving.memory_plan import mib
from edge_agent.serving.over_pipeline import OverPipeline
from hardware_profiles.loader import RuntimeOptions
from models.pipelines.embedding import Embedding, embedding_stages
from models.pipelines.pipeline import PipelinePlan
from models.pipelines.replica import ServedPipeline, turn_tokens
from models.pipelines.settings import ModelBatching
from router.base.errors import ArtifactError, ConfigError, ReplicaUnreachable
from router.values.replica import ReplicaInfo
from router.values.status import ReplicaFacts
from router.values.task import Task

_COLD_START_S = 0.3


@dataclass(frozen=True, slots=True)
class Artifact:
    """A whole artifact of an encoder."""

    directory: Path
    manifest: EncoderManifest
    watch: ArtifactWatch


@dataclass(frozen=True, slots=True)
class StatelessModel:
    """What it takes to serve one stateless variant on this device.

    Attributes:
        artifact: None where it is missing or broken, for the reason in `fault`.
        copies: private copies of what is mapped into memory; None maps the store's files.
    """

    info: ReplicaInfo
    batching: ModelBatching
    options: RuntimeOptions
    allow_provider_fallback: bool = True
    unload_idle_s: float = 0.0
    artifact: Artifact | None = None
    copies: PrivateCopies | None = None
    fault: str = ""

    @property
    def digest(self) -> str:
        """`sha256:…` of the artifact's manifest; empty where that cannot be read."""
        return "" if self.artifact is None else self.artifact.watch.digest

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that a replica is made from: equal models need only one."""
        return (self.info, self.batching, self.options, self.unload_idle_s, self.digest, self.fault)

    def replica(self, turn: Turn) -> StatelessReplica:
        """Make its replica."""
        return StatelessReplica(self, turn)


class StatelessReplica(OverPipeline):
    """A stateless variant, served."""

    def __init__(self, model: StatelessModel, turn: Turn) -> None:
        self._model = model
        self._turn = turn if model.batching.instances == 1 else None
        self._fallbacks: tuple[str, ...] = ()
        served = ServedPipeline(
            model.info,
            model.batching.slots,
            Embedding(model.artifact.manifest.dimensions if model.artifact else 1),
            self._plan,
            model.unload_idle_s,
            _COLD_START_S,
        )
        super().__init__(served, model.fault, spared_slots=model.batching.max_size)

    @property
    def watch(self) -> ArtifactWatch | None:
        """Tells whether the artifact has changed; None for one that was broken from the start."""
        return None if self._model.artifact is None else self._model.artifact.watch

    @property
    def digest(self) -> str:
        """See `StatelessModel.digest`."""
        return self._model.digest

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Accelerators asked for and not had, a line each."""
        return self._fallbacks if self.loaded else ()

    @property
    def can_do_without_store(self) -> bool:
        """Whether it is loaded, or can be loaded from its own copy, whatever has become of the store's files."""
        artifact, copies = self._model.artifact, self._model.copies
        return self.loaded or (artifact is not None and copies is not None and copies.holds(artifact.manifest))

    def prepare(self) -> None:
        """Make the private copy ahead. Blocks.

        Raises:
            ArtifactError: the artifact is damaged.
        """
        self._held()

    def facts(self) -> ReplicaFacts:
        """See `router.values.status.TellsFacts`."""
        pipeline = self.pipeline
        return ReplicaFacts(
            kind="onnx",
            version=self.digest,
            cold_starts=pipeline.loads,
            cold_start_s=None if pipeline.load_s is None else round(pipeline.load_s, 3),
            computes_on=self._model.options.providers if self.loaded and not self.fallbacks else (),
        )

    def _held(self) -> Held:
        artifact, copies = self._model.artifact, self._model.copies
        if artifact is None:
            raise ArtifactError(self.fault)
        if copies is not None:
            return copies.hold(artifact.directory, artifact.manifest)
        fault = artifact.watch.fault()
        if fault:
            raise ArtifactError(fault)
        return Held(artifact.directory)

    def _plan(self) -> PipelinePlan:
        """Load the encoder, and put the stages around it. Called in a worker thread.

        Raises:
            ArtifactError: it cannot be loaded.
            ReplicaUnreachable: there is not enough memory now.
            ConfigError: the profile's accelerator is missing and no fallback is allowed.
        """
        held, model, artifact = self._held(), self._model, self._model.artifact
        if artifact is None:
            raise ArtifactError(self.fault)
        batching, manifest = model.batching, artifact.manifest
        _check_memory(manifest, batching)
        encoder = load_encoder(held.folder, manifest, model.options, self._turn)
        if encoder.opened.fallbacks and not model.allow_provider_fallback:
            raise ConfigError(
                f"{manifest.variant}: {'; '.join(encoder.opened.fallbacks)}; install it, or set "
                "models.allow_provider_fallback = true to serve without it",
                param="models.allow_provider_fallback",
            )
        self._fallbacks = encoder.opened.fallbacks
        shape = shape_of(held.folder, manifest)
        pads_to: Literal["longest", "nothing"] = "longest" if manifest.computes_padding else "nothing"
        stages = embedding_stages(shape, encoder.work, batching.settings, instances=batching.instances, pads_to=pads_to)
        return PipelinePlan(manifest.variant, stages, batching.queue_inputs)


def _check_memory(manifest: EncoderManifest, batching: ModelBatching) -> None:
    """Raises ReplicaUnreachable where a model and its largest batches do not fit into memory now."""
    needed_bytes = manifest.needed_bytes(batching.max_tokens, batching.instances)
    free_bytes = available_bytes()
    if needed_bytes > free_bytes:
        batch = mib(manifest.batch_bytes(batching.max_tokens))
        raise ReplicaUnreachable(
            f"{manifest.variant} needs {mib(needed_bytes)} (weights {mib(manifest.weights_bytes)}, {batch} for a batch "
            f"of each of {batching.instances} instances), {mib(max(0, free_bytes))} are free: leave it out of "
            "models.variants, lower models.batching.max_tokens, or free memory"
        )


def stateless_info(info: ReplicaInfo, context_tokens: int | None = None) -> ReplicaInfo:
    """Return the description of a variant as that of an encoder.

    Its rungs share a device of their own: their slots are batches, and none of the slots of models that generate.
    """
    prior = replace(info.prior, decode_batch_slope=0.0)
    window = info.context_tokens if context_tokens is None else context_tokens
    device = f"{info.endpoint} {info.family}"
    return replace(
        info,
        prior=prior,
        context_tokens=window,
        device=device,
        tasks=frozenset({Task.EMBED}),
        turn_tokens=turn_tokens(prior),
    )
