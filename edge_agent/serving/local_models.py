"""From configuration, profile, catalogue and store to the models that this device serves."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from edge_agent.batching.manifest import read_encoder_manifest
from edge_agent.config import LocalModels
from edge_agent.device.memory import available_bytes
from edge_agent.generate.batcher import BatchLimits
from edge_agent.runtime.manifest import Manifest, read_manifest
from edge_agent.runtime.private_copy import PrivateCopies
from edge_agent.runtime.protocol import Runtime, RuntimeRequest
from edge_agent.runtime.registry import open_runtime
from edge_agent.serving.artifact_watch import ArtifactWatch
from edge_agent.serving.memory_plan import KvPromises, need_of, reduced, slots_that_fit
from edge_agent.serving.prompts import PromptCodec
from edge_agent.serving.replica import LocalModel
from edge_agent.serving.stateless import Artifact, StatelessModel, stateless_info
from hardware_profiles.loader import Profile, RuntimeOptions
from models.catalogue.families import Catalogue, Family, Variant, load_catalogue
from models.store.manifest import MANIFEST_FILE, read_regular
from models.store.store import ModelStore, default_root
from router.base.config import file_of
from router.base.errors import ArtifactError, ConfigError, ModelNotFound, OverspillError, in_words
from router.values.replica import ReplicaInfo, SpeedPrior

log = structlog.get_logger("edge_agent")

_COLD_START_S = 0.3  # tokenizer, session, first binding
_COLD_BYTES_PER_S = 150e6  # read, digest and repack


@dataclass(frozen=True)
class Shelf:
    """Where models and their descriptions are found, and what is shared by those that are loaded.

    Attributes:
        copies: private copies of what is mapped into memory; None maps the store's files.
        promises: KV memory that loaded models may still take.
        codecs: tokenizers by family and digest; each is read once.
    """

    catalogue: Catalogue
    store: ModelStore
    copies: PrivateCopies | None = None
    promises: KvPromises = field(default_factory=KvPromises)
    codecs: dict[str, PromptCodec] = field(default_factory=dict)

    @classmethod
    def open(cls, settings: LocalModels, cache_dir: Path | None = None) -> Shelf:
        """Open the catalogue and the store that the configuration names.

        Args:
            cache_dir: where private copies are kept; None makes none.

        Raises:
            ConfigError: the catalogue is broken.
        """
        extra = file_of(settings.catalogue)
        root = file_of(settings.store) or default_root()
        catalogue = load_catalogue(extra)
        return cls(catalogue, ModelStore(root, catalogue), PrivateCopies(cache_dir) if cache_dir else None)


def effective_settings(settings: LocalModels, profile: Profile) -> LocalModels:
    """Return `settings` with the profile's choice wherever it left one open."""
    serving = profile.serving
    return msgspec.structs.replace(
        settings,
        kv_slots=settings.kv_slots or serving.kv_slots,
        context_tokens=settings.context_tokens or serving.context_tokens,
        queue_limit=settings.queue_limit or serving.queue_limit,
        prefill_chunk_tokens=settings.prefill_chunk_tokens or serving.prefill_chunk_tokens,
        intra_op_threads=settings.intra_op_threads or profile.runtime.intra_op_threads,
    )


def runtime_options(settings: LocalModels, profile: Profile) -> RuntimeOptions:
    """Return how the runtime shall run: as the profile says, but for what the configuration chose."""
    threads = effective_settings(settings, profile).intra_op_threads
    return msgspec.structs.replace(profile.runtime, intra_op_threads=threads)


def local_models(
    settings: LocalModels, profile: Profile, shelf: Shelf, speed: float = 1.0
) -> list[LocalModel | StatelessModel]:
    """Describe every variant of `settings.variants`, best rung first; nothing is loaded.

    A variant whose artifact is missing or damaged is described too, with the reason in `fault`: one broken rung must
    not take the others along.

    Args:
        speed: of the power mode in force, relative to the one of the profile's figures.

    Raises:
        ModelNotFound: the catalogue has no such variant.
        ConfigError: the variant is none that runs on this agent, or more is asked for than its engines are built for.
    """
    settings = effective_settings(settings, profile)
    _check_engine_bounds(settings, profile)
    described = [_described(name, _Terms(settings, profile, shelf, speed)) for name in settings.variants]
    generating = [model for model in described if isinstance(model, LocalModel)]
    codecs = {model.info.family: model.codec for model in reversed(generating) if model.codec is not None}
    found: list[LocalModel | StatelessModel] = [
        dataclasses.replace(model, codec=codecs.get(model.info.family)) if isinstance(model, LocalModel) else model
        for model in described
    ]
    return sorted(found, key=lambda model: (model.info.family, model.info.rung))


@dataclass(frozen=True, slots=True)
class _Terms:
    """What every model of a configuration shares; `settings` with the profile's choices."""

    settings: LocalModels
    profile: Profile
    shelf: Shelf
    speed: float


def _described(name: str, terms: _Terms) -> LocalModel | StatelessModel:
    """Describe one variant, whole or broken."""
    catalogue, settings = terms.shelf.catalogue, terms.settings
    variant = catalogue.variant(name)
    family = catalogue.family(variant.family)
    if variant.format != "onnx":
        edge = [item.name for item in family.variants if item.format == "onnx"]
        raise ConfigError(
            f"models.variants: `{name}` is of format `{variant.format}`, which this agent cannot run; "
            f"of family `{variant.family}` it runs: {', '.join(edge) or 'none'}",
            param="models.variants",
        )
    if family.task == "infer":
        raise ConfigError(
            f"models.variants: `{name}` is the model of a pipeline: take it out of the list, and name it in a stage of "
            f'[[pipelines]], use = "onnx", options = {{ variant = "{name}" }}',
            param="models.variants",
        )
    prior = _prior(family, variant, terms.profile, terms.speed)
    if family.task == "embed":
        return _stateless(_info(family, variant, family.context_tokens, prior), terms)
    window = min(settings.context_tokens, family.context_tokens)
    model = LocalModel(
        info=_info(family, variant, window, prior),
        limits=_limits(settings, terms.profile),
        queue_limit=settings.queue_limit,
        open_runtime=_nothing,
        codec=None,
        unload_idle_s=settings.unload_idle_s,
        keep_kv=settings.keep_kv,
    )
    try:
        return _whole(model, family, variant, terms)
    except ModelNotFound:
        raise
    except Exception as error:  # noqa: BLE001 - one rung's files, whatever they hold, are the boundary of their faults
        return dataclasses.replace(model, fault=_fault(name, error))


def _fault(variant: str, error: Exception) -> str:
    """Return what is wrong with an artifact that cannot be read."""
    if isinstance(error, OverspillError):
        return error.message
    log.error("artifact unreadable", variant=variant, exc_info=error)
    return in_words(error)


def _stateless(info: ReplicaInfo, terms: _Terms) -> StatelessModel:
    """Describe a variant of an encoder, whole or broken."""
    settings, shelf = terms.settings, terms.shelf
    options = runtime_options(settings, terms.profile)
    model = StatelessModel(
        stateless_info(info),
        settings.batching,
        options,
        settings.allow_provider_fallback,
        settings.unload_idle_s,
        copies=shelf.copies,
    )
    try:
        directory = shelf.store.artifact_dir(info.variant)
        raw = read_regular(directory / MANIFEST_FILE)
        manifest = read_encoder_manifest(directory)
    except Exception as error:  # noqa: BLE001 - as above
        return dataclasses.replace(model, fault=_fault(info.variant, error))
    artifact = Artifact(directory, manifest, ArtifactWatch(directory, manifest, raw))
    return dataclasses.replace(model, info=stateless_info(info, manifest.context_tokens), artifact=artifact)


def _whole(model: LocalModel, family: Family, variant: Variant, terms: _Terms) -> LocalModel:
    """Complete a description from the artifact itself.

    Raises:
        ArtifactError: it is missing or broken; names the command that makes it.
    """
    settings, shelf = terms.settings, terms.shelf
    directory = shelf.store.artifact_dir(variant.name)
    raw = read_regular(directory / MANIFEST_FILE)
    manifest = read_manifest(directory)
    if manifest.variant != variant.name:
        raise ArtifactError(
            f"the store's directory of `{variant.name}` holds `{manifest.variant}`; "
            f"run: overspill models pull {family.name} --prepare"
        )
    watch = ArtifactWatch(directory, manifest, raw)
    codec = _codec(directory, f"{family.name} {watch.digest}", shelf)
    options = runtime_options(settings, terms.profile)
    request = RuntimeRequest(
        directory,
        options,
        settings.kv_slots,
        settings.context_tokens,
        settings.prefill_chunk_tokens,
        manifest=manifest,
        copies=shelf.copies,
    )
    maps = shelf.copies is not None and options.name == "onnx" and "tensorrt" not in options.providers
    weights_bytes = sum(file.bytes for file in manifest.files.values())
    return dataclasses.replace(
        model,
        info=dataclasses.replace(model.info, context_tokens=min(settings.context_tokens, manifest.context_tokens)),
        open_runtime=functools.partial(_load, manifest, request, settings.allow_provider_fallback, shelf),
        codec=codec,
        digest=watch.digest,
        watch=watch,
        prepare=functools.partial(shelf.copies.hold, directory, manifest) if shelf.copies and maps else None,
        has_copy=functools.partial(shelf.copies.holds, manifest) if shelf.copies else None,
        cold_start_s=_COLD_START_S + weights_bytes / _COLD_BYTES_PER_S,
    )


def _codec(directory: Path, key: str, shelf: Shelf) -> PromptCodec:
    """Read a tokenizer, unless it was read before."""
    if key not in shelf.codecs:
        codec = PromptCodec(directory)
        codec.warm()
        shelf.codecs[key] = codec
    return shelf.codecs[key]


def _nothing() -> Runtime:
    raise ArtifactError("there is no artifact to load")


def _check_engine_bounds(settings: LocalModels, profile: Profile) -> None:
    """Raises ConfigError where the configuration wants more than the engines of this device class are built for."""
    options = profile.runtime
    if options.name != "tensorrt" and "tensorrt" not in options.providers:
        return
    most = options.tensorrt
    for key, wanted, bound, name in (
        ("kv_slots", settings.kv_slots, most.max_batch, "max_batch"),
        ("prefill_chunk_tokens", settings.prefill_chunk_tokens, most.max_sequence_tokens, "max_sequence_tokens"),
        ("context_tokens", settings.context_tokens, most.max_past_tokens, "max_past_tokens"),
    ):
        if wanted > bound:
            raise ConfigError(
                f"models.{key} is {wanted}, engines of profile `{profile.name}` are built for {bound} at most "
                f"(runtime.tensorrt.{name}): lower it, or raise the bound in a profile of your own and build anew",
                param=f"models.{key}",
            )


def _info(family: Family, variant: Variant, context_tokens: int, prior: SpeedPrior) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=f"local/{variant.name}",
        endpoint="local",
        tier="edge",
        remote=False,
        family=family.name,
        variant=variant.name,
        rung=variant.rung,
        quality=variant.quality,
        context_tokens=context_tokens,
        prior=prior,
    )


def _limits(settings: LocalModels, profile: Profile) -> BatchLimits:
    return BatchLimits(settings.kv_slots, settings.prefill_chunk_tokens, profile.serving.decode_steps_per_chunk)


def _prior(family: Family, variant: Variant, profile: Profile, speed: float) -> SpeedPrior:
    """The profile's figure, for the share of the layers that a pruned variant kept (its last layer is always kept)."""
    kept = len(variant.layers) / (variant.layers[-1] + 1) if variant.layers else 1.0
    prior = profile.prior(int(family.parameters * kept), variant.precision)
    return SpeedPrior(
        prefill_tokens_per_s=prior.prefill_tokens_per_s * speed,
        decode_tokens_per_s=prior.decode_tokens_per_s * speed,
        decode_batch_slope=prior.decode_batch_slope,
        source=prior.source if speed == 1.0 else f"{prior.source}; ×{speed:g} for the power mode",
    )


def _load(manifest: Manifest, request: RuntimeRequest, allow_provider_fallback: bool, shelf: Shelf) -> Runtime:
    """Load a model, with as many KV slots as the device's memory holds.

    Raises:
        ReplicaUnreachable: there is not enough memory now.
        ConfigError: the profile's accelerator is missing and no fallback is allowed.
        ArtifactError: the artifact cannot be loaded.
    """
    need = need_of(manifest, request)
    free_bytes = available_bytes() - shelf.promises.open_bytes()
    slots = slots_that_fit(manifest.variant, need, request.slots, free_bytes)
    notes = (reduced(manifest.variant, need, request.slots, slots),) if slots < request.slots else ()
    for note in notes:
        log.warning("fewer slots", variant=manifest.variant, why=note)
    runtime = open_runtime(dataclasses.replace(request, slots=slots, notes=notes))
    if runtime.facts.fallbacks and not allow_provider_fallback:
        runtime.close()
        raise ConfigError(
            f"{manifest.variant}: {'; '.join(runtime.facts.fallbacks)}; install it, or set "
            "models.allow_provider_fallback = true to serve without it",
            param="models.allow_provider_fallback",
        )
    shelf.promises.add(runtime)
    return runtime


def describe_runtime(options: RuntimeOptions) -> str:
    """One line for `edge profile` and `edge check`."""
    threads = options.intra_op_threads or "all"
    return f"{options.name} on {', '.join(options.providers)}, {threads} threads an operator"
