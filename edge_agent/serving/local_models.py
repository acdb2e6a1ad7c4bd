"""From configuration, profile, catalogue and store to the models that this device serves."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_agent.config import LocalModels
from edge_agent.device.memory import available_bytes
from edge_agent.generate.batcher import BatchLimits
from edge_agent.runtime.manifest import Manifest, read_manifest
from edge_agent.runtime.protocol import Runtime, RuntimeRequest
from edge_agent.runtime.registry import open_runtime
from edge_agent.serving.prompts import PromptCodec
from edge_agent.serving.replica import LocalModel
from hardware_profiles.loader import Profile, RuntimeOptions
from models.catalogue.families import Catalogue, Family, Variant, load_catalogue
from models.store.store import ModelStore, default_root
from router.base.errors import ArtifactError, ConfigError, ReplicaUnreachable
from router.values.replica import ReplicaInfo, SpeedPrior

_WORKING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where models and their descriptions are found."""

    catalogue: Catalogue
    store: ModelStore

    @classmethod
    def open(cls, settings: LocalModels) -> Shelf:
        """Open the catalogue and the store that the configuration names.

        Raises:
            ConfigError: the catalogue is broken.
        """
        extra = Path(settings.catalogue).expanduser() if settings.catalogue else None
        root = Path(settings.store).expanduser() if settings.store else default_root()
        catalogue = load_catalogue(extra)
        return cls(catalogue, ModelStore(root, catalogue))


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


def local_models(settings: LocalModels, profile: Profile, shelf: Shelf, speed: float = 1.0) -> list[LocalModel]:
    """Describe every variant of `settings.variants`, best rung first; nothing is loaded.

    Args:
        speed: of the power mode in force, relative to the one of the profile's figures.

    Raises:
        ModelNotFound: the catalogue has no such variant.
        ConfigError: the variant is none that runs on this agent.
        ArtifactError: its files are not in the store; names the command that puts them there.
    """
    settings = effective_settings(settings, profile)
    codecs: dict[str, PromptCodec] = {}
    found = []
    for name in settings.variants:
        variant = shelf.catalogue.variant(name)
        if variant.format != "onnx":
            edge = [item.name for item in shelf.catalogue.family(variant.family).variants if item.format == "onnx"]
            raise ConfigError(
                f"models.variants: `{name}` is of format `{variant.format}`, which this agent cannot run; "
                f"of family `{variant.family}` it runs: {', '.join(edge) or 'none'}",
                param="models.variants",
            )
        family = shelf.catalogue.family(variant.family)
        directory = shelf.store.artifact_dir(name)
        manifest = read_manifest(directory)
        codec = codecs.setdefault(family.name, PromptCodec(directory))
        found.append(
            LocalModel(
                info=_info(family, variant, manifest, settings, _prior(family, variant, profile, speed)),
                limits=_limits(settings, profile),
                queue_limit=settings.queue_limit,
                open_runtime=functools.partial(_load, directory, manifest, settings, profile),
                codec=codec,
                unload_idle_s=settings.unload_idle_s,
                digest="sha256:" + hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest(),
            )
        )
    return sorted(found, key=lambda model: (model.info.family, model.info.rung))


def _info(
    family: Family, variant: Variant, manifest: Manifest, settings: LocalModels, prior: SpeedPrior
) -> ReplicaInfo:
    if manifest.variant != variant.name:
        raise ArtifactError(
            f"the store's directory of `{variant.name}` holds `{manifest.variant}`; "
            f"run: overspill models pull {family.name} --prepare"
        )
    return ReplicaInfo(
        replica_id=f"local/{variant.name}",
        endpoint="local",
        tier="edge",
        remote=False,
        family=family.name,
        variant=variant.name,
        rung=variant.rung,
        quality=variant.quality,
        context_tokens=min(settings.context_tokens, manifest.context_tokens),
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


def _load(directory: Path, manifest: Manifest, settings: LocalModels, profile: Profile) -> Runtime:
    """Load a model, unless it would drive the device out of memory.

    Raises:
        ReplicaUnreachable: there is not enough memory now.
        ConfigError: the profile's accelerator is missing and no fallback is allowed.
        ArtifactError: the artifact cannot be loaded.
    """
    needed = sum(file.bytes for file in manifest.files.values()) + _WORKING_BYTES
    free = available_bytes()
    if free < needed:
        raise ReplicaUnreachable(
            f"{manifest.variant} needs {needed / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free: "
            "leave it out of models.variants, or free memory"
        )
    options = msgspec.structs.replace(profile.runtime, intra_op_threads=settings.intra_op_threads)
    runtime = open_runtime(
        RuntimeRequest(directory, options, settings.kv_slots, settings.context_tokens, settings.prefill_chunk_tokens)
    )
    if runtime.facts.fallbacks and not settings.allow_provider_fallback:
        runtime.close()
        raise ConfigError(
            f"{manifest.variant}: {'; '.join(runtime.facts.fallbacks)}; install it, or set "
            "models.allow_provider_fallback = true to serve on the CPU",
            param="models.allow_provider_fallback",
        )
    return runtime


def describe_runtime(options: RuntimeOptions) -> str:
    """One line for `edge profile` and `edge check`."""
    threads = options.intra_op_threads or "all"
    return f"{options.name} on {', '.join(options.providers)}, {threads} threads an operator"
