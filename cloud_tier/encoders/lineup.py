"""Which `[[models]]` entries are sentence encoders, and what each becomes on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from cloud_tier.config import ModelConfig
from cloud_tier.encoders.torch_encoder import OpenTorchEncoder
from models.catalogue.families import Catalogue, Family
from models.formats.encoder import read_encoder_config
from models.pipelines.embedding import Embedding, EncoderShape, embedding_stages
from models.pipelines.pipeline import PipelinePlan
from models.pipelines.replica import ServedPipeline, turn_tokens
from models.store.store import ModelStore
from router.base.errors import ConfigError, ModelNotFound
from router.base.host import usable_cores
from router.values.replica import ReplicaInfo, SpeedPrior
from router.values.status import ReplicaFacts
from router.values.task import Task

_FLOPS = {"cpu": 40e9, "cuda": 30e12}
_LOAD_S = 10.0  # importing torch is most of it


def divide(entries: Sequence[ModelConfig], catalogue: Catalogue) -> tuple[list[ModelConfig], list[ModelConfig]]:
    """Return the entries of models that generate, and those of encoders."""
    encoders = [entry for entry in entries if _is_encoder(entry, catalogue)]
    return [entry for entry in entries if entry not in encoders], encoders


def _is_encoder(entry: ModelConfig, catalogue: Catalogue) -> bool:
    if entry.variant is None:
        return False
    try:
        return _family(entry.variant, catalogue).task == "embed"
    except ModelNotFound:
        return False  # told where models that generate are lined up


def _family(name: str, catalogue: Catalogue) -> Family:
    known = {family.name: family for family in catalogue}
    return known[name] if name in known else catalogue.family_of(name)


def processes_of(entries: Sequence[ModelConfig]) -> int:
    """Count the processes in which encoders compute."""
    return sum(entry.batching.instances for entry in entries)


def line_up_encoders(
    entries: Sequence[ModelConfig], catalogue: Catalogue, store: ModelStore, *, beside: int = 0
) -> tuple[ServedPipeline, ...]:
    """Resolve every entry of an encoder.

    Args:
        beside: processes of other models that compute on this machine: all of them share its cores alike.

    Raises:
        ConfigError: an entry asks for what encoders do not have, or for an artifact of devices.
        ArtifactError: weights are missing or damaged; names the command that brings them.
    """
    threads = max(1, usable_cores() // max(1, processes_of(entries) + beside))
    return tuple(_served(entry, catalogue, store, threads) for entry in entries)


def _served(entry: ModelConfig, catalogue: Catalogue, store: ModelStore, threads: int) -> ServedPipeline:
    family = _family(str(entry.variant), catalogue)
    named = [v for v in family.variants if v.name == entry.variant] or [
        v for v in family.variants if v.format == "weights"
    ]
    if not named or named[0].format != "weights":
        weights = ", ".join(v.name for v in family.variants if v.format == "weights")
        raise ConfigError(
            f"`{entry.variant}` is an artifact for devices; of this family the cloud serves: {weights or 'none'}",
            param="models.variant",
        )
    variant = named[0]
    dtype = "float32" if entry.dtype == "auto" else entry.dtype
    if dtype == "int8" or entry.tensor_parallel > 1 or entry.draft is not None:
        raise ConfigError(
            f"`{variant.name}` is a sentence encoder: it has no dtype = `int8`, tensor_parallel or draft here",
            param="models.dtype",
        )
    source = store.source_path(family)
    config = read_encoder_config(source)
    window = min(entry.max_context_tokens or family.context_tokens, family.context_tokens)
    opens = OpenTorchEncoder(source, entry.device, dtype, entry.threads or threads)
    shape = EncoderShape(source / "tokenizer.json", window, config.vocab_size, config.hidden_size)
    batching = entry.batching
    stages = embedding_stages(
        shape,
        opens,
        batching.settings,
        instances=batching.instances,
        pool="processes",
        timeout_s=entry.step_timeout_s,
        start_timeout_s=entry.start_timeout_s,
    )
    compute = _FLOPS["cuda" if entry.device == "cuda" else "cpu"] / (2 * family.parameters)
    prior = SpeedPrior(compute, compute, 0.0, source=f"estimated from {family.parameters / 1e6:.0f} M parameters")
    info = ReplicaInfo(
        replica_id=f"cloud/{variant.name}",
        endpoint=f"cloud/{variant.name}",
        tier="cloud",
        remote=False,
        family=family.name,
        variant=variant.name,
        rung=variant.rung,
        quality=variant.quality,
        context_tokens=window,
        prior=prior,
        tasks=frozenset({Task.EMBED}),
        turn_tokens=turn_tokens(prior),
    )
    return ServedPipeline(
        info,
        batching.slots,
        Embedding(config.hidden_size),
        lambda: PipelinePlan(variant.name, stages, batching.queue_inputs),
        load_s=_LOAD_S,
        facts=ReplicaFacts(kind="torch"),
    )
